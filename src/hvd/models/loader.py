"""Opens a model for decoding: picks the backend and the weight format, converts where that was not done yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hvd.errors import ConfigError, MissingExtraError
from hvd.models.checkpoint import Checkpoint, load_checkpoint
from hvd.models.onnx.cache import FORMATS, Converted, find
from hvd.models.target import Target
from hvd.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]

COMPILING = "compiling kernels, once after an install (6 s)"
"""Told as progress."""
AUTO_WEIGHTS = "int8"
"""Perplexity of SmolLM2 on 16k tokens of real text: fp32 11.19, int8 11.22, int4 about 13 (the file's own 4 bits,
rounded a second time). int4 saves a quarter of the time of narrow passes, and none from 16 tokens on.
"""


def load_target(
    source: str | Path | Checkpoint,
    *,
    backend: str = "auto",
    weights: str = "auto",
    aux_layers: Sequence[int] | None = None,
    threads: int | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> tuple[Target, Tokenizer]:
    """Open a Hugging Face directory, a hub id, a GGUF file, or a checkpoint that is open already.

    backend      "auto": onnx on a CPU, torch on any other device
    weights      onnx: "int4", "int8", "fp32"; torch: "float64", "float32", "bfloat16", "float16"; "auto" = int8, or
                 float32 (torch on a CPU), or bfloat16 (torch on a GPU)
    aux_layers   layers whose entering states a pass can return; None = those that EAGLE3 heads take
    threads      None = all cores
    device       "cpu", "cuda", "cuda:1"; "auto" = a GPU if backend is "torch" and there is one, else the CPU
    progress     called with (what, done, total) while a model is converted for the first time, and kernels compiled

    Raises ConfigError for a parameter out of range, MissingExtraError when torch is asked for and not there, and what
    `load_checkpoint` and the conversion raise.
    """
    if backend not in ("auto", "onnx", "torch"):
        raise ConfigError(f"backend must be 'auto', 'onnx' or 'torch', got {backend!r}")
    if device == "auto" and backend != "torch":
        device = "cpu"
    if backend == "onnx" and device != "cpu":
        raise ConfigError(f"the onnx backend runs on device 'cpu', got {device!r}; use backend 'torch'")
    checkpoint = source if isinstance(source, Checkpoint) else load_checkpoint(source)
    if backend == "torch" or device != "cpu":
        return _torch(checkpoint, weights, aux_layers, threads, device), checkpoint.tokenizer()
    converted = converted_model(checkpoint, weights, progress)
    from hvd.models.onnx.target import OnnxTarget, kernels_are_compiled

    if progress is not None and not kernels_are_compiled():
        progress(COMPILING, 0, 1)
    target = OnnxTarget(converted, aux_layers=aux_layers, threads=threads)
    # The checkpoint's own: end-of-sequence ids and template may change while the weights, and the conversion, stay.
    return target, checkpoint.tokenizer()


def converted_model(checkpoint: Checkpoint, weights: str = "auto", progress: Progress | None = None) -> Converted:
    """The conversion of a checkpoint, made now unless it is there. Raises as `onnx.convert.convert`."""
    weights = AUTO_WEIGHTS if weights == "auto" else weights
    if weights not in FORMATS:
        raise ConfigError(f"weights must be 'auto' or one of {', '.join(FORMATS)} on the onnx backend, got {weights!r}")
    known = find(checkpoint.fingerprint, weights)
    if known is not None:
        return known
    from hvd.models.onnx.convert import convert

    return convert(checkpoint, weights, progress)


def _torch(
    checkpoint: Checkpoint, weights: str, aux_layers: Sequence[int] | None, threads: int | None, device: str
) -> Target:
    try:
        import torch

        from hvd.models.torch_target import TorchTarget
    except ModuleNotFoundError as error:
        raise MissingExtraError("the torch backend", "torch") from error
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = ("float32" if device == "cpu" else "bfloat16") if weights == "auto" else weights
    return TorchTarget(checkpoint, device=device, dtype=dtype, aux_layers=aux_layers, threads=threads)
