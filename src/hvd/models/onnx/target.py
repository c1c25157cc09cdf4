"""The ONNX Runtime backend: what decodes on a CPU.

**Bit for bit.** The logits of a token depend on its prefix alone, not on the shape of the pass that computes it. Three
measures see to that (tested in tests/test_onnx_bitwise.py, over many widths and all weight formats):

Kernels of our own (`attention_kernel`, `linear_kernel`), which compute every row alike.

Padding. ONNX Runtime's products, which float32 models and processors without VNNI still take, treat a row that stands
alone in another way, and its last bits may differ. There a pass of one token is widened by a dummy behind its end.

Trees in pieces. Attention sums over keys in the order, and in the vector lanes, in which they lie. A side branch behind
a mask, with strangers between its ancestors, comes out slightly different from the same tokens as a chain. So a tree is
computed as its chains, each at the place where it would stand as plain text: bitwise equal, at the cost of one pass a
branch. On this backend chains are the better draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hvd.errors import ConfigError
from hvd.jit import compiled
from hvd.models.onnx import attention_kernel, linear_kernel
from hvd.models.onnx.api import Binding
from hvd.models.onnx.attention import Attention, OnnxKVCache
from hvd.models.onnx.cache import ROPE_FILE, Converted
from hvd.models.onnx.heads import wide
from hvd.models.onnx.linear import PACKED
from hvd.models.onnx.session import open_session
from hvd.models.spans import check_spans, depths
from hvd.models.target import KVCache, Span, SpanOutput, Target, TargetSpec
from hvd.types import ROOT, Float32Array, Int32Array, Int64Array

SLACK = 1
"""Dummies that a pass may have."""
MAX_WIDTH = 256
"""Wider spans are computed in pieces: they gain nothing, and activations would take ever more memory."""


def kernels_are_compiled() -> bool:
    """Whether an earlier process left the compiled kernels, so that opening a target takes no time for that."""
    return compiled(attention_kernel._compute) and (not PACKED or compiled(linear_kernel._compute))


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Tokens of one text that a pass computes, from slot `start` on. logits [m, V]: room for those of the last m."""

    cache: OnnxKVCache
    start: int
    tokens: Int32Array
    logits: Float32Array
    hidden: Float32Array | None


def _pieces(cache: OnnxKVCache, start: int, tokens: Int32Array, every: bool, output: SpanOutput) -> Iterator[_Piece]:
    """Cut a chain into pieces of MAX_WIDTH. Logits of every token, or of the last one if there is room for one."""
    for first in range(0, len(tokens), MAX_WIDTH):
        part = slice(first, first + MAX_WIDTH)
        last = first + MAX_WIDTH >= len(tokens)
        logits = output.logits[part] if every else output.logits if last else output.logits[:0]
        hidden = None if output.hidden is None else output.hidden[part]
        yield _Piece(cache, start + first, tokens[part], logits, hidden)


