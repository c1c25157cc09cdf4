"""Heads converted for ONNX Runtime: the cache of conversions, and how close rounded weights stay.

Their mathematics are tested together with the NumPy head's, in test_eagle3_head.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvd.errors import CheckpointError, ConfigError
from hvd.models.eagle3 import Eagle3Head, NumpyHead
from hvd.models.eagle3_checkpoint import load_eagle3
from hvd.models.onnx import eagle3 as eagle3_onnx
from hvd.models.onnx.eagle3 import OnnxHead, OnnxHeadCache, load_head
from tiny_head import TARGET, make_head, target_tensor, target_with


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HVD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "eagle3"


@pytest.fixture
def head_folder(tmp_path: Path) -> Path:
    return make_head(tmp_path / "head")


def forbidden(name: str) -> np.ndarray:
    raise AssertionError(f"asked for {name} of the target again")


def logits(head: Eagle3Head, count: int = 40) -> np.ndarray:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 32, count).astype(np.int32)
    features = head.fuse(rng.normal(size=(count, 48)).astype(np.float32))
    return head.forward(tokens, features, head.open(), last=False).logits


def test_a_head_is_converted_once(cache: Path, head_folder: Path) -> None:
    first = logits(load_head(head_folder, TARGET, target_tensor))
    (directory,) = cache.iterdir()
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    second = load_head(head_folder, TARGET, forbidden)
    np.testing.assert_array_equal(logits(second), first)
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_another_head_target_or_format_is_another_conversion(cache: Path, tmp_path: Path, head_folder: Path) -> None:
    load_head(head_folder, TARGET, target_tensor)
    load_head(head_folder, TARGET, target_tensor, weights="int8")
    load_head(head_folder, target_with(fingerprint="beef"), target_tensor)
    load_head(make_head(tmp_path / "other", seed=1), TARGET, target_tensor)
    assert len(list(cache.iterdir())) == 4


def test_a_refused_head_leaves_nothing_behind(cache: Path, tmp_path: Path) -> None:
    folder = make_head(tmp_path / "head", target_fingerprint="f00d")
    with pytest.raises(CheckpointError, match="another target"):
        load_head(folder, target_with(fingerprint="beef"), target_tensor)
    assert not cache.exists()
    assert isinstance(load_head(folder, target_with(fingerprint="beef"), target_tensor, any_target=True), OnnxHead)
    with pytest.raises(CheckpointError, match="another target"):
        load_head(folder, target_with(fingerprint="beef"), target_tensor)


def test_whoever_converts_second_takes_the_firsts(
    cache: Path, head_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process finishes while this one converts."""
    write = eagle3_onnx.write_head

    def slow(directory: Path, *args: object) -> None:
        write(directory, *args)  # type: ignore[arg-type]
        monkeypatch.setattr(eagle3_onnx, "write_head", write)
        load_head(head_folder, TARGET, target_tensor)

    monkeypatch.setattr(eagle3_onnx, "write_head", slow)
    assert isinstance(load_head(head_folder, TARGET, target_tensor), OnnxHead)
    assert len(list(cache.iterdir())) == 1


