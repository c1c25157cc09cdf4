"""Analysis of logs: figures that can be counted by hand, sources of copies, the comparison of predictors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd.analysis.analyze import AnalyzeOptions, analyze
from hvd.analysis.costs import EXAMPLES, load_cost
from hvd.analysis.encode import Asked, Encoder, Part
from hvd.analysis.learn import FOLDS, Training, Verdict, _reason, decide, folds_of, interval
from hvd.analysis.result import Analysis
from hvd.analysis.sources import CopyFinder, Source
from hvd.analysis.tokenizers import load_tokenizer
from hvd.errors import ConfigError, HVDError, ModelError
from hvd.payoff.predictor import load_predictor
from hvd.tokenizer import Tokenizer
from hvd.traces.logs_record import Recorded
from hvd.traces.schema import Trace
from hvd.traces.writer import TraceWriter
from hvd.training.replay import SimulatedHead
from hvd.types import Arm, Draft

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You copy words."},
    {"role": "user", "content": "zebra quilt fjord"},
    {"role": "assistant", "content": "vexed lynx"},
    {"role": "tool", "content": "gnome mixup hertz"},
]


@pytest.fixture
def source(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model("llama", vocab=300, eos=257))


@pytest.fixture
def tokenizer(source: str) -> Tokenizer:
    return load_tokenizer(source)


def write(path: Path, records: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return str(path)


def conversation(number: int, turns: int = 1) -> dict[str, Any]:
    """Answers that repeat their question twice, and say a number of their own."""
    messages: list[dict[str, str]] = []
    for turn in range(turns):
        words = f"item {number * 7919 % 1000} {turn} " + " ".join(
            chr(97 + (number * k + turn) % 26) * 3 for k in range(1, 9)
        )
        messages.append({"role": "user", "content": words})
        messages.append({"role": "assistant", "content": f"{words} / {words} / {number * 104729}"})
    return {"messages": messages}


def encode(tokenizer: Tokenizer, *answers: Recorded | Trace) -> list[Asked]:
    return list(Encoder(tokenizer).all(answers))


# -- tokens and parts -----------------------------------------------------------------------------------------------


def part_text(tokenizer: Tokenizer, asked: Asked, part: Part) -> str:
    return tokenizer.decode(asked.trace.prompt[asked.parts == part].tolist(), skip_special_tokens=False)


def test_every_prompt_token_has_its_part(tokenizer: Tokenizer) -> None:
    [asked] = encode(tokenizer, Recorded("f:1", "d", "g", tuple(CHAT), answer="gnome"))
    assert part_text(tokenizer, asked, Part.SYSTEM) == "You copy words."
    assert part_text(tokenizer, asked, Part.USER) == "zebra quilt fjord"
    assert part_text(tokenizer, asked, Part.TOOL) == "gnome mixup hertz"
    assert part_text(tokenizer, asked, Part.ASSISTANT) == "vexed lynx"
    assert "<|im_start|>" in part_text(tokenizer, asked, Part.TEMPLATE)
    assert tokenizer.decode(asked.trace.response.tolist()) == "gnome"
    assert asked.trace.response[-1] == 257
    assert (asked.trace.group, asked.source) == ("g", "f:1")


def test_parts_hold_where_letters_take_several_bytes(tokenizer: Tokenizer) -> None:
    chat = [
        {"role": "user", "content": "ÄÖ 😀 ü"},
        {"role": "assistant", "content": "ß"},
        {"role": "user", "content": "é"},
    ]
    [asked] = encode(tokenizer, Recorded("f:1", "d", "g", tuple(chat), answer="x"))
    assert part_text(tokenizer, asked, Part.USER) == "ÄÖ 😀 üé"
    assert part_text(tokenizer, asked, Part.ASSISTANT) == "ß"


def test_a_finished_prompt_has_the_same_parts_and_tokens(tokenizer: Tokenizer) -> None:
    [chat] = encode(tokenizer, Recorded("f:1", "d", "g", tuple(CHAT), answer="gnome"))
    prompt = tokenizer.apply_chat_template(CHAT)
    ids = np.array(tokenizer.encode(prompt, add_special_tokens=False), np.int32)
    for recorded in (
        Recorded("f:1", "d", "g", prompt=prompt, answer="gnome"),
        Recorded("f:1", "d", "g", prompt_ids=ids, answer_ids=chat.trace.response),
    ):
        [asked] = encode(tokenizer, recorded)
        assert asked.trace.prompt.tolist() == chat.trace.prompt.tolist()
        assert asked.trace.response.tolist() == chat.trace.response.tolist()
        # this template has no tool messages: it makes user messages of them
        assert "gnome mixup hertz" in part_text(tokenizer, asked, Part.USER)
        assert part_text(tokenizer, asked, Part.SYSTEM) == "\nYou copy words.<|im_end|>\n"
        assert part_text(tokenizer, asked, Part.ASSISTANT).startswith("\nvexed lynx")


def test_a_prompt_without_markers_is_one_part(tokenizer: Tokenizer) -> None:
    [asked] = encode(tokenizer, Recorded("f:1", "d", "g", prompt="once upon", answer=" a time"))
    assert set(asked.parts.tolist()) == {Part.PROMPT}


def test_logged_ids_are_believed_when_they_say_what_the_text_says(tokenizer: Tokenizer) -> None:
    ids = np.array(
        [*tokenizer.encode("g", add_special_tokens=False), *tokenizer.encode("nome", add_special_tokens=False)]
    )
    for shift, expected in ((0, ids.tolist()), (1, [*tokenizer.encode("gnome", add_special_tokens=False), 257])):
        logged = (ids + shift).astype(np.int32)
        [asked] = encode(tokenizer, Recorded("f:1", "d", "g", prompt="p", answer="gnome", answer_ids=logged))
        assert asked.trace.response.tolist() == expected


def test_a_template_that_refuses_is_gone_round(tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    encoder = Encoder(tokenizer)
    [asked] = encoder.all([Recorded("f:1", "d", "g", tuple(CHAT), answer="gnome")])
    assert encoder.refused == 1
    assert part_text(tokenizer, asked, Part.TOOL) == "gnome mixup hertz"


def test_traces_of_another_tokenizer_are_left_out(tokenizer: Tokenizer) -> None:
    ours, other = (
        Trace("a", np.array([1], np.int32), np.array([2], np.int32), np.zeros(300, np.uint8), tokenizer_fingerprint=f)
        for f in (tokenizer.fingerprint, "other")
    )
    encoder = Encoder(tokenizer)
    assert [asked.trace.tokenizer_fingerprint for asked in encoder.all([ours, other])] == [tokenizer.fingerprint]
    assert encoder.foreign == 1


# -- sources --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("zebra quilt", Source.USER),
        ("gnome mixup", Source.TOOL),
        ("vexed lynx", Source.ASSISTANT),
        ("You copy", Source.SYSTEM),
        ("crwth crwth", Source.ANSWER),
    ],
)
def test_where_a_copy_stood(tokenizer: Tokenizer, words: str, expected: Source) -> None:
    [asked] = encode(tokenizer, Recorded("f:1", "d", "g", tuple(CHAT), answer=f"so {words}"))
    response = asked.trace.response
    start = len(tokenizer.encode("so " + words[:-4], add_special_tokens=False))
    assert tokenizer.decode(response[:start].tolist()) == "so " + words[:-4]
    draft = Draft.chain(response[start:-1], Arm.CACHE, match_len=2)
    assert CopyFinder(asked).source(start, draft, len(draft)) is expected
    far = Draft.chain(response[start:-1], Arm.CACHE, match_len=2, local=False)
    assert CopyFinder(asked).source(start, far, len(far)) is Source.OTHERS


def test_the_last_place_counts_and_half_tokens_do_not() -> None:
    def finder(prompt: list[int], response: list[int], parts: list[int]) -> CopyFinder:
        trace = Trace("a", np.array(prompt, np.int32), np.array(response, np.int32), np.zeros(0, np.uint8))
        return CopyFinder(Asked(trace, "s", np.array(parts, np.uint8)))

    draft = Draft.chain(np.array([2], np.int32), Arm.CACHE, match_len=1)
    assert finder([1, 2, 1, 2], [1, 2], [1, 1, 3, 3]).source(1, draft, 1) is Source.TOOL
    # the bytes of (1, 2) also stand across the border of (256, 512), one byte off: that is no copy
    assert finder([1, 2, 256, 512, 0], [1, 2], [1, 1, 3, 3, 3]).source(1, draft, 1) is Source.SYSTEM


# -- figures --------------------------------------------------------------------------------------------------------


def run(source: str, *paths: str, **options: Any) -> Analysis:
    return analyze(paths, AnalyzeOptions(tokenizer=source, **{"learn": False, **options}))


def test_figures_agree_with_each_other(source: str, tmp_path: Path) -> None:
    found = run(source, write(tmp_path / "l.jsonl", [conversation(i, 2) for i in range(6)]))
    assert (found.answers, found.answers_found, found.groups, found.share) == (12, 12, 6, 1.0)
    names = [policy.name for policy in found.policies]
    assert names == ["plain", "cache", "match-len:4", "match-len:5", "score:3", "hvd-paper", "hvd", "oracle"]
    assert {policy.total.tokens for policy in found.policies} == {found.tokens}
    assert found.policy("plain").total.cycles == found.tokens
    cache = found.policy("cache").total
    assert found.cache_share == pytest.approx(1 - cache.cycles / cache.tokens)
    assert sum(found.payoffs.drafts) + found.payoffs.bare == cache.cycles
    assert found.payoffs.paying > 0.1
    assert sum(found.sources.values()) == pytest.approx(1.0)
    assert {Source.USER.value, Source.ANSWER.value} <= set(found.sources)
    best = found.policy("oracle").total.seconds
    for policy in found.policies:
        low, high = found.intervals[policy.name]
        assert policy.total.seconds >= best * (1 - 1e-9)
        assert low <= policy.speedup_micro * (1 + 1e-9)
        assert policy.speedup_micro <= high * (1 + 1e-9)


def test_a_verbatim_copy_is_found_and_counted(source: str, tmp_path: Path) -> None:
    words = "the quick brown fox jumps over the lazy dog while nine bold wizards vex zany sphinxes"
    record = {"messages": [{"role": "user", "content": words}, {"role": "assistant", "content": words}]}
    found = run(source, write(tmp_path / "l.jsonl", [record]))
    assert found.cache_share > 0.8
    assert next(iter(found.sources)) == Source.USER.value
    assert found.policy("hvd").speedup_micro > 2.0
    assert [gain.source for gain in found.gains] == [f"{tmp_path}/l.jsonl:1#turn0"]
    assert (found.gains[0].tokens, found.gains[0].copied) == (found.tokens, Source.USER.value)


def test_copies_from_other_requests_answers(source: str, tmp_path: Path) -> None:
    answer = "nine bold wizards vex zany sphinxes"
    asked = ["first?", "what is the second?", "and now?"]
    records = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": answer}]} for q in asked]
    found = run(source, write(tmp_path / "l.jsonl", records))
    assert next(iter(found.sources)) == Source.OTHERS.value
    # another file is another data set, whose answers do not serve
    paths = [write(tmp_path / f"{i}.jsonl", [record]) for i, record in enumerate(records)]
    assert Source.OTHERS.value not in run(source, *paths).sources


def test_loops_are_cut_and_told_of(source: str, tmp_path: Path) -> None:
    looping = "a fine start then again " + "and again " * 60
    loop = {"prompt": "go", "choices": [{"text": looping, "finish_reason": "length"}]}
    sound = {"prompt": "go", "choices": [{"text": "one two three four five six", "finish_reason": "stop"}]}
    path = write(tmp_path / "l.jsonl", [sound, loop])
    found = run(source, path)
    kept = run(source, path, keep_loops=True)
    assert found.looped == 1
    assert found.loops is not None
    assert found.loops.answers == 1
    assert found.tokens + found.loops.tokens == kept.tokens
    assert kept.loops is None
    assert found.loops.speedups["cache"] == pytest.approx(kept.policy("cache").speedup_micro)
    assert found.loops.speedups["cache"] > found.policy("cache").speedup_micro


def test_a_stated_eagle3_acceptance(source: str, tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", [conversation(i) for i in range(20)])
    found = run(source, path, head=SimulatedHead(0.75, 4))
    assert {"eagle3", "any-match"} <= {policy.name for policy in found.policies}
    expected = 1 + sum(0.75**k for k in range(1, 5))
    total = found.policy("eagle3").total
    assert total.tokens / total.cycles == pytest.approx(expected, rel=0.1)
    assert found.eagle3 is not None
    assert "0.75" in found.eagle3


def test_a_sample_is_said_to_be_one(source: str, tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", [conversation(i, 3) for i in range(30)])
    whole, part = run(source, path), run(source, path, max_tokens=600)
    assert whole.share == 1.0
    assert part.answers_found == whole.answers_found == 90
    assert part.answers == 3 * part.groups < 90
    assert part.share == pytest.approx(part.answers / 90, rel=0.15)


def test_results_repeat_and_json_has_no_text(source: str, tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", [conversation(i) for i in range(5)])
    one, two = (run(source, path).as_json() for _ in range(2))
    for each in (one, two):
        del each["seconds"]
    assert json.dumps(one, allow_nan=False) == json.dumps(two)
    assert "item" not in json.dumps(one)
    assert "item" in json.dumps(run(source, path).as_json(show_text=True)["gains"])


def test_our_traces_need_no_tokenizer(source: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    asked = encode(tokenizer, Recorded("f:1", "d", "g", tuple(CHAT), answer="zebra quilt fjord"))
    with TraceWriter(tmp_path / "t", tokenizer.token_classes()) as writer:
        writer.add(asked[0].trace)
    bare = analyze([str(tmp_path / "t")], AnalyzeOptions(learn=False))
    known = run(source, str(tmp_path / "t"))
    assert bare.policy("hvd").total.seconds == known.policy("hvd").total.seconds
    assert Source.PROMPT.value in bare.sources
    assert Source.USER.value in known.sources


# -- the comparison of predictors -----------------------------------------------------------------------------------


def test_training_is_compared_on_conversations_not_seen(source: str, tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", [conversation(i, 2) for i in range(14)])
    out = tmp_path / "p.npz"
    found = run(source, path, learn=True, train=out, predictors=("none",))
    training = found.training
    assert training is not None
    assert training.groups == 14
    assert training.low <= training.gain <= training.high
    assert training.verdict is decide(training.gain, training.low, training.high)
    assert (training.file is not None) == out.exists() == (training.verdict is Verdict.YES)
    if out.exists():
        assert load_predictor(out).metadata["traces"] == 28


def test_a_predictor_that_helps_is_written(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "l.jsonl", [conversation(i, 2) for i in range(12)])
    for verdict in (Verdict.NO, Verdict.UNSURE, Verdict.YES):
        compared = Training(verdict, 0.1, 0.0, 0.2, 12, 1000, "")
        monkeypatch.setattr("hvd.analysis.analyze.compare", lambda *given, compared=compared: compared)
        out = tmp_path / f"{verdict.name}.npz"
        training = run(source, path, learn=True, train=out).training
        assert training is not None
        assert training.file == (str(out) if verdict is Verdict.YES else None)
        assert out.exists() == (verdict is Verdict.YES)
    kept = load_predictor(tmp_path / "YES.npz")
    assert (kept.kind, kept.metadata["traces"]) == ("survival", 24)
    assert run(source, path, predictors=(str(tmp_path / "YES.npz"),)).tokens > 0


def test_too_little_data_is_said(source: str, tmp_path: Path) -> None:
    training = run(source, write(tmp_path / "l.jsonl", [conversation(1)]), learn=True).training
    assert training is not None
    assert training.verdict is Verdict.UNSURE
    assert "1 conversation," in training.reason


@pytest.mark.parametrize(
    ("gain", "low", "high", "verdict"),
    [
        (0.03, 0.02, 0.04, Verdict.YES),
        (0.001, -0.002, 0.004, Verdict.NO),
        (-0.1, -0.2, -0.01, Verdict.NO),
        (0.02, -0.05, 0.09, Verdict.UNSURE),
    ],
)
def test_the_verdict(gain: float, low: float, high: float, verdict: Verdict) -> None:
    assert decide(gain, low, high) is verdict


def test_the_interval_covers_a_known_ratio() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(100):
        after = rng.gamma(4.0, 1.0, 60)
        before = after * rng.normal(1.1, 0.2, 60).clip(0.5)
        gain, low, high = interval(before, after, seed)
        assert low <= gain <= high
        covered += low <= 0.1 <= high
    assert covered >= 85


def test_folds_are_even_and_depend_on_the_name_alone() -> None:
    names = [f"g{i}" for i in range(31)]
    folds = folds_of(names)
    counts = [list(folds.values()).count(fold) for fold in range(FOLDS)]
    assert max(counts) - min(counts) <= 1
    assert folds_of(names[::-1]) == folds


# -- costs and tokenizers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_say_that_they_are_examples(name: str) -> None:
    cost, about = load_cost(name)
    assert "example" in about
    assert ("example, measured:" in about) != ("example, ASSUMED" in about)
    curve = cost.verify_curve(64, 1000)
    assert (np.diff(curve) >= 0).all()
    assert 0.001 < curve[0] < 0.1
    assert 0 < cost.eagle3(4, 1, 1000) < 2 * curve[0]


def test_measured_examples_are_those_of_the_committed_benchmark() -> None:
    file = Path(__file__).parents[1] / "benchmarks" / "results" / "engine-smollm2.json"
    results = json.loads(file.read_text())["results"]
    cost, _ = load_cost("cpu-small")
    for row in results:
        if row["engine"] == "hvd int8":
            assert cost.verify(row["width"], row["context"]) == pytest.approx(row["min"] / 1e3, rel=1e-3)


def test_an_unknown_cost_names_the_examples() -> None:
    with pytest.raises(ConfigError, match="gpu-8b"):
        load_cost("h100")


def test_tokenizers_by_directory_and_file(source: str, tmp_path: Path) -> None:
    assert load_tokenizer(source).fingerprint == load_tokenizer(f"{source}/tokenizer.json").fingerprint
    (tmp_path / "x.gguf").write_bytes(b"nonsense")
    for bad, why in (("x.gguf", "neither a GGUF"), ("none.gguf", "no tokenizer at"), (".", "no tokenizer.json")):
        with pytest.raises(HVDError, match=why):
            load_tokenizer(str(tmp_path / bad))


def test_a_hub_id_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(hub_id: str, allow_patterns: list[str]) -> str:
        assert not any("safetensors" in pattern or "gguf" in pattern for pattern in allow_patterns)
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelError, match="neither cached nor reachable"):
        load_tokenizer("owner/name")


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(-0.001, 0.047, "not shown: the interval includes zero"), (-0.2, -0.01, "does better"), (0.001, 0.004, "as well")],
)
def test_a_no_says_what_the_interval_says(low: float, high: float, words: str) -> None:
    assert words in _reason(Verdict.NO, low, high)
