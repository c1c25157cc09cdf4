"""The EAGLE3 head a second time, in torch and float64, from its equations: no cache, no chunks, one pass over the whole
text for every question. Slow and plain on purpose.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

torch.set_num_threads(1)


class ReferenceHead:
    """tensors by canonical names; embedding [target vocabulary, H]; options as in a head's config.json."""

    def __init__(
        self, tensors: dict[str, Any], embedding: Any, *, heads: int = 4, eps: float = 1e-5, **options: Any
    ) -> None:
        self.w = {name: torch.as_tensor(x).double() for name, x in tensors.items() if name not in ("d2t", "t2d")}
        self.embedding = torch.as_tensor(embedding).double()
        self.d2t = torch.as_tensor(tensors["d2t"]).long() if "d2t" in tensors else None
        self.heads, self.eps, self.options = heads, eps, options

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + self.eps) * self.w[name]

    def fuse(self, states: Tensor) -> Tensor:
        if self.options.get("norm_before_fc"):
            states = self.norm(states, "input_norm.weight")
        if self.options.get("fc_norm"):
            count = sum(name.startswith("fc_norm.") for name in self.w)
            parts = states.chunk(count, dim=-1)
            states = torch.cat([self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)], -1)
        return states @ self.w["fc.weight"].T

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        size = x.shape[-1]
        angles = positions[:, None].double() * self.frequencies(size)
        cos, sin = (torch.cat([f, f], -1)[:, None] for f in (angles.cos(), angles.sin()))
        turned = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
        return x * cos + turned * sin

    def frequencies(self, size: int) -> Tensor:
        plain = self.options.get("theta", 10000.0) ** (-torch.arange(0, size, 2).double() / size)
        if self.options.get("linear"):
            return plain / self.options["linear"]
        if llama3 := self.options.get("llama3"):
            return torch.tensor([_llama3(f.item(), **llama3) for f in plain], dtype=torch.float64)
        return plain

    def run(self, tokens: list[int], g: Tensor, positions: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs (g, token) at positions, attending where visible [n, n]: (what the head feeds itself next, logits)."""
        e = self.norm(self.embedding[tokens], "layers.0.input_layernorm.weight")
        normed = self.norm(g, "layers.0.hidden_norm.weight")
        h, x = (normed if self.options.get("norm_before_residual") else g), torch.cat([e, normed], -1)
        layer = 0
        while f"layers.{layer}.mlp.up_proj.weight" in self.w:
            name = f"layers.{layer}"
            if layer:
                x = self.norm(h, f"{name}.input_layernorm.weight")
            h = h + self.attention(x, f"{name}.self_attn", positions, visible)
            y = self.norm(h, f"{name}.post_attention_layernorm.weight")
            up, gate = y @ self.w[f"{name}.mlp.up_proj.weight"].T, y @ self.w[f"{name}.mlp.gate_proj.weight"].T
            h = h + (torch.nn.functional.silu(gate) * up) @ self.w[f"{name}.mlp.down_proj.weight"].T
            layer += 1
        out = self.norm(h, "norm.weight")
        return (out if self.options.get("norm_output") else h), out @ self.w["lm_head.weight"].T

    def attention(self, x: Tensor, name: str, positions: Tensor, visible: Tensor) -> Tensor:
        def project(part: str) -> Tensor:
            y = x @ self.w[f"{name}.{part}_proj.weight"].T
            return y + self.w[f"{name}.{part}_proj.bias"] if f"{name}.{part}_proj.bias" in self.w else y

        q = project("q").view(len(x), self.heads, -1)
        k, v = (project(part).view(len(x), -1, q.shape[-1]) for part in "kv")
        if f"{name}.q_norm.weight" in self.w:
            q, k = self.norm(q, f"{name}.q_norm.weight"), self.norm(k, f"{name}.k_norm.weight")
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        k, v = (t.repeat_interleave(self.heads // t.shape[1], dim=1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1)
        y = mixed @ self.w[f"{name}.o_proj.weight"].T
        return y + self.w[f"{name}.o_proj.bias"] if f"{name}.o_proj.bias" in self.w else y

    def behind(self, text: list[int], states: Tensor, path: list[int]) -> Tensor:
        """Draft logits [V] behind the committed `text` and the drafted `path`.

        states   [len(text), A*H], row i the state of text[i]; the last row is not used (the target has yet to make it)
        """
        tokens, g = text[1:], self.fuse(states[: len(text) - 1].double())
        while True:
            count = len(tokens)
            visible = torch.ones(count, count, dtype=torch.bool).tril()
            out, logits = self.run(tokens, g, torch.arange(count), visible)
            if not path:
                return logits[-1]
            tokens, g, path = [*tokens, path[0]], torch.cat([g, out[-1:]]), path[1:]

    def token(self, entry: int) -> int:
        """Target token of a draft vocabulary entry."""
        return entry if self.d2t is None else entry + int(self.d2t[entry])


def _llama3(frequency: float, factor: float, low: float, high: float, original: int) -> float:
    wave = 2 * math.pi / frequency
    if wave > original / low:
        return frequency / factor
    if wave < original / high:
        return frequency
    kept = (original / wave - low) / (high - low)
    return (1 - kept) * frequency / factor + kept * frequency
