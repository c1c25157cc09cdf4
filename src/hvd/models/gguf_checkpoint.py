"""A GGUF file as a checkpoint: Hugging Face's names and row order, dequantized floats or raw blocks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvd.errors import CheckpointError
from hvd.models.checkpoint import Checkpoint, QuantizedTensor, check_tensors, fingerprint_of
from hvd.models.config import ModelConfig
from hvd.models.gguf_config import ROPE_FACTORS, read_gguf_config
from hvd.models.gguf_file import GGUFFile, GGUFTensor
from hvd.models.gguf_tokenizer import read_eos_ids, read_gguf_tokenizer
from hvd.models.safetensors_file import bfloat16_to_float32
from hvd.tokenizer import Tokenizer
from hvd.types import Float32Array

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LONG_ROW = 16384
_PLAIN = ("F32", "F16", "BF16")


class GGUFCheckpoint(Checkpoint):
    """A .gguf file of architecture llama (Mistral too), qwen2 or qwen3, tokenizer and chat template included."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self.name = path.stem  # general.name is often the name of a training run
        self.config = read_gguf_config(self._file)
        # Neither is a weight: divisors of the rotary embedding are in the configuration.
        tensors = {name: tensor for name, tensor in self._file.tensors.items() if name != ROPE_FACTORS}
        self._tensors = {hugging_face_name(name): tensor for name, tensor in tensors.items()}
        check_tensors(path, self.config, {name: tensor.shape for name, tensor in self._tensors.items()})
        self.fingerprint = fingerprint_of(
            self.config,
            ((name, tensor.kind, tensor.shape, tensor.data.reshape(-1)) for name, tensor in self._tensors.items()),
            [path],
        )
        self.eos_token_ids = read_eos_ids(self._file.metadata)

    def tensor(self, name: str) -> Float32Array:
        """See `Checkpoint.tensor`."""
        tensor = self._find(name)
        return dequantize(tensor.kind, self._rows(name, tensor)).reshape(tensor.shape)

    def quantized(self, name: str) -> QuantizedTensor | None:
        """See `Checkpoint.quantized`."""
        tensor = self._find(name)
        if tensor.kind in _PLAIN:
            return None
        rows = self._rows(name, tensor)
        return QuantizedTensor(tensor.kind, tensor.shape, rows.reshape(len(rows), -1, tensor.block_bytes))

    def tokenizer(self) -> Tokenizer:
        """See `Checkpoint.tokenizer`."""
        return read_gguf_tokenizer(self._file)

    def _find(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self._file.path} has no tensor {name}")
        return self._tensors[name]

    def _rows(self, name: str, tensor: GGUFTensor) -> NDArray[np.uint8]:
        """The tensor's rows as bytes, in Hugging Face's order."""
        heads = _rotary_heads(name, self.config)
        if self.config.family != "llama" or heads is None:
            return tensor.data
        order = rotate_half_rows(heads, self.config.head_dim)
        return tensor.data.reshape(len(order), -1)[order].reshape(tensor.data.shape)


def _rotary_heads(name: str, config: ModelConfig) -> int | None:
    """Heads of a query or key projection; None for other tensors."""
    if ".q_proj." in name:
        return config.num_heads
    return config.num_kv_heads if ".k_proj." in name else None


def rotate_half_rows(heads: int, head_dim: int) -> NDArray[np.int64]:
    """For each row in Hugging Face's order, its row in a GGUF file of architecture llama; int64 [heads * head_dim].

    GGUF lays the two coordinates of a rotated pair next to each other, (0, 1), (2, 3), ..; Hugging Face has them half a
    head apart.
    """
    pairs = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


def hugging_face_name(name: str) -> str:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; unknown names stay, to be reported."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER[part]}.{kind}" if part in _LAYER else name
    part, _, kind = name.rpartition(".")
    return f"{_TOP[part]}.{kind}" if part in _TOP else name


def dequantize(kind: str, rows: NDArray[np.uint8]) -> Float32Array:
    """Bytes [rows, bytes a row] of a number format to float32 [rows, floats a row]."""
    if kind == "F32":
        return np.ascontiguousarray(rows).view(np.float32)
    if kind == "F16":
        return np.ascontiguousarray(rows).view(np.float16).astype(np.float32)
    if kind == "BF16":
        return bfloat16_to_float32(np.ascontiguousarray(rows).view(np.uint16))
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as dequantize_blocks

    count, size = rows.shape
    joined = 1  # blocks know no rows, and gguf takes sixteen at a time: longer ones are much faster
    while count % (2 * joined) == 0 and 2 * joined * size <= _LONG_ROW:
        joined *= 2
    floats: Float32Array = dequantize_blocks(rows.reshape(count // joined, -1), GGMLQuantizationType[kind])
    return floats.reshape(count, -1)
