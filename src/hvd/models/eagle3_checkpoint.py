"""Loads EAGLE3 heads, and names whatever is wrong with one. Their layouts: see eagle3_config.py.

Tensors go by their names in the speculators layout, `layers.0.*`; the other layouts say `midlayer.*`. Filled by rule:

    embed_tokens.weight   the target's, when absent
    lm_head.weight        the target's, when absent and the draft vocabulary is the target's
    d2t                   the identity, when absent and the draft vocabulary is the target's
    t2d                   not needed; checked against d2t when present

Anything else that is missing, unknown or of another shape is an error.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd.errors import CheckpointError, MissingExtraError
from hvd.models.eagle3_config import StatedConfig, read_config
from hvd.models.eagle3_tensors import HeadSpec, Tensors, check_names, check_shapes, infer_spec
from hvd.models.safetensors_file import SafetensorsFile
from hvd.models.target import TargetSpec
from hvd.types import Float32Array, Int32Array

log = logging.getLogger("hvd")

_IGNORED = re.compile(r"verifier_(norm|lm_head)\.weight|.*\.rotary_emb\.inv_freq")
"""Left in some files by the training program; not part of the head."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """A checked head.

    tensors      float32, by name: fc, layers.*, norm, lm_head; input_norm, fc_norm.* if it has them
    embedding    [target vocabulary, H], float32 or float16
    target_ids   int32 [V], token id of each entry of the draft vocabulary
    """

    spec: HeadSpec
    tensors: dict[str, Float32Array]
    embedding: NDArray[Any]
    target_ids: Int32Array


def find_eagle3(source: str | Path) -> Path:
    """The directory of a head: `source` itself, or the download of a hub id. CheckpointError when there is none."""
    if not str(source).strip():
        raise CheckpointError("the EAGLE3 head is an empty text; give a directory, a hub id, 'auto' or 'none'")
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"no EAGLE3 head at '{source}': it is a file; give the directory that holds the head")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        raise CheckpointError(f"no EAGLE3 head at '{source}': no such directory, and not a hub id ('owner/name')")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        folder = Path(snapshot_download(str(source), allow_patterns=["config.json", "model.safetensors"]))
        if not (folder / "model.safetensors").exists():
            folder = Path(snapshot_download(str(source), allow_patterns=["config.json", "pytorch_model.bin"]))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"no EAGLE3 head at '{source}': neither cached nor reachable on the hub ({reason})"
        ) from error
    return folder


def stated_aux_layers(source: str | Path, num_layers: int) -> tuple[int, ...] | None:
    """Layers, of `num_layers`, whose entering states the head in `source` asks for; None = the target's default.

    Cheap: reads config.json only. For opening a target with the layers that its head needs.
    """
    return read_config(find_eagle3(source)).aux_layers(num_layers)


def load_eagle3(
    source: str | Path,
    target: TargetSpec,
    target_tensor: Callable[[str], NDArray[Any]],
    *,
    any_target: bool = False,
) -> HeadWeights:
    """Load the head in `source`, a directory or a hub id, to draft for `target`.

    target_tensor   gives a tensor of the target by its Hugging Face name (`Checkpoint.tensor`). Asked for
                    "model.embed_tokens.weight" and "lm_head.weight" when the head lacks them; a CheckpointError for the
                    latter means that the target is tied
    any_target      take a head that was trained for a target of another fingerprint

    Raises CheckpointError, UnsupportedModelError, or MissingExtraError for a pytorch_model.bin without torch.
    """
    folder = find_eagle3(source)
    stated = read_config(folder)
    _check_target(stated, target, any_target)
    tensors = _read_tensors(folder)
    check_names(tensors, stated)
    full = _draft_vocabulary(tensors, stated, target.vocab_size) == target.vocab_size
    _fill(tensors, target, target_tensor, full)
    spec = infer_spec(tensors, stated, target)
    check_shapes(tensors, spec, stated, target.vocab_size)
    target_ids = _target_ids(tensors, target.vocab_size)
    embedding = tensors.pop("embed_tokens.weight")
    if embedding.dtype != np.float16:
        embedding = _float32("embed_tokens.weight", embedding)
    floats = {name: _float32(name, tensor) for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    return HeadWeights(spec, floats, embedding, target_ids)


def _check_target(stated: StatedConfig, target: TargetSpec, any_target: bool) -> None:
    if stated.target_hidden_size not in (None, target.hidden_size):
        raise CheckpointError(
            f"EAGLE3 head was made for a target of hidden size {stated.target_hidden_size}; "
            f"{target.name} has {target.hidden_size}"
        )
    if not any_target and stated.target_fingerprint not in (None, target.fingerprint):
        raise CheckpointError(
            f"EAGLE3 head was trained for another target (fingerprint {stated.target_fingerprint}, {target.name} has "
            f"{target.fingerprint}); load it with any_target=True if it is the same model in another format"
        )
    if stated.target_name and not stated.target_fingerprint and not _same_name(stated.target_name, target.name):
        log.warning("the EAGLE3 head says it was trained for %s; the target is %s", stated.target_name, target.name)


def _same_name(stated: str, actual: str) -> bool:
    """Whether the last part of one name (hub id, directory, file) begins the other's, letter case aside."""
    first, second = (re.split(r"[/\\]", name.rstrip("/\\"))[-1].lower() for name in (stated, actual))
    return first.startswith(second) or second.startswith(first)


