"""Training an EAGLE3 head: the loss is that of the head as it will be used, and what is made survives kills."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd import LLM, SamplingParams
from hvd.cli.main import main
from hvd.errors import HVDError, TrainingError
from hvd.models.checkpoint import Checkpoint, load_checkpoint
from hvd.models.eagle3 import NumpyHead
from hvd.models.eagle3_checkpoint import load_eagle3
from hvd.models.torch_target import TorchTarget
from hvd.traces.prompts import Prompt, Turn
from hvd.traces.schema import Trace
from hvd.training.eagle3.answers import target_answers
from hvd.training.eagle3.export import write_head
from hvd.training.eagle3.fit import Fit, FitOptions, Point, Score, evaluate
from hvd.training.eagle3.packs import make_pack
from hvd.training.eagle3.place import only_run
from hvd.training.eagle3.states import StateStore
from hvd.training.eagle3.text import Document, coverage, documents_of, draft_vocabulary, hold_out
from hvd.training.eagle3.train import Eagle3Options, new_head, train_eagle3, write_text
from hvd.training.eagle3.workers import Writer, _follow, write_text_with

STEPS = 4
CURVE = [Point(1, 1, 1.0, 2.0, Score((0.1,), (0.1,), 2.0))]
OPTIONS = FitOptions(steps=STEPS, length=64, epochs=2, precision="float32", learning_rate=3e-3)


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Callable[..., Path]) -> Checkpoint:
    return load_checkpoint(tiny_model("llama"))


@pytest.fixture(scope="module")
def target(checkpoint: Checkpoint) -> TorchTarget:
    return TorchTarget(checkpoint, dtype="float32")


def documents(target: TorchTarget, count: int = 24, seed: int = 0) -> list[Document]:
    """Texts that count up in steps: easy to foresee for who looks at the text."""
    rng = np.random.default_rng(seed)
    vocab, found = target.spec.vocab_size, []
    for number in range(count):
        size = int(rng.integers(20, 40))
        tokens = (rng.integers(vocab) + np.arange(size) * rng.integers(1, 3)) % vocab
        found.append(Document(tokens.astype(np.int32), int(rng.integers(2, 9)), f"d/{number}#turn0", "d"))
    return found


def store_of(target: TorchTarget, texts: list[Document], folder: Path, max_bytes: int = 10**9) -> StateStore:
    store = StateStore(target, texts, folder, max_bytes)
    store.compute()
    return store


# -- the loss is of the head as it drafts --------------------------------------------------------------------------


def test_a_chain_of_the_trained_head_is_what_training_saw(
    checkpoint: Checkpoint, target: TorchTarget, tmp_path: Path
) -> None:
    """The exported head, run with a cache and fed the text's tokens, gives at each step the logits of the module."""
    texts = documents(target, 3)
    ids = np.arange(0, target.spec.vocab_size, 2)
    head = new_head(checkpoint, target, ids, Eagle3Options(fit=OPTIONS, from_target=False))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.half().float())  # the file holds float16
    store = store_of(target, texts, tmp_path)
    seen = _logits_of_every_step(head, store, texts)
    write_head(tmp_path / "head", head, ids, target.spec, {"options": {"length": 64}, "text": _facts()}, CURVE)
    loaded = NumpyHead(load_eagle3(tmp_path / "head", target.spec, checkpoint.tensor))
    assert loaded.target_ids.tolist() == ids.tolist()
    row = 0
    for number, text in enumerate(texts):
        states = store[number][0].float().numpy()
        for base in range(max(0, text.answer - 1 - STEPS), len(text.tokens) - 2):
            cache = loaded.open()
            features = loaded.fuse(states[: base + 1])
            out = loaded.forward(text.tokens[1 : base + 2], features, cache)
            cache.length = base + 1
            for step in range(STEPS):
                np.testing.assert_allclose(out.logits[-1], seen[step][row], rtol=2e-3, atol=2e-3)
                if base + 2 + step >= len(text.tokens):
                    break
                token = text.tokens[base + 2 + step : base + 3 + step]
                out = loaded.forward(token, out.features[-1:], cache, start=base + 1 + step)
            row += 1
    assert row == len(seen[0]) > 50


