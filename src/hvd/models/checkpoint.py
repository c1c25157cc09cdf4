"""A checkpoint: configuration, weights, tokenizer and end-of-sequence ids of one model, wherever it came from.

`load_checkpoint` opens a Hugging Face directory, a hub id or a GGUF file. Nothing here needs torch or transformers;
files are mapped, and one tensor at a time is handed out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd.errors import CheckpointError, ModelError
from hvd.models.config import ModelConfig
from hvd.models.onnx.cache import cache_root
from hvd.tokenizer import Tokenizer
from hvd.types import Float32Array

Shape = tuple[int, ...]

HUB_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model*.safetensors",
]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_REMEMBERED_FROM = 8 * 1024 * 1024
"""Bytes of tensors; smaller checkpoints are read each time."""
_SETTLED_NS = 2_000_000_000
_STAMP = 5
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A matrix as a GGUF file holds it, in blocks along its rows.

    kind     the block format: "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K" or "Q6_K"
    shape    (out, in), the floats it stands for
    data     uint8 [out, blocks a row, bytes a block]
    """

    kind: str
    shape: Shape
    data: NDArray[np.uint8]


class Checkpoint(ABC):
    """One model's files, opened and checked. Tensor names are Hugging Face's ("model.layers.0.mlp.up_proj.weight").

    name            for people: the directory's or file's name, or the hub id
    config          shape of the decoder
    fingerprint     hex digest (BLAKE2b, 32 bytes) of `config` and of every tensor's name, number format, shape and all
                    its bytes. Independent of where the files lie and how they are sharded.
    eos_token_ids   ids that end a text
    """

    name: str
    config: ModelConfig
    fingerprint: str
    eos_token_ids: tuple[int, ...]

    @abstractmethod
    def tensor(self, name: str) -> Float32Array:
        """One tensor, float32, dequantized, in Hugging Face's layout. CheckpointError if there is none of that name."""

    @abstractmethod
    def quantized(self, name: str) -> QuantizedTensor | None:
        """The raw blocks of a quantized matrix, rows in Hugging Face's order; None where the file has floats."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that comes with the model."""

    def names(self) -> list[str]:
        """Names of all tensors of the model; a tied model has no "lm_head.weight"."""
        return list(expected_shapes(self.config))


def load_checkpoint(source: str | Path) -> Checkpoint:
    """Open a Hugging Face directory (safetensors), a .gguf file, or a hub id ("owner/name").

    A hub id is downloaded into huggingface_hub's own cache, or found there; HF_HUB_OFFLINE is respected.
    Raises UnsupportedModelError for what is not decoded here, CheckpointError for missing, torn or inconsistent files,
    ModelError when nothing is found.
    """
    if not str(source).strip():
        raise ModelError("the model name is empty; give a Hugging Face directory, a .gguf file or a hub id")
    try:
        path = Path(source).expanduser()
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, with a null byte, of an unknown user
        raise ModelError(f"no model at '{str(source)[:100]}': {error}") from error
    if is_directory:
        return _load_directory(path, path.resolve().name)
    if is_file:
        return _load_file(path)
    if _HUB_ID.fullmatch(str(source)) and path.suffix not in (".gguf", ".safetensors", ".bin"):
        return _load_directory(_download(str(source)), str(source))
    raise ModelError(
        f"no model at '{source}': no such directory or file, and not a hub id; give a Hugging Face directory, "
        "a .gguf file or a hub id such as 'owner/name'"
    )


def _load_directory(path: Path, name: str) -> Checkpoint:
    from hvd.models.hf_checkpoint import HFCheckpoint

    files = sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").exists():
        more = f" (or one of {len(files) - 1} more)" if len(files) > 1 else ""
        raise ModelError(f"{path} has no config.json, but a GGUF file; give that file: '{files[0]}'{more}")
    return HFCheckpoint(path, name)


