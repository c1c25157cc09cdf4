"""The EAGLE3 head in torch, for training: `hvd.models.eagle3` with gradients.

Training-time test (Li et al., "EAGLE-3", arXiv 2503.01840, section 3.2): the head is run as it will be used. In step 0
every pair has the target's feature; in step j the feature of a base row is the head's own output of step j-1, and the
token is that of the text, j places on. So a base row t at step j attends to the step-0 pairs up to t, which the cache
would hold as committed, and to its own rows of steps 1..j, which it would have drafted.

The head has one layer, so keys and values of step 0 depend on the text alone: rows whose predictions don't count (the
prompt) need no more than those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd.models.eagle3_tensors import HeadSpec
from hvd.models.rope import cos_sin


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """Documents behind each other in one row of N tokens.

    tokens   int64 [N]
    states   [N, A*H], the target's states entering its auxiliary layers
    final    [N, H], the target's states behind its final norm
    counts   bool [N], whether the prediction *of* this token counts
    ends     where each document ends; it begins where the one before ends
    """

    tokens: Tensor
    states: Tensor
    final: Tensor
    counts: Tensor
    ends: list[int]

    def documents(self) -> Iterator[tuple[int, int]]:
        """(start, end) of each."""
        start = 0
        for end in self.ends:
            yield start, end
            start = end


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """One step of the training-time test over R base rows.

    loss      soft cross-entropy, summed over the rows that count
    rows      how many count
    right     bool [R], the likeliest draft token is the text's; False past the end of a document
    valid     bool [R], the text goes on so far
    """

    loss: Tensor
    rows: Tensor
    right: Tensor
    valid: Tensor


class RMSNorm(nn.Module):
    """RMSNorm in float32, whatever the autocast."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[.., size] -> [.., size]"""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    """The projections; what attends to what is the head's business."""

    def __init__(self, shape: HeadSpec) -> None:
        super().__init__()
        width = shape.num_heads * shape.head_dim
        narrow = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: HeadSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[R, H] -> [R, H]"""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The decoder layer, by the names of the SafeAILab layout."""

    def __init__(self, shape: HeadSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)