def _logits_of_every_step(head: object, store: StateStore, texts: list[Document]) -> list[np.ndarray]:
    """What the module's output matrix gave at each step, [rows, V]."""
    seen: list[np.ndarray] = []
    hook = head.lm_head.register_forward_hook(lambda _m, _i, out: seen.append(out.detach().numpy()))  # type: ignore[attr-defined]
    pack = make_pack(store, texts, range(len(texts)), torch.device("cpu"))
    with torch.no_grad():
        list(head.steps(pack, STEPS))  # type: ignore[attr-defined]
    hook.remove()
    return seen


def _facts() -> dict[str, object]:
    return {"documents": 1, "tokens": 1, "answer_tokens": 1, "held_documents": 1, "coverage": 1.0, "datasets": {"d": 1}}


def test_a_head_begins_as_the_targets_last_layer(checkpoint: Checkpoint, target: TorchTarget) -> None:
    head = new_head(checkpoint, target, np.arange(16), Eagle3Options(fit=OPTIONS))
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        theirs = checkpoint.tensor(f"model.layers.{checkpoint.config.num_layers - 1}.self_attn.{part}.weight")
        weight = getattr(head.midlayer.self_attn, part).weight.detach().numpy()
        assert np.array_equal(weight[:, -checkpoint.config.hidden_size :], theirs), part


def test_packing_changes_nothing(checkpoint: Checkpoint, target: TorchTarget, tmp_path: Path) -> None:
    texts = documents(target, 5)
    store = store_of(target, texts, tmp_path)
    head = new_head(checkpoint, target, np.arange(target.spec.vocab_size), Eagle3Options(fit=OPTIONS))
    together = evaluate(head, store, texts, replace(OPTIONS, length=10_000))
    apart = evaluate(head, store, texts, replace(OPTIONS, length=1))
    assert together.accepted == apart.accepted
    assert together.loss == pytest.approx(apart.loss, rel=1e-5)


def test_the_loss_is_the_cross_entropy_with_the_targets_distribution(
    checkpoint: Checkpoint, target: TorchTarget, tmp_path: Path
) -> None:
    """At its least, a head that repeats the target's distribution, the loss is that distribution's entropy."""
    texts = documents(target, 2)
    store = store_of(target, texts, tmp_path)
    ids = np.arange(target.spec.vocab_size)
    head = new_head(checkpoint, target, ids, Eagle3Options(fit=OPTIONS))
    pack = make_pack(store, texts, range(2), torch.device("cpu"))
    seen = _logits_of_every_step(head, store, texts)
    results = list(head.steps(pack, STEPS))
    expected, row, count = 0.0, 0, 0
    for number, text in enumerate(texts):
        logits = store[number][1].float() @ target.decoder.head.float().T
        for base in range(max(0, text.answer - 1 - STEPS), len(text.tokens) - 2):
            if base + 2 >= text.answer:
                wanted = torch.softmax(logits[base + 1], -1)
                expected -= float((wanted * torch.log_softmax(torch.tensor(seen[0][row]), -1)).sum())
                count += 1
            row += 1
    assert int(results[0].rows) == count
    assert results[0].loss.item() == pytest.approx(expected, rel=1e-4)


# -- it learns, and what was killed goes on ------------------------------------------------------------------------