def test_a_torn_conversion_is_named(cache: Path, head_folder: Path) -> None:
    load_head(head_folder, TARGET, target_tensor)
    (directory,) = cache.iterdir()
    (directory / "spec.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"converted EAGLE3 head in .*; remove it"):
        load_head(head_folder, TARGET, target_tensor)


def test_a_cache_that_cannot_be_written(tmp_path: Path, head_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("HVD_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="set HVD_CACHE to another place"):
        load_head(head_folder, TARGET, target_tensor)


def test_unknown_weights(head_folder: Path) -> None:
    with pytest.raises(ConfigError, match="int4, int8, fp32, got 'int3'"):
        load_head(head_folder, TARGET, target_tensor, weights="int3")


def test_a_head_dim_that_the_runtime_cannot_take_runs_in_numpy(cache: Path, tmp_path: Path) -> None:
    assert isinstance(load_head(make_head(tmp_path / "odd", head_dim=8), TARGET, target_tensor), NumpyHead)


@pytest.mark.parametrize(("weights", "error"), [("fp32", 1e-5), ("int8", 0.03), ("int4", 0.3)])
def test_rounded_weights_stay_close(cache: Path, head_folder: Path, weights: str, error: float) -> None:
    """Root mean square error of the logits, in their standard deviations."""
    exact = logits(NumpyHead(load_eagle3(head_folder, TARGET, target_tensor)))
    rounded = logits(load_head(head_folder, TARGET, target_tensor, weights=weights))
    assert np.sqrt(np.mean((rounded - exact) ** 2)) < error * exact.std()


@pytest.mark.parametrize("weights", ["int4", "int8", "fp32"])
def test_committed_pairs_do_not_depend_on_the_width_of_the_pass(cache: Path, tmp_path: Path, weights: str) -> None:
    """Bit for bit, every way to cut 67 pairs in two."""
    head = load_head(
        make_head(tmp_path / "wide", hidden=64, target_hidden=16, embedding=True), TARGET, forbidden, weights=weights
    )
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 32, 67).astype(np.int32)
    states = rng.normal(size=(67, 48)).astype(np.float32)
    whole = head.forward(tokens, head.fuse(states), head.open()).logits
    for cut in range(1, 67):
        cache_of_two = head.open()
        for part in (slice(0, cut), slice(cut, 67)):
            output = head.forward(tokens[part], head.fuse(states[part]), cache_of_two)
            cache_of_two.length += len(tokens[part])
        np.testing.assert_array_equal(output.logits, whole)


@pytest.mark.parametrize("weights", ["int4", "int8", "fp32"])
@pytest.mark.parametrize("count", [1, 2, 17, 33, 67])
@pytest.mark.parametrize("threads", [1, 2])
def test_pairs_that_are_only_eaten_leave_what_a_pass_leaves(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, count: int, threads: int
) -> None:
    """Bit for bit: which way a pair came into the cache must not show in any later draft."""
    if threads > 1:
        monkeypatch.setattr("hvd.models.onnx.eagle3.ONE_THREAD_BYTES", 0)
    folder = make_head(tmp_path / "wide", hidden=64, target_hidden=16, embedding=True)
    head = load_head(folder, TARGET, forbidden, weights=weights, threads=threads)
    rng = np.random.default_rng(count)
    tokens, states = rng.integers(0, 32, 5 + count).astype(np.int32), rng.normal(size=(5 + count, 48))
    states = states.astype(np.float32)
    eaten, passed = head.open(), head.open()
    for first in (eaten, passed):
        head.forward(tokens[:5], head.fuse(states[:5]), first)
        first.length = 5
    head.eat(tokens[5:], states[5:], eaten)
    head.forward(tokens[5:], head.fuse(states[5:]), passed)
    passed.length += count
    assert eaten.length == passed.length == 5 + count
    slots = np.arange(5 + count)
    assert isinstance(eaten, OnnxHeadCache)
    assert isinstance(passed, OnnxHeadCache)
    np.testing.assert_array_equal(eaten.store.read(slots), passed.store.read(slots))


def test_drafting_needs_neither_torch_nor_transformers(tmp_path: Path, head_folder: Path) -> None:
    program = f"""
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
from tiny_head import TARGET, target_tensor
from hvd.config import Eagle3Config
from hvd.drafters.eagle3 import load_eagle3_drafter
drafter = load_eagle3_drafter({str(head_folder)!r}, TARGET, target_tensor, Eagle3Config(min_prob=0.0))
drafter.open(1)
drafter.observe(1, np.zeros(9, np.int32), np.ones((9, 48), np.float32), prompt=True)
print(len(drafter.propose(1, 4)))
"""
    environment = {"HVD_CACHE": str(tmp_path / "cache"), "PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.returncode) == ("4\n", 0), done.stderr
