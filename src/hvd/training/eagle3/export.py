"""Writes a trained head as a directory that hvd, SafeAILab's EAGLE and vLLM load: the SafeAILab layout.

model.safetensors    fp16, names as SafeAILab has them; d2t offsets (int64), t2d (bool)
config.json          architectures LlamaForCausalLMEagle3; the layers whose *entering* states it takes; which target
training_args.json   everything that made it
curve.json           one point an evaluation
README.md            the model card
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from hvd.errors import TrainingError
from hvd.models.config import RopeConfig
from hvd.models.eagle3_tensors import HeadSpec
from hvd.models.target import TargetSpec
from hvd.training.eagle3.fit import Point, rank
from hvd.training.eagle3.module import HeadModule
from hvd.types import Int64Array


def write_head(
    folder: Path,
    head: HeadModule,
    draft_ids: Int64Array,
    target: TargetSpec,
    training_args: Mapping[str, Any],
    curve: Sequence[Point],
) -> None:
    """Write everything, into a fresh directory that then takes the place of `folder`.

    Raises TrainingError when a weight does not fit float16, or the disk refuses.
    """
    files = {
        "model.safetensors": save(_tensors(head, draft_ids, target.vocab_size), metadata={"format": "pt"}),
        "config.json": _json(head_config(head.shape, target)),
        "training_args.json": _json(training_args),
        "curve.json": _json([asdict(point) for point in curve]),
        "README.md": model_card(head.shape, target, training_args, curve).encode(),
    }
    fresh = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    try:
        fresh.mkdir(parents=True)
        for name, content in files.items():
            with (fresh / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        if folder.exists():
            old = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
            folder.rename(old)
            fresh.rename(folder)
            shutil.rmtree(old)
        else:
            fresh.rename(folder)
    except OSError as error:
        raise TrainingError(f"can't write the head to {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _tensors(head: HeadModule, draft_ids: Int64Array, vocab_size: int) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.detach().cpu().half().contiguous() for name, tensor in head.state_dict().items()}
    outside = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if outside:
        raise TrainingError(f"weights that float16 can't hold: {', '.join(outside)}; train with a lower learning rate")
    ids = torch.from_numpy(draft_ids)
    if len(ids) < vocab_size:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def head_config(shape: HeadSpec, target: TargetSpec) -> dict[str, Any]:
    """The head's config.json."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "float16",
        "hidden_size": shape.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.context_limit,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(target.aux_layers),
        "num_aux_hidden_states": len(target.aux_layers),
        "target_name": target.name,
        "target_fingerprint": target.fingerprint,
        **_rope(shape.rope),
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    """The target's rotary embedding by its keys in a Llama configuration."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.original_positions:
        scaling["original_max_position_embeddings"] = rope.original_positions
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {
            "attention_factor": rope.attention_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
            "truncate": rope.truncate,
        }
        scaling = {key: value for key, value in scaling.items() if value not in (None, 0.0)}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def model_card(shape: HeadSpec, target: TargetSpec, training_args: Mapping[str, Any], curve: Sequence[Point]) -> str:
    """README.md of the head: what it is, what it was trained on, how it went."""
    best = max(curve, key=lambda point: rank(point.score))
    rows = "\n".join(
        f"| {point.epoch} | {point.updates} | {point.seconds:.0f} | {point.train_loss:.3f} | {point.score.loss:.3f} | "
        + " | ".join(f"{1 + accepted:.2f}" for accepted in point.score.accepted)
        + " |"
        for point in curve
    )
    chains = " | ".join(f"chain of {k + 1}" for k in range(len(best.score.accepted)))
    accuracy = ", ".join(f"{value:.3f}" for value in best.score.accuracy)
    return f"""---
library_name: hvd
tags: [eagle3, speculative-decoding]
---

# EAGLE3 head for {target.name}

A draft head in the SafeAILab layout, made by `hvd train eagle3`. It drafts for the target with the fingerprint
`{target.fingerprint}`; on any other it drafts badly, though the output stays that of the target.

Draft vocabulary {shape.draft_vocab_size} of {target.vocab_size}; it takes the states entering layers
{", ".join(map(str, target.aux_layers))}. Positions up to {shape.context_limit}; trained on documents of at most
{training_args["options"]["length"]} tokens.

## Data

{_data(training_args)}

## How it went

Tokens per cycle (accepted length and the bonus token) on held-out prompts, had the head drafted behind every token:

| epoch | updates | seconds | training loss | held-out loss | {chains} |
|{"---|" * (5 + len(best.score.accepted))}
{rows}

Accuracy by step at the best point, each given that all before were right: {accuracy}.
"""


def _data(args: Mapping[str, Any]) -> str:
    text = args["text"]
    sets = ", ".join(f"{name} ({count})" for name, count in sorted(text["datasets"].items()))
    return (
        f"{text['documents']} documents with {text['tokens']} tokens, {text['answer_tokens']} of them answers, which "
        f"are what is learned; {text['held_documents']} documents held out. The draft vocabulary holds "
        f"{text['coverage']:.2%} of the held-out answers' tokens. Documents by data set: {sets}."
    )


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n"
