"""What the config.json of an EAGLE3 head states, in any of its published layouts.

    SafeAILab, AngelSlim, Tengyunw, SpecForge   a flat Llama configuration; SpecForge and ModelOpt add `eagle_config`
    speculators                                 the decoder's part nested in `transformer_layer_config`, the target's in
                                                `speculators_config.verifier`

Which hidden states a head takes can be stated in three places, with two meanings:

    eagle_config.eagle_aux_hidden_state_layer_ids   "after layer i" (SpecForge, ModelOpt, SGLang): layer i + 1 for us
    eagle_aux_hidden_state_layer_ids                "entering layer i" (speculators, vLLM, heads trained here): as ours
    neither                                         the layers that the target offers, by default 2, L//2, L-3

One exception: [1, L//2-1, L-4] is always the former and [2, L//2, L-3] always the latter. They are the two defaults,
and conversions between the layouts have moved them without translating them.

Sizes of layers and heads are taken from the weights, not from here: published configurations are unreliable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd.errors import CheckpointError, UnsupportedModelError
from hvd.models.config import RopeConfig
from hvd.models.hf_config import read_number, read_rope

DEFAULT_CONTEXT = 2048
"""Positions of a head whose configuration does not say: what the published Llama heads were trained at."""


@dataclass(frozen=True, slots=True)
class StatedConfig:
    """Facts that only the configuration has.

    nested                  whether it is in the speculators layout
    num_heads, num_kv_heads attention heads (kv: None = not stated)
    norm_eps                of all RMSNorms
    context_limit           most positions the head may be run at
    rope                    rotary embedding of the head, not the target's
    draft_vocab_size        None = not stated
    aux_ids, aux_nested     the layer ids as written, and whether in `eagle_config`; None = not stated
    target_hidden_size      None = not stated
    target_name, target_fingerprint    the target that the head was trained for; None = not stated
    norm_before_residual    the residual around attention starts from the normed feature
    norm_before_fc          one RMSNorm over the concatenated states, before `fc`
    fc_norm                 one RMSNorm for each of the concatenated states, before `fc`
    norm_output             the head feeds itself its output after `norm` (EAGLE 3.1), not before
    qk_norm, attention_bias the decoder's part asks for these tensors
    """

    nested: bool
    num_heads: int
    num_kv_heads: int | None
    norm_eps: float
    context_limit: int
    rope: RopeConfig
    draft_vocab_size: int | None
    aux_ids: tuple[int, ...] | None
    aux_nested: bool
    target_hidden_size: int | None
    target_name: str | None
    target_fingerprint: str | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    qk_norm: bool
    attention_bias: bool

    def aux_layers(self, num_layers: int) -> tuple[int, ...] | None:
        """Layers, of `num_layers`, whose *entering* states the head takes, in its order; None = not stated."""
        if self.aux_ids is None:
            return None
        after = self.aux_nested
        if self.aux_ids == (1, num_layers // 2 - 1, num_layers - 4):
            after = True
        elif self.aux_ids == (2, num_layers // 2, num_layers - 3):
            after = False
        layers = tuple(layer + after for layer in self.aux_ids)
        if not all(0 <= layer < num_layers for layer in layers):
            raise CheckpointError(
                f"EAGLE3 head takes the states of layers {list(self.aux_ids)}, but the target has {num_layers} layers"
            )
        return layers


def read_config(folder: Path) -> StatedConfig:
    """Read `folder`/config.json. Raises CheckpointError (missing, torn, senseless) or UnsupportedModelError."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"no EAGLE3 head in {folder}: config.json is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    try:
        return _parse(raw, path)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds a value of the wrong kind: {error}") from error


def _parse(raw: Mapping[str, Any], path: Path) -> StatedConfig:
    decoder = raw.get("transformer_layer_config")
    nested = isinstance(decoder, dict)
    layer: Mapping[str, Any] = decoder if isinstance(decoder, dict) else raw
    stated = raw.get("eagle_config")
    eagle: Mapping[str, Any] = stated if isinstance(stated, dict) else {}
    options: Mapping[str, Any] = {
        **layer,
        **eagle,
        **{key: value for key, value in raw.items() if value is not None},
    }
    _refuse_unsupported(layer)
    ids, aux_nested = _aux_ids(raw, eagle, path)
    name, fingerprint = _target(raw, path)
    context = _context_limit(layer, path)
    return StatedConfig(
        nested=nested,
        num_heads=_count(layer, "num_attention_heads", path),
        num_kv_heads=_count(layer, "num_key_value_heads", path)
        if layer.get("num_key_value_heads") is not None
        else None,
        norm_eps=read_number(layer, "rms_norm_eps", 1e-6),
        context_limit=context,
        rope=read_rope(layer, context),
        draft_vocab_size=_count(raw, "draft_vocab_size", path) if raw.get("draft_vocab_size") is not None else None,
        aux_ids=ids,
        aux_nested=aux_nested,
        target_hidden_size=_count(options, "target_hidden_size", path)
        if options.get("target_hidden_size") is not None
        else None,
        target_name=name,
        target_fingerprint=fingerprint,
        norm_before_residual=bool(options.get("norm_before_residual", False)),
        norm_before_fc=bool(options.get("norm_before_fc", False)),
        fc_norm=bool(options.get("fc_norm", False)),
        norm_output=bool(options.get("norm_output", False)),
        qk_norm=nested and layer.get("model_type") == "qwen3",
        attention_bias=nested and bool(layer.get("attention_bias", False)),
    )


def _refuse_unsupported(layer: Mapping[str, Any]) -> None:
    activation = layer.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"EAGLE3 head uses the activation {activation!r}; only 'silu' is supported")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise UnsupportedModelError("EAGLE3 head uses sliding-window attention; only full attention is supported")


def _count(config: Mapping[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{path}: {key} must be a positive integer, got {value!r}")
    return value


def _context_limit(layer: Mapping[str, Any], path: Path) -> int:
    if layer.get("max_position_embeddings") is None:
        return DEFAULT_CONTEXT
    return _count(layer, "max_position_embeddings", path)


def _aux_ids(raw: Mapping[str, Any], eagle: Mapping[str, Any], path: Path) -> tuple[tuple[int, ...] | None, bool]:
    """The ids as written, and whether they stood in `eagle_config`. At top level they win, as in vLLM."""
    key = "eagle_aux_hidden_state_layer_ids"
    for config, inside in ((raw, False), (eagle, True)):
        ids = config.get(key)
        if not ids:
            continue
        if not isinstance(ids, list) or not all(type(layer) is int for layer in ids) or len(set(ids)) < len(ids):
            raise CheckpointError(f"{path}: {key} must be a list of different layer numbers, got {ids!r}")
        return tuple(ids), inside
    return None, False


def _target(raw: Mapping[str, Any], path: Path) -> tuple[str | None, str | None]:
    """Name and fingerprint of the target, where stated (`target_*` are the keys of heads trained here)."""
    speculators = raw.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    stated = {"target_name": raw.get("target_name") or name, "target_fingerprint": raw.get("target_fingerprint")}
    for key, value in stated.items():
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f"{path}: {key} must be a text, got {str(value)[:60]!r}")
    return stated["target_name"], stated["target_fingerprint"]