# -- files ------------------------------------------------------------------------------------------------------------


def _read_tensors(folder: Path) -> Tensors:
    """All tensors of model.safetensors, else of pytorch_model.bin, under their canonical names."""
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    if safe.exists():
        file = SafetensorsFile(safe)
        stored: Tensors = {name: file.array(name) for name in file.names()}
    elif pickled.exists():
        stored = _read_pickled(pickled)
    else:
        raise CheckpointError(f"no EAGLE3 head in {folder}: neither model.safetensors nor pytorch_model.bin is there")
    canonical = {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in stored.items()}
    return {name: tensor for name, tensor in canonical.items() if not _IGNORED.fullmatch(name)}


def _read_pickled(path: Path) -> Tensors:
    """A pytorch_model.bin, through the loader that builds tensors and nothing else."""
    try:
        import torch
    except ImportError:
        raise MissingExtraError("reading pytorch_model.bin", "torch") from None
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        tensors = {
            name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for name, tensor in loaded.items()
        }
        return {name: tensor.numpy() for name, tensor in tensors.items()}
    except Exception as error:  # torch.load raises whatever the file provokes
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} can't be read as tensors and nothing else: {reason}") from error


def _float32(name: str, tensor: NDArray[Any]) -> Float32Array:
    """The tensor in float32. CheckpointError if it is not of floats, or not of finite ones."""
    if tensor.dtype.kind != "f":
        raise CheckpointError(f"EAGLE3 head: {name} is of type {tensor.dtype}; only floating-point weights are read")
    wide = np.ascontiguousarray(tensor, dtype=np.float32)
    if not np.isfinite(wide).all():
        raise CheckpointError(f"EAGLE3 head: {name} holds values that are not finite")
    return wide


# -- filling and the draft vocabulary ---------------------------------------------------------------------------------


def _fill(tensors: Tensors, target: TargetSpec, target_tensor: Callable[[str], NDArray[Any]], full: bool) -> None:
    """Take what the head may leave out from the target. The embedding is kept in float16, half the memory."""
    missing = [name for name in ("embed_tokens.weight", "lm_head.weight") if name not in tensors]
    hidden = len(tensors["fc.weight"])
    if missing and hidden != target.hidden_size:
        raise CheckpointError(
            f"EAGLE3 head: missing {', '.join(missing)}; the target's can't stand in, its hidden size is "
            f"{target.hidden_size} and the head's {hidden}"
        )
    if "embed_tokens.weight" in missing:
        tensors["embed_tokens.weight"] = target_tensor("model.embed_tokens.weight").astype(np.float16)
    if "lm_head.weight" in missing and full:
        tensors["lm_head.weight"] = _output_matrix(target_tensor)


def _output_matrix(target_tensor: Callable[[str], NDArray[Any]]) -> NDArray[Any]:
    """The target's output matrix: its embedding where the two are tied."""
    try:
        return target_tensor("lm_head.weight")
    except CheckpointError:
        return target_tensor("model.embed_tokens.weight")


def _draft_vocabulary(tensors: Tensors, stated: StatedConfig, target_vocab: int) -> int:
    """Entries of the draft vocabulary, on which draft_vocab_size, lm_head and d2t have to agree."""
    sizes = {"draft_vocab_size": stated.draft_vocab_size} if stated.draft_vocab_size else {}
    sizes |= {name: len(tensors[name]) for name in ("lm_head.weight", "d2t") if name in tensors}
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        claims = ", ".join(f"{size} by {name}" for name, size in sizes.items())
        raise CheckpointError(
            f"EAGLE3 head: the size of its draft vocabulary is {claims}; these must agree and be positive"
        )
    size = next(iter(sizes.values()), target_vocab)
    missing = [name for name in ("lm_head.weight", "d2t") if name not in tensors]
    if missing and size != target_vocab:
        raise CheckpointError(
            f"EAGLE3 head: missing {', '.join(missing)}; needed because the draft vocabulary ({size}) is not the "
            f"target's ({target_vocab})"
        )
    return size


def _target_ids(tensors: Tensors, target_vocab: int) -> Int32Array:
    """Token id of each draft vocabulary entry: `i + d2t[i]`, checked for range, duplicates and against t2d."""
    size = len(tensors["lm_head.weight"])
    offsets = tensors.get("d2t", np.zeros(size, np.int64))
    if offsets.dtype not in (np.int32, np.int64):
        raise CheckpointError(f"EAGLE3 head: d2t is of type {offsets.dtype}; int32 or int64 is allowed")
    ids = np.arange(size, dtype=np.int64) + offsets
    outside = np.flatnonzero((ids < 0) | (ids >= target_vocab))
    if len(outside):
        entry = int(outside[0])
        raise CheckpointError(
            f"EAGLE3 head: d2t maps draft id {entry} to token {int(ids[entry])}, outside the target's vocabulary of "
            f"{target_vocab} ({len(outside)} such entries; d2t holds offsets, not ids)"
        )
    repeated = size - len(np.unique(ids))
    if repeated:
        raise CheckpointError(f"EAGLE3 head: d2t maps {repeated} draft ids to tokens that other draft ids have already")
    if "t2d" in tensors and not np.array_equal(np.flatnonzero(tensors["t2d"]), np.sort(ids)):
        raise CheckpointError("EAGLE3 head: the tokens that t2d marks are not those that d2t maps to")
    return ids.astype(np.int32)
