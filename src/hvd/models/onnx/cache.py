"""Where converted models live, and which of them may be used.

    <cache>/onnx/<fingerprint>-<weights>-<format>/
        model.onnx  weights.bin      graph and weights (`graph`)
        rope.npy                     cosines and sines of all positions
        config.json                  shape of the model, what was done to its weights, sizes of the other files

The name ends in "r" where matrices are laid out for the runtime's products, because the processor can't do ours.

The tokenizer stays with the checkpoint: it, the template and the end-of-sequence ids may change while the weights stay.

A directory is written under a temporary name, flushed to disk and renamed, so one that bears the final name is whole;
two processes converting at once both succeed: the second rename loses and its work is thrown away. A directory whose
files are not of the stated sizes (a full disk, a torn copy) is never used, and replaced by the next conversion.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from hvd.models.config import ModelConfig, RopeConfig

FORMAT = 5
GRAPH_FILE = "model.onnx"
WEIGHTS_FILE = "weights.bin"
ROPE_FILE = "rope.npy"
CONFIG_FILE = "config.json"
FORMATS = ("int4", "int8", "fp32")


@dataclass(frozen=True, slots=True)
class Converted:
    """A converted model on disk.

    weights       "int4", "int8" or "fp32"
    quantization  what became of the linear layers, by the checkpoint's number format: "Q8_0 carried over", ...
    """

    directory: Path
    config: ModelConfig
    name: str
    fingerprint: str
    weights: str
    quantization: dict[str, int]


def cache_root() -> Path:
    """HVD_CACHE, or the user's cache directory for this program."""
    root = os.environ.get("HVD_CACHE")
    return Path(root) if root else user_cache_path("hvd")


def directory_of(fingerprint: str, weights: str) -> Path:
    """Where a conversion of the checkpoint with this fingerprint lives."""
    from hvd.models.onnx.linear import PACKED  # Numba: half a second that a look at the cache's root does without

    return cache_root() / "onnx" / f"{fingerprint}-{weights}-{FORMAT}{'' if PACKED else 'r'}"


def find(fingerprint: str, weights: str) -> Converted | None:
    """The finished conversion, or None. One that is torn or of a foreign format is not used."""
    directory = directory_of(fingerprint, weights)
    try:
        facts = json.loads((directory / CONFIG_FILE).read_text("utf-8"))
        whole = facts["format"] == FORMAT and all(
            (directory / name).stat().st_size == size for name, size in facts["files"].items()
        )
        return _converted(directory, facts) if whole and facts["fingerprint"] == fingerprint else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def describe(converted: Converted) -> None:
    """Write `config.json`, the last file of a conversion: facts, and the sizes of all files there are."""
    directory = converted.directory
    facts = {
        "format": FORMAT,
        "name": converted.name,
        "fingerprint": converted.fingerprint,
        "weights": converted.weights,
        "quantization": converted.quantization,
        "model": asdict(converted.config),
        "files": {path.name: path.stat().st_size for path in directory.iterdir()},
    }
    (directory / CONFIG_FILE).write_text(json.dumps(facts, indent=2), "utf-8")


def sweep(folder: Path) -> None:
    """Remove what killed conversions left behind more than a day ago (a younger one may still be at work)."""
    for path in folder.glob(".*"):
        with suppress(FileNotFoundError):  # its own process may be removing it
            if time.time() - path.stat().st_mtime > 24 * 3600:
                shutil.rmtree(path, ignore_errors=True)


def publish(fresh: Path, final: Path, fingerprint: str, weights: str) -> None:
    """Flush a finished directory and give it its name. Whoever comes second keeps the first one's, unless broken."""
    for path in (*fresh.iterdir(), fresh):
        _flush(path)
    for _ in range(3):
        try:
            os.rename(fresh, final)
            return _flush(final.parent)
        except OSError:
            if find(fingerprint, weights) is not None:
                return None
            shutil.rmtree(final, ignore_errors=True)
    return None


def _flush(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _converted(directory: Path, facts: dict[str, Any]) -> Converted:
    model = dict(facts["model"])
    config = ModelConfig(**{**model, "rope": RopeConfig(**model["rope"])})
    return Converted(directory, config, facts["name"], facts["fingerprint"], facts["weights"], facts["quantization"])