class HeadModule(nn.Module):
    """The head's parameters, by the names of the SafeAILab layout, and its loss."""

    embedding: Tensor
    output: Tensor
    draft_ids: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: HeadSpec, embedding: Tensor, output: Tensor, target_ids: Tensor, length: int) -> None:
        """Random weights.

        embedding    [vocabulary, H] of the target; not trained
        output       [vocabulary, H], the target's output matrix; gives the distribution to be learned
        target_ids   int64 [V], token id of each entry of the draft vocabulary
        length       longest document
        """
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.aux_layers) * shape.target_hidden_size, shape.hidden_size, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        draft_ids = torch.full((len(embedding),), -1)
        draft_ids[target_ids] = torch.arange(len(target_ids))
        cos, sin = cos_sin(shape.rope, shape.head_dim, shape.context_limit, np.arange(length + 16))
        for name, fixed in {
            "embedding": embedding,
            "output": output[target_ids],
            "draft_ids": draft_ids,
            "cos": torch.from_numpy(cos).float()[:, None],
            "sin": torch.from_numpy(sin).float()[:, None],
        }.items():
            self.register_buffer(name, fixed, persistent=False)

    def steps(self, pack: Pack, count: int) -> Iterator[StepResult]:
        """Training-time test, `count` steps. Base rows are the same in all: pairs whose prediction may count."""
        rows = _BaseRows(pack, count)
        wanted, labels = self._targets(pack, rows)
        features = self.fc(pack.states).float()  # [N, H]; the residual stays in float32 under autocast
        x = self._entering(pack.tokens.roll(-1), features)  # pair t holds token t+1; a document's last pair is unused
        place = rows.within
        keys = [self._rotated(self.midlayer.self_attn.k_proj(x), place)]
        values = [self._heads(self.midlayer.self_attn.v_proj(x))]
        carried, x = features.index_select(0, rows.base), x.index_select(0, rows.base)
        for step in range(count):
            at = place[rows.base] + step
            query = self._rotated(self.midlayer.self_attn.q_proj(x), at)
            if step:
                keys.append(self._rotated(self.midlayer.self_attn.k_proj(x), at))
                values.append(self._heads(self.midlayer.self_attn.v_proj(x)))
            mixed = self._attend(query, keys, values, rows)
            hidden = carried + self.midlayer.self_attn.o_proj(mixed)
            carried = hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))
            logits = self.lm_head(self.norm(carried)).float()  # [R, V]
            yield self._judge(logits, wanted, labels, pack, rows, step)
            x = self._entering(pack.tokens[rows.token(step + 1)], carried)

    def _entering(self, tokens: Tensor, features: Tensor) -> Tensor:
        layer = self.midlayer
        embedded = functional.embedding(tokens, self.embedding).to(features.dtype)
        return torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(features)), dim=-1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self.shape.head_dim)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """[n, heads * d] -> [n, heads, d], turned; pairs are (i, i + d/2)."""
        first, second = self._heads(x).float().chunk(2, dim=-1)
        cos, sin = self.cos[positions], self.sin[positions]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def _attend(self, query: Tensor, keys: list[Tensor], values: list[Tensor], rows: _BaseRows) -> Tensor:
        """[R, heads, d] over the document's step-0 pairs up to a row's own, and its later ones -> [R, heads * d]."""
        shape, scale = self.shape, self.shape.head_dim**-0.5
        groups = shape.num_heads // shape.num_kv_heads
        query = query.view(len(query), shape.num_kv_heads, groups, shape.head_dim)
        own = [torch.einsum("rkgd,rkd->rkg", query, key) for key in keys[1:]]
        parts = []
        for start, end, first, last, hidden in rows.documents:
            q = query[first:last].permute(1, 2, 0, 3).flatten(1, 2)  # [kv, g*r, d]
            seen = q @ keys[0][start:end].permute(1, 2, 0)  # [kv, g*r, n]
            seen = seen.view(shape.num_kv_heads, groups, last - first, end - start)
            scores = [seen.masked_fill(hidden, -torch.inf)]
            scores += [score[first:last].permute(1, 2, 0)[..., None] for score in own]
            weights = torch.softmax(torch.cat(scores, dim=-1).float() * scale, dim=-1).to(query.dtype)
            at_text = weights[..., : end - start].flatten(1, 2)  # [kv, g*r, n]
            mixed = at_text @ values[0][start:end].permute(1, 0, 2)
            mixed = mixed.view(shape.num_kv_heads, groups, last - first, shape.head_dim)
            for place, value in enumerate(values[1:], start=end - start):
                mixed = mixed + weights[..., place, None] * value[first:last].permute(1, 0, 2)[:, None]
            parts.append(mixed.permute(2, 0, 1, 3).reshape(last - first, -1))
        return torch.cat(parts)

    @torch.no_grad()
    def _targets(self, pack: Pack, rows: _BaseRows) -> tuple[Tensor, Tensor]:
        """The target's distribution over the draft vocabulary behind the tokens in `rows.judged` [J, V], and the draft
        entry of every token, int64 [N], -1 outside the draft vocabulary."""
        final = pack.final[rows.judged]
        logits = functional.linear(final, self.output.to(final.dtype)).float()
        return torch.softmax(logits, dim=-1), self.draft_ids[pack.tokens]

    def _judge(
        self, logits: Tensor, wanted: Tensor, labels: Tensor, pack: Pack, rows: _BaseRows, step: int
    ) -> StepResult:
        """Compare with the target behind token t+1+step, which is what token t+2+step was drawn from."""
        following = rows.token(step + 1)
        valid = rows.valid(step + 1) & pack.counts[following]
        label = torch.where(valid, labels[following], -1)
        chosen = torch.nonzero(label >= 0)[:, 0]
        target = wanted[rows.slot[rows.token(step)[chosen]]]
        # index_select, for the gradient of an indexed tensor is written entry by entry
        each = -(target * functional.log_softmax(logits.index_select(0, chosen), dim=-1)).sum(-1)
        return StepResult(
            loss=each.sum(),
            rows=torch.tensor(len(chosen), device=logits.device),
            right=(logits.argmax(-1) == label) & (label >= 0),
            valid=valid,
        )

    def initialize(self, target: dict[str, Tensor]) -> None:
        """Begin as the target's last layer on its last auxiliary state: half of what is to be learned.

        target   its last layer's tensors by their names within the layer, and "norm.weight"
        """
        hidden = self.shape.hidden_size
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, -hidden:] = torch.eye(hidden)
            for name, linear in self.midlayer.named_modules():
                if not isinstance(linear, nn.Linear):
                    continue
                source = target.get(f"{name}.weight")
                fan_in = linear.weight.shape[1]
                nn.init.normal_(linear.weight, std=0.5 * fan_in**-0.5)
                if source is None:
                    continue
                if name.endswith(("q_proj", "k_proj", "v_proj")):  # the embedding's half in front stays random
                    linear.weight[:, :hidden] *= 0.2
                    linear.weight[:, hidden:] = source
                elif source.shape == linear.weight.shape:
                    linear.weight.copy_(source)
            for norm, name in ((self.midlayer.hidden_norm, "input_layernorm"),
                               (self.midlayer.post_attention_layernorm, "post_attention_layernorm")):  # fmt: skip
                norm.weight.copy_(target[f"{name}.weight"])
            self.norm.weight.copy_(target["norm.weight"])
            self.lm_head.weight.copy_(self.output)


