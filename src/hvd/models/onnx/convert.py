"""Turns a checkpoint into an ONNX graph with packed weights, once, in the cache of `cache`.

What becomes of a checkpoint's weights, by the format asked for ("int4", "int8", "fp32"):
    linear layers   blocks of 32 in that format. GGUF's Q4_0 and Q4_1 (int4) and Q8_0 (int8) carry over bit for bit,
                    Q4_K (int4) with scales in half precision; everything else is dequantized and rounded anew, which
                    makes the converted model a slightly different one from the checkpoint. That model is the target:
                    decoding it is lossless. In int4, matrices that a file of 4-bit blocks has in more bits become int8
    embedding and   int8 in int4 models too: the output matrix decides between near ties (perplexity of SmolLM2: 14.9
    output matrix   with 4 bits there, 13.4 with 8), and where the two are tied they share their bytes
    norms, biases   float32
`Converted.quantization` counts what was done.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hvd.errors import CheckpointError, ConfigError, UnsupportedModelError
from hvd.models.checkpoint import Checkpoint
from hvd.models.onnx.cache import FORMATS, ROPE_FILE, Converted, describe, directory_of, find, publish, sweep
from hvd.models.onnx.decoder import build_decoder, rope_table
from hvd.models.onnx.graph import GraphBuilder, Weight
from hvd.models.onnx.heads import wide, widen
from hvd.models.onnx.linear import PACKED
from hvd.models.onnx.weights import BLOCK, carry_over, quantize
from hvd.types import Float32Array

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps are done, and of how many."""


def convert(checkpoint: Checkpoint, weights: str, progress: Progress | None = None) -> Converted:
    """Convert unless that was done before. Raises ConfigError for an unknown weight format, UnsupportedModelError for a
    hidden size that doesn't divide into blocks, CheckpointError for weights that are not finite and when the cache
    can't be written.
    """
    if weights not in FORMATS:
        raise ConfigError(f"weights must be one of {', '.join(FORMATS)}, got {weights!r}")
    known = find(checkpoint.fingerprint, weights)
    if known is not None:
        return known
    hidden = checkpoint.config.hidden_size
    if weights != "fp32" and hidden % BLOCK:  # GatherBlockQuantized has no rows that end within a block
        raise UnsupportedModelError(
            f"{checkpoint.name} has a hidden size of {hidden}, {weights} needs a multiple of {BLOCK}; take 'fp32'"
        )
    final = directory_of(checkpoint.fingerprint, weights)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        sweep(final.parent)
        with tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=final.parent) as parent:
            fresh = Path(parent) / "model"
            fresh.mkdir()
            write(fresh, checkpoint, weights, progress or (lambda what, done, steps: None))
            publish(fresh, final, checkpoint.fingerprint, weights)
    except OSError as error:
        raise CheckpointError(
            f"can't write the converted model to {final.parent} ({error}); set HVD_CACHE to another place"
        ) from error
    done = find(checkpoint.fingerprint, weights)
    if done is None:
        raise CheckpointError(f"the converted model in {final} is not as written; remove that directory and try again")
    return done


def write(directory: Path, checkpoint: Checkpoint, weights: str, progress: Progress) -> None:
    """Write all files of a conversion into an empty directory."""
    source = Weights(checkpoint, weights)
    steps = checkpoint.config.num_layers + 2
    with GraphBuilder(directory) as builder:
        for done, what in enumerate(build_decoder(builder, checkpoint.config, source)):
            progress(what, done, steps)
        builder.save(checkpoint.name)
    np.save(directory / ROPE_FILE, rope_table(checkpoint.config))
    describe(Converted(directory, checkpoint.config, checkpoint.name, checkpoint.fingerprint, weights, source.fates))
    progress("done", steps, steps)


class Weights:
    """Tensors of a checkpoint in the format asked for; counts what became of them."""

    def __init__(self, checkpoint: Checkpoint, weights: str) -> None:
        self.checkpoint = checkpoint
        self.weights = weights
        self.fates: dict[str, int] = {}
        some = checkpoint.quantized("model.layers.0.mlp.gate_proj.weight")
        self._mostly_four = PACKED and some is not None and some.kind.startswith("Q4")

    def plain(self, name: str) -> Float32Array:
        """See `WeightSource`."""
        with np.errstate(over="ignore"):  # found below
            tensor = np.ascontiguousarray(self.checkpoint.tensor(name), np.float32)
        self._check(name, tensor)
        return widen(name, tensor, self.checkpoint.config.head_dim)

    def matrix(self, name: str, bits: int | None = None) -> Weight:
        """See `WeightSource`."""
        if self.weights == "fp32":
            return self.plain(name)
        bits = bits or (4 if self.weights == "int4" else 8)
        raw = self.checkpoint.quantized(name)
        if raw is not None:
            same = carry_over(raw.data, raw.kind, *raw.shape)
            usable = same is not None and not self._widened(name) and (same.minus is None or PACKED)
            if bits == 4 and self._mostly_four and not raw.kind.startswith("Q4"):
                bits = 8
            if same is not None and usable and same.bits == bits:
                self._check(name, same.scales)
                return self._count(f"{raw.kind} carried over", same)
        kind = raw.kind if raw is not None else "floats"
        return self._count(f"{kind} rounded to {bits} bits", quantize(self.plain(name), bits))

    def _check(self, name: str, numbers: Float32Array) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            finite = np.isfinite(numbers.max() - numbers.min())
        if not finite:
            raise CheckpointError(
                f"tensor {name} of {self.checkpoint.name} holds NaN or infinite numbers; fetch it again"
            )

    def _widened(self, name: str) -> bool:
        head_dim = self.checkpoint.config.head_dim
        return wide(head_dim) != head_dim and ".self_attn." in name

    def _count(self, fate: str, weight: Weight) -> Weight:
        self.fates[fate] = self.fates.get(fate, 0) + 1
        return weight