def test_it_learns_and_a_resumed_run_ends_where_a_straight_one_does(
    checkpoint: Checkpoint, target: TorchTarget, tmp_path: Path
) -> None:
    texts = documents(target, 40)
    train, held = texts[:32], texts[32:]
    stores = store_of(target, train, tmp_path), store_of(target, held, tmp_path)

    def fit(name: str) -> Fit:
        head = new_head(checkpoint, target, np.arange(target.spec.vocab_size), Eagle3Options(fit=OPTIONS))
        return Fit(head, (stores[0], train), (stores[1], held), tmp_path / name, OPTIONS, {})

    straight = fit("straight.pt")
    before = evaluate(straight.head, stores[1], held, OPTIONS)
    straight.run()
    assert straight.curve[-1].score.loss < before.loss

    def kill(_what: str, done: int, _total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit("killed.pt").run(kill)
    resumed = fit("killed.pt")
    resumed.run()
    assert [p.score for p in resumed.curve] == [p.score for p in straight.curve]
    for one, other in zip(resumed.head.parameters(), straight.head.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_loss_that_is_no_number_ends_it_and_keeps_the_checkpoint(
    checkpoint: Checkpoint, target: TorchTarget, tmp_path: Path
) -> None:
    texts = documents(target, 8)
    store = store_of(target, texts, tmp_path)
    options = replace(OPTIONS, epochs=1)
    head = new_head(checkpoint, target, np.arange(target.spec.vocab_size), Eagle3Options(fit=options))
    fit = Fit(head, (store, texts), (store, texts), tmp_path / "c.pt", options, {})
    fit.run()
    before = (tmp_path / "c.pt").read_bytes()
    options = replace(options, epochs=2)
    fit = Fit(head, (store, texts), (store, texts), tmp_path / "d.pt", options, {})
    with torch.no_grad():
        head.fc.weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match=r"loss became nan.*lower --learning-rate"):
        fit.run()
    assert (tmp_path / "c.pt").read_bytes() == before


def test_checkpoints_of_other_settings_and_damaged_ones_are_refused(
    checkpoint: Checkpoint, target: TorchTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = documents(target, 6)
    store = store_of(target, texts, tmp_path)
    path = tmp_path / "c.pt"

    def fit(options: FitOptions) -> Fit:
        head = new_head(checkpoint, target, np.arange(target.spec.vocab_size), Eagle3Options(fit=options))
        return Fit(head, (store, texts), (store, texts), path, options, {})

    fit(replace(OPTIONS, epochs=1)).run()
    with pytest.raises(TrainingError, match=r"made with learning_rate 0\.003, now 0\.1"):
        fit(replace(OPTIONS, epochs=1, learning_rate=0.1))
    monkeypatch.setattr("hvd.training.eagle3.fit.FORMAT", 99)
    with pytest.raises(TrainingError, match=r"another version \(format 2, this one reads 99\); --restart"):
        fit(replace(OPTIONS, epochs=1))
    monkeypatch.undo()
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(TrainingError, match="damaged"):
        fit(replace(OPTIONS, epochs=1))


# -- states --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [0, 10**9])
def test_kept_and_recomputed_states_are_those_of_the_target(
    target: TorchTarget, tmp_path: Path, max_bytes: int
) -> None:
    texts = documents(target, 4)
    store = store_of(target, texts, tmp_path, max_bytes)
    assert store.stored == (1.0 if max_bytes else 0.0)
    assert len(list(tmp_path.glob("states-*.npy"))) == (1 if max_bytes else 0)
    for number, text in enumerate(texts):
        states, final = store[number]
        np.testing.assert_allclose(states.float(), target.hidden_states(text.tokens), rtol=2e-3, atol=2e-3)
        assert final.shape == (len(text.tokens), target.spec.hidden_size)


def test_states_are_not_computed_twice(target: TorchTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = documents(target, 4)
    store_of(target, texts, tmp_path)
    monkeypatch.setattr(target, "read", None)
    store_of(target, texts, tmp_path)
    with pytest.raises(TypeError):
        store_of(target, texts[1:], tmp_path)


def test_a_full_disk_is_told_before_the_work(
    target: TorchTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("usage", (), {"free": 1 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    with pytest.raises(TrainingError, match=r"no room for the hidden states.*--states-gb"):
        store_of(target, documents(target, 4), tmp_path)


# -- text ----------------------------------------------------------------------------------------------------------


def trace(response: list[int], id_: str = "a/1#turn0", prompt: tuple[int, ...] = (1, 2, 3)) -> Trace:
    return Trace(
        id=id_, prompt=np.array(prompt, np.int32), response=np.array(response, np.int32), dataset="a",
        token_classes=np.zeros(0, np.uint8), model="m", tokenizer_fingerprint="f",
    )  # fmt: skip


def test_documents_are_cut_at_loops_and_at_the_length() -> None:
    text = list(range(20))
    [looping] = documents_of([trace(text + [7, 8] * 60)], 1000)
    assert 23 < len(looping.tokens) < 3 + 20 + 2 + 40
    [cut] = documents_of([trace(text)], 10)
    assert len(cut.tokens) == 10
    assert cut.counts.tolist() == [False] * 3 + [True] * 7
    assert documents_of([trace([4, 5])], 1000) == []


def test_groups_are_held_out_whole() -> None:
    texts = documents_of([trace(list(range(9)), f"set/{n // 3}#turn{n % 3}") for n in range(300)], 100)
    train, held = hold_out(texts, 0.2, seed=0)
    assert 20 < len(held) < 120
    assert not {d.group for d in train} & {d.group for d in held}
    few = documents_of([trace(list(range(9)), f"set/{n}") for n in range(2)], 100)
    assert [len(part) for part in hold_out(few, 1e-9, seed=0)] == [1, 1]
    assert [len(part) for part in hold_out(few, 1.0, seed=0)] == [1, 1]
    assert [len(part) for part in hold_out(few[:1], 0.5, seed=0)] == [1, 0]


def test_the_draft_vocabulary_is_what_answers_use() -> None:
    texts = documents_of([trace([5, 5, 5, 9, 9, 7], prompt=(3, 3, 3, 3))], 100)
    assert draft_vocabulary(texts, 3, 12).tolist() == [5, 7, 9]
    assert draft_vocabulary(texts, 4, 12).tolist() == [3, 5, 7, 9]
    assert draft_vocabulary(texts, 99, 12).tolist() == list(range(12))
    assert coverage(texts, np.array([5, 9])) == pytest.approx(5 / 6)


# -- the whole way -------------------------------------------------------------------------------------------------


def test_from_prompts_to_a_head_that_drafts(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> dict[str, Any]:
        assert main(arguments) == 0, capsys.readouterr().err
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    model, prompts, out = str(tiny_model("llama")), tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("\n".join(json.dumps({"id": f"p{n}", "prompt": f"w{n} w{n + 1} w{n + 2}"}) for n in range(12)))
    small = ["--max-tokens", "24", "--epochs", "1", "--length", "64", "--vocab", "16", "--hold-out", "0.3"]
    numbers = ["--temperatures", "0,1", "--dtype", "float32", "--precision", "float32", "--json"]
    command = ["train", "eagle3", "-m", model, "-d", str(prompts), "-o", str(out), *small, *numbers]
    report = run(*command)
    assert report["text"]["documents"] == 24
    assert {path.name for path in (out / "head").iterdir()} == {
        "model.safetensors", "config.json", "training_args.json", "curve.json", "README.md"
    }  # fmt: skip
    assert run(*command)["curve"] == report["curve"], "everything was there already"
    head = ["--eagle3", str(out / "head"), "--policy", "eagle3"]
    spoken = run("generate", "w1 w2", "--raw", "-m", model, *head, "--max-tokens", "12", "--json")
    assert spoken["arms"]["eagle3"]["drafted"] > 0


def test_workers_make_the_text_that_one_process_takes(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model, prompts = str(tiny_model("llama")), [prompt(f"p{n}", f"w{n} w{n + 1}") for n in range(5)]
    options = Eagle3Options(max_tokens=8, temperatures=(0.0, 1.0), fit=OPTIONS)
    writer, said = Writer(model, "float32", "cpu", threads=2), []
    write_text_with(2, writer, prompts, tmp_path, options, lambda *state: said.append(state), lambda _: None)
    assert max(done for _, done, _ in said) == 5
    assert {total for *_, total in said} <= {2, 3, 5}
    made = sorted(tmp_path.glob("text/*/*.parquet"))
    traces = write_text(writer.open(), prompts, tmp_path, options, lambda *_: None, lambda _: None)
    assert len(traces) == 10
    assert sorted(tmp_path.glob("text/*/*.parquet")) == made, "nothing was made again"


def test_a_worker_that_fails_or_dies_is_told(tmp_path: Path) -> None:
    options = Eagle3Options(max_tokens=8, fit=OPTIONS)
    missing = Writer(str(tmp_path / "nowhere"), "float32", "cpu")
    with pytest.raises(HVDError, match="nowhere"):
        write_text_with(2, missing, [prompt("a", "w1"), prompt("b", "w2")], tmp_path, options, lambda *_: None, print)
    context = multiprocessing.get_context("spawn")
    killed = context.Process(target=os._exit, args=(9,))
    killed.start()
    with pytest.raises(TrainingError, match=r"died \(exit code 9; out of memory\?\)"):
        _follow([killed], context.Queue(), lambda *_: None, print)


@pytest.mark.parametrize(("when", "how"), [("starting", "TERM"), ("writing", "TERM"), ("starting", "INT")])
def test_an_end_from_outside_ends_the_workers_too(
    when: str, how: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("\n".join(json.dumps({"id": f"p{n}", "prompt": f"w{n % 40}"}) for n in range(20_000)))
    command = ["train", "eagle3", "-m", str(tiny_model("llama")), "-d", str(prompts), "-o", str(out), "--workers", "2"]
    small = ["--batch", "2", "--max-tokens", "8", "--dtype", "float32", "--device", "cpu"]
    run = subprocess.Popen(
        [sys.executable, "-m", "hvd", *command, *small],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored behind an '&'
    )
    deadline = time.monotonic() + 120
    begun = "text/*/*.parquet" if when == "writing" else ".lock"
    while not any(out.glob(begun)) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if how == "INT":
        time.sleep(1)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to all of them
    else:
        run.terminate()
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert f"what was made is kept in {out}" in said
    assert "Traceback" not in said
    while time.monotonic() < deadline:
        try:
            os.killpg(run.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a worker lives on")


def test_nothing_to_learn_from_is_one_line(checkpoint: Checkpoint, target: TorchTarget, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="nothing to learn from: 1 usable answers to 1 prompts"):
        train_eagle3(checkpoint, target, [trace([1, 2, 3, 4, 5])], tmp_path, Eagle3Options(fit=OPTIONS))
    with pytest.raises(TrainingError, match="token 100000, beyond the target's vocabulary"):
        train_eagle3(checkpoint, target, [trace([1, 2, 3, 4, 10**5])], tmp_path, Eagle3Options(fit=OPTIONS))


# -- nothing stale, nothing foreign --------------------------------------------------------------------------------


def answers(llm: LLM, folder: Path, *prompts: Prompt, **params: Any) -> list[Trace]:
    sampling = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **params})
    return target_answers(llm, prompts, folder, sampling, 64, lambda *_: None, lambda _: None)


def prompt(id_: str, text: str) -> Prompt:
    return Prompt(id_, "d", "c", "train", (Turn(({"role": "user", "content": text},)),))


def test_answers_are_taken_again_only_where_nothing_changed(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    llm = LLM(tiny_model("llama"), backend="torch", predictor="none")
    [first] = answers(llm, tmp_path, prompt("a", "w1 w2"))
    assert answers(llm, tmp_path, prompt("a", "w1 w2"))[0].created == first.created
    [changed] = answers(llm, tmp_path, prompt("a", "w3 w4"))
    assert changed.id != first.id
    assert changed.created > first.created
    [longer] = answers(llm, tmp_path, prompt("a", "w1 w2"), max_tokens=12)
    assert len(longer.response) == 12
    other = LLM(tiny_model("llama", seed=5), backend="torch", predictor="none")
    assert answers(other, tmp_path, prompt("a", "w1 w2"))[0].model_fingerprint != first.model_fingerprint
    both = answers(llm, tmp_path, prompt("a", "w1 w2"), prompt("b", "w5"))
    assert sorted(t.id.partition("#")[0] for t in both) == ["a", "b"]


def test_one_run_at_a_time_and_what_a_kill_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "states").mkdir()
    (tmp_path / ".head.abc").mkdir()
    for name in (".checkpoint.pt.abc", "states/.states-1.npy.abc", "states/states-1.npy"):
        (tmp_path / name).touch()
    with only_run(tmp_path):
        assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == [
            ".lock", "states", "states/states-1.npy"
        ]  # fmt: skip
        with pytest.raises(TrainingError, match="another run is at work"), only_run(tmp_path):
            pass
    with only_run(tmp_path):
        pass


def test_a_directory_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "precious.txt").touch()
    with pytest.raises(TrainingError, match=r"not part of a head \(precious\.txt\)"), only_run(tmp_path):
        pass
    assert (tmp_path / "head" / "precious.txt").exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_shard_is_computed_anew(target: TorchTarget, tmp_path: Path, damage: str) -> None:
    texts = documents(target, 3)
    before = store_of(target, texts, tmp_path)[0][0].clone()
    [shard] = tmp_path.glob("states-*.npy")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes({"flip": bytes(content), "cut": bytes(content[:200]), "empty": b""}[damage])
    assert torch.equal(store_of(target, texts, tmp_path)[0][0], before)


def test_a_flipped_bit_of_a_checkpoint_is_seen(checkpoint: Checkpoint, target: TorchTarget, tmp_path: Path) -> None:
    texts = documents(target, 6)
    store = store_of(target, texts, tmp_path)
    options = replace(OPTIONS, epochs=1)

    def fit() -> Fit:
        head = new_head(checkpoint, target, np.arange(target.spec.vocab_size), Eagle3Options(fit=options))
        return Fit(head, (store, texts), (store, texts), tmp_path / "c.pt", options, {})

    fit().run()
    whole = (tmp_path / "c.pt").read_bytes()
    for place in range(0, len(whole), len(whole) // 20):
        content = bytearray(whole)
        content[place] ^= 1
        (tmp_path / "c.pt").write_bytes(content)
        with pytest.raises(TrainingError, match="damaged"):
            fit()
