"""A Hugging Face directory: config.json, model.safetensors (or shards with an index), tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hvd.errors import CheckpointError
from hvd.models.checkpoint import Checkpoint, QuantizedTensor, check_tensors, fingerprint_of
from hvd.models.hf_config import read_hf_config
from hvd.models.safetensors_file import FLOAT_KINDS, SafetensorsFile
from hvd.tokenizer import Tokenizer, read_eos_token_ids
from hvd.types import Float32Array

_INDEX = "model.safetensors.index.json"


class HFCheckpoint(Checkpoint):
    """A directory as `save_pretrained` writes it. UnsupportedModelError or CheckpointError say what is wrong."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._path = path
        self.config = read_hf_config(_read_json(path / "config.json"))
        self._files = _open_weights(path, tied=self.config.tied)
        check_tensors(path, self.config, {tensor: file.shape(tensor) for tensor, file in self._files.items()})
        for tensor, file in self._files.items():
            if file.kind(tensor) not in FLOAT_KINDS:
                raise CheckpointError(
                    f"{file.path}: tensor {tensor} is {file.kind(tensor)}; weights must be {', '.join(FLOAT_KINDS)}"
                )
        self.fingerprint = fingerprint_of(
            self.config,
            ((tensor, file.kind(tensor), file.shape(tensor), file.raw(tensor)) for tensor, file in self._files.items()),
            sorted(
                {file.path for file in self._files.values()} | {index for index in [path / _INDEX] if index.is_file()}
            ),
        )
        self.eos_token_ids = read_eos_token_ids(path, self.config.vocab_size)

    def tensor(self, name: str) -> Float32Array:
        """See `Checkpoint.tensor`."""
        if name not in self._files:
            raise CheckpointError(f"{self._path} has no tensor {name}")
        return self._files[name].array(name).astype(np.float32, copy=False)

    def quantized(self, name: str) -> QuantizedTensor | None:
        """None: safetensors hold plain floats."""
        if name not in self._files:
            raise CheckpointError(f"{self._path} has no tensor {name}")
        return None

    def tokenizer(self) -> Tokenizer:
        """See `Checkpoint.tokenizer`."""
        return Tokenizer.from_directory(self._path)


def _open_weights(path: Path, *, tied: bool) -> dict[str, SafetensorsFile]:
    """Tensor name -> file that holds it; without buffers of old checkpoints and without a tied output matrix's copy."""
    if (path / "model.safetensors").is_file():
        file = SafetensorsFile(path / "model.safetensors")
        found = dict.fromkeys(file.names(), file)
    elif (path / _INDEX).is_file():
        found = _open_shards(path)
    else:
        pickled = any(path.glob("*.bin")) or any(path.glob("*.pt*"))
        hint = "; its pickled weights are not read, save the model as safetensors" if pickled else ""
        raise CheckpointError(f"{path} has neither model.safetensors nor {_INDEX}{hint}")
    return {
        name: file
        for name, file in found.items()
        if not name.endswith("rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
    }


def _open_shards(path: Path) -> dict[str, SafetensorsFile]:
    weight_map = _read_json(path / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{path / _INDEX} has no weight_map of tensor names to files")
    shards = sorted(set(weight_map.values()))
    if missing := [shard for shard in shards if not _is_file(path, shard)]:
        names = ", ".join(shard[:80] for shard in missing[:5])
        raise CheckpointError(f"{path} lacks {len(missing)} of {len(shards)} files of weights: {names}")
    files = {shard: SafetensorsFile(path / shard) for shard in shards}
    for name, shard in weight_map.items():
        if name not in files[shard]:
            raise CheckpointError(f"{path / shard} lacks tensor {name}, which {_INDEX} says it holds")
    return {name: files[shard] for name, shard in weight_map.items()}


def _is_file(path: Path, name: str) -> bool:
    try:
        return "/" not in name and (path / name).is_file()
    except (OSError, ValueError):  # too long a name, or one with a null byte
        return False


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} has no {path.name}; is it the directory of a Hugging Face checkpoint?"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return content