class _BaseRows:
    """The pairs whose predictions are judged, document by document.

    base        int64 [R], place in the pack of the token t that each starts from
    within      int64 [N], place of every token in its own document: its position
    documents   (start, end, first, last, hidden): tokens start..end of the pack, rows first..last of R, and the mask
                bool [r, n] of the step-0 pairs that a row must not see
    judged      int64 [J], the tokens behind which a token counts
    slot        int64 [N], place of each of these in `judged`
    """

    def __init__(self, pack: Pack, steps: int) -> None:
        self.within = torch.empty_like(pack.tokens)
        self.documents: list[tuple[int, int, int, int, Tensor]] = []
        base, ends, first = [], [], 0
        for start, end in pack.documents():
            place = torch.arange(end - start, device=pack.tokens.device)
            self.within[start:end] = place
            chosen = place[_any_ahead(pack.counts[start:end], 2, steps)]
            base.append(chosen + start)
            ends.append(torch.full_like(chosen, end))
            last = first + len(chosen)
            self.documents.append((start, end, first, last, place[None] > chosen[:, None]))
            first = last
        self.base, self._end = torch.cat(base), torch.cat(ends)
        self.judged = torch.nonzero(_any_ahead(pack.counts, 1, 1))[:, 0]
        self.slot = torch.zeros_like(pack.tokens)
        self.slot[self.judged] = torch.arange(len(self.judged), device=pack.tokens.device)

    def token(self, step: int) -> Tensor:
        """Place of token t+1+step of each row; the document's last where there is none."""
        return torch.minimum(self.base + 1 + step, self._end - 1)

    def valid(self, step: int) -> Tensor:
        """Whether there is a token t+1+step."""
        return self.base + 1 + step < self._end


def _any_ahead(flags: Tensor, skip: int, window: int) -> Tensor:
    """bool [n]: is any of flags[i+skip] .. flags[i+skip+window-1] set?"""
    sums = functional.pad(torch.cumsum(flags.long(), 0), (1, skip + window), value=0)
    sums[len(flags) + 1 :] = sums[len(flags)]
    place = torch.arange(len(flags), device=flags.device) + skip
    return sums[place + window] > sums[place]