class OnnxTarget(Target):
    """A converted model in ONNX Runtime. Chains of several requests share a pass, and with it the reading of the
    weights."""

    def __init__(
        self, converted: Converted, *, aux_layers: Sequence[int] | None = None, threads: int | None = None
    ) -> None:
        """Map the weights and prepare them for multiplication.

        aux_layers   layers whose entering states a pass can return; None = those that EAGLE3 heads take
        threads      None = as many as there are cores

        Raises ConfigError for a parameter out of range, CheckpointError when the files can't be read.
        """
        config = converted.config
        layers = config.aux_layers(aux_layers)
        if threads is not None and threads < 1:
            raise ConfigError(f"threads must be at least 1, got {threads}")
        self.config = config
        self.spec = TargetSpec(
            name=converted.name,
            family=config.family,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            context_limit=config.context_limit,
            aux_layers=layers,
            fingerprint=converted.fingerprint,
            backend="onnx",
            weights=converted.weights,
            min_width=1 if PACKED and converted.weights != "fp32" else 2,
        )
        dim, rope = wide(config.head_dim), np.load(converted.directory / ROPE_FILE, mmap_mode="r")
        self._attention = Attention(config.num_heads, config.num_kv_heads, dim, config.head_dim**-0.5, rope)
        session = open_session(converted.directory, threads, [self._attention.operator()])
        self._bindings = {"tokens": session.binding(), "states": session.binding()}
        self._ids = np.zeros((1, MAX_WIDTH + SLACK), np.int64)
        self._positions = np.arange(MAX_WIDTH + SLACK, dtype=np.int64)
        self._logits = np.empty((0, config.vocab_size), np.float32)
        self._entering = np.empty((len(layers), 0), np.float32)

    def open(self) -> OnnxKVCache:
        """See `Target.open`."""
        config = self.config
        shape = (config.num_layers, config.num_kv_heads, wide(config.head_dim))
        return OnnxKVCache(shape, config.context_limit, SLACK)

    def forward(self, spans: Sequence[Span]) -> list[SpanOutput]:
        """See `Target.forward`."""
        caches = [self._own(span.cache) for span in spans]
        check_spans(spans, self.spec.vocab_size, self.spec.context_limit)
        for span, cache in zip(spans, caches, strict=True):
            cache.reserve(len(span.tokens))
        outputs = self._reserve_outputs(spans)
        together: list[_Piece] = []
        for span, cache, output in zip(spans, caches, outputs, strict=True):
            if span.parents is None:
                for piece in _pieces(cache, cache.length, span.tokens, span.rows == "all", output):
                    if sum(len(each.tokens) for each in (*together, piece)) > MAX_WIDTH:
                        self._pass(together)
                        together = []
                    together.append(piece)
            else:
                self._pass(together)
                together = []
                self._tree(cache, span.tokens, span.parents, span.rows, output)
        self._pass(together)
        for span, cache in zip(spans, caches, strict=True):
            cache.pending = len(span.tokens)
        return outputs

    def _own(self, cache: KVCache) -> OnnxKVCache:
        if not isinstance(cache, OnnxKVCache):
            raise TypeError(f"the onnx backend needs a cache that it opened itself, got {type(cache).__name__}")
        return cache

    def _reserve_outputs(self, spans: Sequence[Span]) -> list[SpanOutput]:
        """Room for the results. The logits of all spans lie behind each other in one buffer, which every pass uses anew
        (fresh pages would cost a millisecond), with a spare row at the end for the dummy of a padded pass: results are
        written in order, so that a dummy's row is overwritten by the next result.
        """
        counts = [{"all": len(span.tokens), "last": 1, "none": 0}[span.rows] for span in spans]
        if sum(counts) + SLACK > len(self._logits):
            self._logits = np.empty((sum(counts) + SLACK, self.spec.vocab_size), np.float32)
        width = self.spec.hidden_size * len(self.spec.aux_layers)
        outputs, start = [], 0
        for span, count in zip(spans, counts, strict=True):
            hidden = np.empty((len(span.tokens), width), np.float32) if span.hidden else None
            outputs.append(SpanOutput(self._logits[start : start + count], hidden))
            start += count
        return outputs

    def _pass(self, pieces: Sequence[_Piece]) -> None:
        """One run of the graph. Logits of all pieces lie behind each other in memory, as their outputs do."""
        if not pieces:
            return
        count = sum(len(piece.tokens) for piece in pieces)
        width = self._padded(count)
        self._ids[0, :count] = (
            np.concatenate([piece.tokens for piece in pieces]) if len(pieces) > 1 else pieces[0].tokens
        )
        self._ids[0, count:width] = 0
        self._attention.begin_together(
            [(piece.cache.store, piece.start, len(piece.tokens) + width - count) for piece in pieces]
        )
        wanted, first, logits, states = [], 0, self._logits[:0], False
        for piece in pieces:
            if len(piece.logits):
                wanted.append(self._positions[first + len(piece.tokens) - len(piece.logits) :][: len(piece.logits)])
                logits = logits if len(wanted) > 1 else piece.logits
            first, states = first + len(piece.tokens), states or piece.hidden is not None
        rows = np.concatenate(wanted) if len(wanted) > 1 else wanted[0] if wanted else self._positions[:0]
        if len(rows) == 1:
            rows = np.resize(rows, self._padded(1))
        binding = self._bindings["states" if states else "tokens"]
        binding.input("input_ids", self._ids, (1, width))
        binding.input("rows", rows)
        binding.output("logits", logits, (1, len(rows), self.spec.vocab_size))
        if states:
            self._run_with_states(binding, width, pieces)
        else:
            binding.run()

    def _run_with_states(self, binding: Binding, width: int, pieces: Sequence[_Piece]) -> None:
        """Run, and collect the states entering `aux_layers` into each piece's hidden [n, A*H]."""
        size = self.spec.hidden_size
        if width * size > self._entering.shape[1]:
            self._entering = np.empty((len(self.spec.aux_layers), width * size), np.float32)
        for layer, state in zip(self.spec.aux_layers, self._entering, strict=True):
            binding.output(f"entering.{layer}", state, (1, width, size))
        binding.run()
        states, first = self._entering[:, : width * size].reshape(len(self._entering), width, size), 0
        for piece in pieces:
            last = first + len(piece.tokens)
            if piece.hidden is not None:
                for index, state in enumerate(states):
                    piece.hidden[:, index * size : (index + 1) * size] = state[first:last]
            first = last

    def _padded(self, rows: int) -> int:
        return max(rows, self.spec.min_width)

    def _tree(self, cache: OnnxKVCache, tokens: Int32Array, parents: Int32Array, rows: str, output: SpanOutput) -> None:
        """Compute a tree chain by chain, each in the place of the ones before it; at the end the nodes lie in order."""
        depth = depths(parents)
        two_layers, heads, _, dim = cache.store.array.shape
        nodes = np.empty((two_layers, heads, len(tokens), dim), np.float32)
        for chain in chains(parents):
            start, end = int(depth[chain[0]]), int(depth[chain[-1]]) + 1
            result = self._scratch(len(chain), output.hidden is not None)
            for piece in _pieces(cache, cache.length + start, tokens[chain], True, result):
                self._pass([piece])
            nodes[:, :, chain] = cache.store.read(np.arange(cache.length + start, cache.length + end))
            if rows == "all":
                output.logits[chain] = result.logits
            elif rows == "last" and chain[-1] == len(tokens) - 1:
                output.logits[0] = result.logits[-1]
            if output.hidden is not None:
                output.hidden[chain] = result.hidden
        cache.store.write(np.arange(cache.length, cache.length + len(tokens)), nodes)

    def _scratch(self, count: int, hidden: bool) -> SpanOutput:
        width = self.spec.hidden_size * len(self.spec.aux_layers)
        logits = np.empty((count + SLACK, self.spec.vocab_size), np.float32)[:count]
        return SpanOutput(logits, np.empty((count, width), np.float32) if hidden else None)


def chains(parents: Int32Array) -> list[Int64Array]:
    """Cut a tree into chains of nodes, each the child of the one before it, in depth-first order.

    When a chain's turn comes, the chain computed last at each smaller depth is that of its ancestors.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents.tolist()):
        children.setdefault(parent, []).append(node)
    found: list[Int64Array] = []
    heads = children.get(ROOT, [])[::-1]
    while heads:
        chain = [heads.pop()]
        while chain[-1] in children:
            first, *others = children[chain[-1]]
            heads += others[::-1]
            chain.append(first)
        found.append(np.array(chain, dtype=np.int64))
    return found
