"""The decoder in plain torch: one pass over one ragged row of tokens. The reference for every other backend.

All tokens of a pass, whatever request they belong to, lie behind each other in one row of N. Norms, projections and MLP
run once over the row; attention runs once a request, over its own keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hvd.errors import MissingExtraError
from hvd.models.checkpoint import Checkpoint
from hvd.models.config import ModelConfig
from hvd.models.kv_cache import GrowingKVCache
from hvd.types import Int64Array

try:
    import torch as torch  # for torch_target too, which so needs no second guard
except ImportError as error:
    raise MissingExtraError("the torch backend", "torch") from error
from torch import Tensor
from torch.nn import functional


class TorchKVCache(GrowingKVCache):
    """Keys and values of one request in one tensor: [layers, 2, kv_heads, capacity, head_dim]."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config.context_limit)
        shape = (config.num_layers, 2, config.num_kv_heads, 0, config.head_dim)
        self.store = torch.empty(shape, device=device, dtype=dtype)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write [n, kv_heads, head_dim] behind the committed positions; return all, [kv_heads, t, head_dim]."""
        end = self.length + len(keys)
        self.store[layer, 0, :, self.length : end] = keys.transpose(0, 1)
        self.store[layer, 1, :, self.length : end] = values.transpose(0, 1)
        return self.store[layer, 0, :, :end], self.store[layer, 1, :, :end]

    def _grow(self, capacity: int) -> None:
        layers, two, heads, _, dim = self.store.shape
        store = self.store.new_empty((layers, two, heads, capacity, dim))
        store[..., : self.length, :] = self.store[..., : self.length, :]
        self.store = store

    def _move(self, sources: Int64Array, start: int) -> None:
        index = torch.from_numpy(sources).to(self.store.device)
        self.store[..., start : start + len(sources), :] = self.store[..., index, :]

    def _free(self) -> None:
        self.store = self.store.new_empty((*self.store.shape[:3], 0, self.store.shape[4]))


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """One request's part of the row.

    cache       where its keys and values go
    start, end  its tokens in the row
    mask        bool [n, length + n], True where a token attends to a position; None when all attend to all
    causal      in place of a mask: an empty cache, and each token attends to itself and those before it
    """

    cache: TorchKVCache
    start: int
    end: int
    mask: Tensor | None
    causal: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """The input of a pass, on the device.

    tokens      int64 [N]
    cos, sin    [N, 1, head_dim / 2], float32 or float64
    stretches   the requests' parts, in order
    """

    tokens: Tensor
    cos: Tensor
    sin: Tensor
    stretches: list[Stretch]


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Weights of a decoder layer, as `torch.nn.functional.linear` takes them: [out, in].

    qkv and gate_up are the checkpoint's projections stacked, so that each is one product.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class TorchDecoder:
    """The weights of a model and its forward pass."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        def load(*names: str) -> Tensor:
            parts = [torch.tensor(checkpoint.tensor(name), dtype=dtype, device=device) for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        config = checkpoint.config
        self.config = config
        self.device = device
        self.dtype = dtype
        self.embedding = load("model.embed_tokens.weight")
        self.layers = [_load_layer(config, load, f"model.layers.{i}.") for i in range(config.num_layers)]
        self.norm = load("model.norm.weight")
        self.head = self.embedding if config.tied else load("lm_head.weight")

    def forward(self, row: Row, aux_layers: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
        """Run the layers; keys and values are written behind each cache's committed positions.

        returns   states behind the last layer [N, H] (before the final norm), and those entering each of `aux_layers`
        """
        x = functional.embedding(row.tokens, self.embedding)  # [N, H]
        entering = []
        for index, layer in enumerate(self.layers):
            if index in aux_layers:
                entering.append(x)
            x = x + self._attend(index, layer, self._rms(x, layer.input_norm), row)
            x = x + self._mlp(layer, self._rms(x, layer.post_norm))
        return x, entering

    def normed(self, states: Tensor) -> Tensor:
        """[n, H] behind the last layer -> [n, H], what the output matrix is applied to."""
        return self._rms(states, self.norm)

    def logits(self, states: Tensor) -> Tensor:
        """[n, H] behind the last layer -> [n, V]."""
        return functional.linear(self.normed(states), self.head)

    def _attend(self, index: int, layer: Layer, x: Tensor, row: Row) -> Tensor:
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = functional.linear(x, layer.qkv, layer.qkv_bias).view(len(x), heads + 2 * kv_heads, config.head_dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)  # [N, heads | kv_heads, head_dim]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._rms(q, layer.q_norm), self._rms(k, layer.k_norm)
        q, k = _rotate(q, row.cos, row.sin), _rotate(k, row.cos, row.sin)
        parts = []
        for part in row.stretches:
            keys, values = part.cache.append(index, k[part.start : part.end], v[part.start : part.end])
            own = q[part.start : part.end]
            parts.append(_causal(own, keys, values) if part.causal else _attention(own, keys, values, part.mask))
        return functional.linear(torch.cat(parts).flatten(1), layer.o, layer.o_bias)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = functional.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, layer.down, layer.down_bias)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last axis; half precision is normed in float32."""
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)
        return weight * (wide * scale).to(x.dtype)


def _load_layer(config: ModelConfig, load: Callable[..., Tensor], prefix: str) -> Layer:
    """Weights of the layer whose names begin with `prefix`; `load` stacks the tensors it is asked for."""
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = [f"{attention}{part}_proj." for part in "qkv"]
    gate_up = [mlp + "gate_proj.", mlp + "up_proj."]
    return Layer(
        input_norm=load(prefix + "input_layernorm.weight"),
        qkv=load(*(name + "weight" for name in qkv)),
        qkv_bias=load(*(name + "bias" for name in qkv)) if config.qkv_bias else None,
        q_norm=load(attention + "q_norm.weight") if config.qk_norm else None,
        k_norm=load(attention + "k_norm.weight") if config.qk_norm else None,
        o=load(attention + "o_proj.weight"),
        o_bias=load(attention + "o_proj.bias") if config.o_bias else None,
        post_norm=load(prefix + "post_attention_layernorm.weight"),
        gate_up=load(*(name + "weight" for name in gate_up)),
        gate_up_bias=load(*(name + "bias" for name in gate_up)) if config.mlp_bias else None,
        down=load(mlp + "down_proj.weight"),
        down_bias=load(mlp + "down_proj.bias") if config.mlp_bias else None,
    )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (j, j + head_dim / 2) of [N, heads, head_dim], in the precision of the angles."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped attention of one request: the queries that share a key head are laid behind each other as rows.

    q [n, heads, head_dim]; keys, values [kv_heads, t, head_dim]; mask bool [n, t]  ->  [n, heads, head_dim]
    """
    n, heads, dim = q.shape
    kv_heads = len(keys)
    groups = heads // kv_heads
    rows = q.view(n, kv_heads, groups, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, groups * n, dim)
    tiled = None if mask is None else mask.repeat(groups, 1)  # [groups * n, t]
    out = functional.scaled_dot_product_attention(rows, keys[None], values[None], attn_mask=tiled)
    return out.view(kv_heads, groups, n, dim).permute(2, 0, 1, 3).reshape(n, heads, dim)


def _causal(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """As `_attention`, of a text by itself: knowing that, the kernel leaves out the half above the diagonal."""
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], is_causal=True, enable_gqa=True
    )
    return out[0].transpose(0, 1)