def _load_file(path: Path) -> Checkpoint:
    from hvd.models.gguf_checkpoint import GGUFCheckpoint

    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error
    if magic == b"GGUF" or path.suffix == ".gguf":
        return GGUFCheckpoint(path)
    if path.suffix == ".safetensors":
        raise ModelError(f"{path} is one file of a checkpoint; give its directory, '{path.parent}'")
    raise ModelError(
        f"{path} is neither a GGUF file nor a directory with config.json; pickled weights (.bin, .pt) "
        "are not read, safetensors are"
    )


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_PATTERNS))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"no model at '{hub_id}': no such directory, and as a hub id it is neither cached nor reachable ({reason})"
        ) from error


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that a decoder of this configuration has, with its shape, in the order of the forward pass."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes |= {
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        }
    return shapes


def check_tensors(where: Path, config: ModelConfig, found: Mapping[str, Shape]) -> None:
    """Compare all tensors with what the configuration asks for; one CheckpointError names everything that is wrong."""
    if config.num_layers > len(found):  # not looked up one by one: a garbled number can be huge
        raise CheckpointError(
            f"{where}: the configuration says {config.num_layers} layers (num_hidden_layers), the files hold "
            f"{len(found)} tensors"
        )
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    misshaped = [
        f"{name} is {found[name]} instead of {shape}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    faults = [
        f"{len(names)} {what} ({_first(names)})"
        for what, names in (("missing", missing), ("not part of the model", extra), ("mis-shaped", misshaped))
        if names
    ]
    if faults:
        hint = (
            "; its configuration does not say that lm_head is tied to the embedding"
            if "lm_head.weight" in missing
            else ""
        )
        raise CheckpointError(f"{where}: tensors do not fit the configuration: {'; '.join(faults)}{hint}")


def _first(names: list[str], count: int = 5) -> str:
    return ", ".join(names[:count]) + (f", and {len(names) - count} more" if len(names) > count else "")


def fingerprint_of(
    config: ModelConfig, tensors: Iterable[tuple[str, str, Shape, NDArray[Any]]], files: Sequence[Path]
) -> str:
    """Digest as `Checkpoint.fingerprint` describes it, of (name, number format, shape, bytes as uint8 [n]).

    Large checkpoints are read whole once. What came out is kept beside the converted models with the path, size, time
    stamps and inode of `files`, all the files that the tensors come from, and believed as long as these are the same.
    """
    entries = sorted(tensors, key=lambda entry: entry[0])
    facts = hashlib.blake2b(repr((config, [entry[:3] for entry in entries])).encode(), digest_size=32).hexdigest()
    stamps = _stamps(files)
    note = cache_root() / "fingerprints" / f"{hashlib.sha256(repr(stamps[::_STAMP]).encode()).hexdigest()[:32]}.json"
    large = sum(entry[3].nbytes for entry in entries) >= _REMEMBERED_FROM
    if large and (known := _remembered(note, facts, stamps)) is not None:
        return known
    settled = _settled(stamps)
    digest = hashlib.blake2b(facts.encode(), digest_size=32)
    for name, _, _, data in entries:
        digest.update(f"\n{name}\n".encode())
        digest.update(data.data)
    if large and settled and stamps == _stamps(files):
        _remember(note, {"facts": facts, "stamps": stamps, "fingerprint": digest.hexdigest()})
    return digest.hexdigest()


def _stamps(files: Sequence[Path]) -> list[str | int]:
    """What tells that a file was changed or replaced; _STAMP entries a file, its path first."""
    stamps: list[str | int] = []
    for path in files:
        stat = path.stat()
        stamps += [str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    return stamps


def _remembered(note: Path, facts: str, stamps: list[str | int]) -> str | None:
    try:
        content = json.loads(note.read_bytes())
        same = content["facts"] == facts and content["stamps"] == stamps
        return str(content["fingerprint"]) if same else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _settled(stamps: list[str | int]) -> bool:
    """Whether no file was changed this very moment: it could change again without a newer time stamp."""
    changed = max(int(stamp) for index in (2, 3) for stamp in stamps[index::_STAMP])
    return abs(time.time_ns() - changed) >= _SETTLED_NS


def _remember(note: Path, content: dict[str, Any]) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=note.parent, prefix=".", delete=False) as file:
            json.dump(content, file)
        os.replace(file.name, note)
    except OSError as error:  # it only costs the time of reading the checkpoint again
        _LOG.warning("can't keep the fingerprint of a checkpoint in %s (%s)", note.parent, error)
