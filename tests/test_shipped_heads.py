"""Heads that ship: taken where the target is theirs, refused when changed, off with one word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.tiny_head import head_config, head_tensors, write_head

from hvd import LLM, SamplingParams
from hvd.errors import CheckpointError, ConfigError
from hvd.models import shipped
from hvd.models.checkpoint import load_checkpoint
from hvd.models.shipped import AUTO, NONE, ROOT, choose_head, digests, read_index
from hvd.types import Arm


@pytest.fixture
def root(tmp_path: Path, tiny_model: Callable[..., Path]) -> tuple[Path, Path, str]:
    """(where a head ships, its target, the target's fingerprint)."""
    model = tiny_model("llama")
    checkpoint = load_checkpoint(model)
    hidden, vocab = checkpoint.config.hidden_size, checkpoint.config.vocab_size
    tensors = head_tensors(hidden=hidden, target_hidden=hidden, aux=3, target_vocab=vocab, head_dim=8)
    config = head_config(tensors, target_fingerprint=checkpoint.fingerprint)
    write_head(tmp_path / "shipped" / "tiny", tensors, config | {"vocab_size": vocab})
    entry = {"folder": "tiny", "files": digests(tmp_path / "shipped" / "tiny")}
    (tmp_path / "shipped" / "index.json").write_text(json.dumps({checkpoint.fingerprint: entry}))
    return tmp_path / "shipped", model, checkpoint.fingerprint


def test_auto_takes_the_head_of_this_target_only(root: tuple[Path, Path, str]) -> None:
    folder, _, fingerprint = root
    assert choose_head(AUTO, fingerprint, folder) == folder / "tiny"
    assert choose_head(AUTO, "another", folder) is None
    assert choose_head(NONE, fingerprint, folder) is None
    assert choose_head(None, fingerprint, folder) is None
    assert choose_head("owner/head", fingerprint, folder) == "owner/head"
    with pytest.raises(ConfigError, match="'auto' or 'none', got 3"):
        choose_head(3, fingerprint, folder)  # type: ignore[arg-type]


def test_a_changed_or_missing_file_is_refused(root: tuple[Path, Path, str]) -> None:
    folder, _, fingerprint = root
    weights = folder / "tiny" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"was changed: model\.safetensors; .*--eagle3 none"):
        choose_head(AUTO, fingerprint, folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match="incomplete"):
        choose_head(AUTO, fingerprint, folder)
    (folder / "index.json").write_text("{")
    with pytest.raises(CheckpointError, match="list of shipped heads"):
        choose_head(AUTO, fingerprint, folder)


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "entry",
    [[], "tiny", None, 3, {},
     *({"folder": f, "files": {}} for f in (None, 3, "a\0b", "../x", "/tmp", ".", "..", "", "a/b")),
     *({"folder": "tiny", "files": f} for f in (None, [], "x", 3, {}, {"config.json": []})), {"folder": "tiny"}],
)  # fmt: skip
def test_a_changed_index_is_refused_with_advice(root: tuple[Path, Path, str], entry: object) -> None:
    folder, _, fingerprint = root
    (folder / "index.json").write_text(json.dumps({fingerprint: entry}))
    with pytest.raises(CheckpointError, match=r"was changed.*install hvd again.*--eagle3 none"):
        choose_head(AUTO, fingerprint, folder)


@pytest.mark.parametrize("text", [DEEP, "[]", "null", "{", "\0"])
def test_an_index_that_is_none_is_refused_with_advice(root: tuple[Path, Path, str], text: str) -> None:
    (root[0] / "index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"list of shipped heads.*install hvd again.*--eagle3 none"):
        choose_head(AUTO, "any", root[0])


def test_an_llm_takes_it_unasked_and_goes_without_when_told(
    root: tuple[Path, Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model, _ = root
    monkeypatch.setattr(shipped.choose_head, "__defaults__", (folder,))
    with_head, without = LLM(model, backend="torch"), LLM(model, backend="torch", eagle3=NONE)
    assert Arm.EAGLE3 in with_head.drafters
    assert Arm.EAGLE3 not in without.drafters
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    [one], [other] = with_head.generate([[1, 2, 3]], params, policy="eagle3"), without.generate([[1, 2, 3]], params)
    assert one.token_ids == other.token_ids
    assert one.stats.arms[Arm.EAGLE3].drafted > 0


def test_everything_that_ships_is_as_it_was_shipped() -> None:
    index = read_index()
    assert {entry["folder"] for entry in index.values()} == {path.name for path in ROOT.iterdir() if path.is_dir()} - {
        "__pycache__"
    }
    for fingerprint in index:
        assert isinstance(choose_head(AUTO, fingerprint), Path)
    assert sum(path.stat().st_size for path in ROOT.rglob("model.safetensors")) <= 16 * 1024 * 1024
