"""The suffix cache as a drafter: one tree for every running request, one of finished responses for every scope."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from hvd.config import SuffixConfig
from hvd.drafters.base import Drafter
from hvd.errors import RequestError
from hvd.types import Arm, Draft, Float32Array, Int32Array, Int64Array

if TYPE_CHECKING:  # Numba takes a third of a second to import: only when a drafter is made
    from hvd.drafters import suffix_tree
    from hvd.drafters.suffix_shared import Scope
    from hvd.drafters.suffix_tree import SuffixTree

UInt8Array = NDArray[np.uint8]
_Propose = Callable[..., tuple[int, int, int, np.float32]]

COMPILE_SECONDS = 10
"""What compiling took on two cores, about."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SuffixStats:
    """What the cache holds.

    live_requests   requests open now
    local_bytes     bytes of their trees
    responses       finished responses kept, over all scopes
    shared_bytes    bytes of the scopes' trees and responses
    evicted         responses that left to make room
    """

    live_requests: int
    local_bytes: int
    responses: int
    shared_bytes: int
    evicted: int


class _Request:
    """A running request: its text, its own tree, and where its text ends in the tree of its scope."""

    __slots__ = ("copy", "hits", "left", "length", "match", "response_start", "scope", "text", "tree", "version")

    def __init__(self, tree: SuffixTree, scope: str, copy: suffix_tree.PackedBuffers) -> None:
        self.tree: SuffixTree | None = tree
        self.copy = copy
        self.left: Int64Array = np.zeros(3, np.int64)
        self.scope = scope
        self.text = np.empty(256, np.int32)
        self.length = 0
        self.response_start = 0
        self.match: Int64Array = np.zeros(3, np.int64)
        self.version = -1
        self.hits: UInt8Array = np.zeros(0, np.uint8)

    def append(self, tokens: Int32Array, prompt: bool) -> None:
        end = self.length + len(tokens)
        if end > len(self.text):
            grown = np.empty(max(end, 2 * len(self.text)), np.int32)
            grown[: self.length] = self.text[: self.length]
            self.text = grown
        self.text[self.length : end] = tokens
        self.length = end
        if prompt:
            self.response_start = end

    @property
    def nbytes(self) -> int:
        return self.text.nbytes + (self.tree.nbytes if self.tree else 0)


class SuffixDrafter(Drafter):
    """Copies what followed where the last tokens occurred before, in the request itself or in its scope's responses.

    The text of a request enters its scope when it is closed with `keep`, never before: what a cancelled one wrote is
    not seen by others. `config.max_bytes` bounds all trees together: finished responses leave, the least recently used
    first; when running requests alone would exceed it, the one that would grow stops drafting.

    vocab_size              ids at or above it are never proposed
    tokenizer_fingerprint   written into, and demanded of, saved files (suffix_file.py)
    announce                told in one line when Numba has to compile, once after an install; default: the log
    """

    arm = Arm.CACHE

    def __init__(
        self,
        config: SuffixConfig,
        vocab_size: int,
        tokenizer_fingerprint: str,
        announce: Callable[[str], None] = _log.info,
    ) -> None:
        from hvd.drafters import suffix_shared, suffix_tree

        self.config = config
        self.vocab_size = vocab_size
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self._kernels = suffix_tree
        rules = suffix_tree.Rules(
            arctic=config.mode == "arctic",
            depth=config.max_depth,
            max_draft=config.max_draft,
            factor=np.float32(config.max_spec_factor),
            offset=np.float32(config.max_spec_offset),
            min_prob=np.float32(config.min_token_prob),
            vocab_size=vocab_size,
        )
        self._rules = cast("suffix_tree.PackedRules", tuple(rules))
        self._out = suffix_tree.buffers(config.max_draft)
        self._packed_out = cast("suffix_tree.PackedBuffers", tuple(self._out))
        self._parents = np.arange(-1, config.max_draft - 1, dtype=np.int32)
        self._requests: dict[int, _Request] = {}
        self._local_bytes = 0
        self._nothing = suffix_shared.Scope()
        self.shared = suffix_shared.SharedResponses(self._rules)
        if not suffix_tree.compiled():
            announce(f"compiling the suffix cache, once (about {COMPILE_SECONDS} s)")
        self._warm_up()

    def _warm_up(self) -> None:
        """Load or compile every kernel now rather than within a request."""
        tree, match = self._kernels.SuffixTree(), np.zeros(3, np.int64)
        tokens = np.zeros(1, np.int32)
        tree.reserve(1)
        self._kernels.insert(tree.packed, tokens, self._rules)
        tree.reserve(100)  # more than it has room for: growth has a kernel too
        self._kernels.rematch(self._nothing.tree.packed, match, tokens, self._rules)
        hits = np.zeros(1, np.uint8)
        self._kernels.observe(
            tree.packed,
            self._nothing.tree.packed,
            match,
            tokens,
            hits,
            False,
            self._rules,
            self._packed_out,
            self._packed_out,
            match.copy(),
        )
        for propose in (self._kernels.propose, self._kernels.propose_scored):
            propose(tree.packed, self._nothing.tree.packed, match, 1, self._rules, self._packed_out)
        self._kernels.resume(self._packed_out, match, tokens)

    # ------------------------------------------------------------------------------------------- the life of a request

    def open(self, key: int, scope: str = "") -> None:
        """Start a request. Requests of one scope share their finished responses; "" is a scope like any other."""
        if key in self._requests:
            raise RequestError(f"request {key} is already open in the suffix cache; close it first")
        request = _Request(self._kernels.SuffixTree(), scope, self._buffers())
        self._requests[key] = request
        self._local_bytes += request.nbytes

    def observe(self, key: int, tokens: Int32Array, hidden: Float32Array | None, *, prompt: bool) -> None:
        """Take in committed tokens (see `Drafter.observe`); `hidden` is not used."""
        request = self._request(key)
        tokens = np.array(tokens, dtype=np.int32)  # a copy: Numba compiles anew for strided or read-only arrays
        before = request.nbytes
        request.hits = np.zeros(len(tokens), np.uint8)
        room = self._reserve(request, len(tokens))
        scope = self._scope(request)
        request.append(tokens, prompt)
        if room and request.tree is not None:
            self._kernels.observe(
                request.tree.packed,
                scope.tree.packed,
                request.match,
                tokens,
                request.hits,
                not prompt,
                self._rules,
                self._packed_out,
                request.copy,
                request.left,
            )
        self._local_bytes += request.nbytes - before

    def propose(self, key: int, room: int) -> Draft | None:
        """Draft at most `room` tokens behind the committed text; None when there is nothing to offer."""
        request = self._request(key)
        if request.tree is None or room <= 0:
            return None
        return self._proposed(self._kernels.propose, request, room)

    def alternatives(self, key: int, room: int) -> tuple[Draft, ...]:
        """See `Drafter.alternatives`: the draft behind the suffix with the best score, and the rest of a copy left.

        Where the text has left a copy at one place, it often comes back to it (a form filled in anew, one word of a
        sentence changed), and no match of three tokens says so yet.
        """
        request = self._request(key)
        if request.tree is None or room <= 0:
            return ()
        drafts = self._proposed(self._kernels.propose_scored, request, room), self._resumed(request, room)
        return tuple(draft for draft in drafts if draft is not None)

    def _proposed(self, propose: _Propose, request: _Request, room: int) -> Draft | None:
        assert request.tree is not None
        scope, out = self._scope(request), self._out
        n, match_len, source, score = propose(
            request.tree.packed, scope.tree.packed, request.match, int(room), self._rules, self._packed_out
        )
        if n == 0:
            return None
        if source != self._kernels.OWN:
            self.shared.touch(request.scope, source)
        return Draft(
            tokens=out.tokens[:n].copy(),
            parents=self._parents[:n],
            probs=out.probs[:n].copy(),
            arm=Arm.CACHE,
            score=float(score),
            match_len=match_len,
            counts=out.counts[:n].copy(),
            parent_counts=out.parents[:n].copy(),
            local=source == self._kernels.OWN,
        )

    def _resumed(self, request: _Request, room: int) -> Draft | None:
        """The rest of the copy that the text has left."""
        left = int(request.left[self._kernels.N_LEFT])
        if not left:
            return None
        tail = request.text[max(0, request.length - self._kernels.RESYNC) : request.length]
        start, same = self._kernels.resume(request.copy, request.left, tail)
        if start == self._kernels.NONE:
            return None
        rest = slice(start, min(left, start + room))
        tokens, counts, parents, probs = request.copy
        probs = probs[rest].copy()
        return Draft(
            tokens=tokens[rest].copy(),
            parents=self._parents[: len(probs)],
            probs=probs,
            arm=Arm.CACHE,
            score=float(np.multiply.accumulate(probs).sum()),
            match_len=same,
            counts=counts[rest].copy(),
            parent_counts=parents[rest].copy(),
            age=int(request.left[self._kernels.AGE]),
            origin=int(request.left[self._kernels.ORIGIN]),
        )

    def close(self, key: int, *, keep: bool) -> None:
        """End a request and free its tree. `keep`: its response joins those of its scope (if sharing is configured)."""
        request = self._request(key)
        del self._requests[key]
        self._local_bytes -= request.nbytes
        if keep and self.config.shared:
            self.add_response(request.scope, request.text[request.response_start : request.length])

    def add_response(self, scope: str, tokens: Int32Array) -> None:
        """Add a finished response, int32 [n], to a scope, as closing a request does."""
        self.shared.add(scope, np.array(tokens, dtype=np.int32), max(0, self.config.max_bytes - self._local_bytes))

    # ------------------------------------------------------------------------------------------------- what is known

    def last_hits(self, key: int) -> UInt8Array:
        """For every token of the last `observe`: 1 where a draft made just before would have begun with it. uint8 [n].

        0 for prompt tokens. It says how well the cache does at the moment, whichever arm was used.
        """
        return self._request(key).hits

    @property
    def live_requests(self) -> int:
        """Requests open now."""
        return len(self._requests)

    @property
    def bytes_used(self) -> int:
        """Bytes of all trees, with the texts behind them."""
        return self._local_bytes + self.shared.nbytes

    @property
    def stats(self) -> SuffixStats:
        """What the cache holds now."""
        return SuffixStats(
            self.live_requests, self._local_bytes, len(self.shared), self.shared.nbytes, self.shared.evicted
        )

    # ---------------------------------------------------------------------------------------------------- internals

    def _buffers(self) -> suffix_tree.PackedBuffers:
        return cast("suffix_tree.PackedBuffers", tuple(self._kernels.buffers(self.config.max_draft)))

    def _request(self, key: int) -> _Request:
        request = self._requests.get(key)
        if request is None:
            raise RequestError(f"request {key} is not open in the suffix cache")
        return request

    def _scope(self, request: _Request) -> Scope:
        """The request's scope, with its place in the tree brought up to date if that has changed."""
        scope = self.shared.get(request.scope) or self._nothing
        if request.version != scope.version:
            request.version = scope.version
            tail = request.text[max(0, request.length - self.config.max_depth) : request.length]
            self._kernels.rematch(scope.tree.packed, request.match, tail, self._rules)
        return scope

    def _reserve(self, request: _Request, more: int) -> bool:
        """Make room in the request's own tree, at the cost of finished responses; False when there is none at all."""
        if request.tree is None:
            return False
        growth = request.tree.bytes_with(more) - request.tree.nbytes
        if growth:
            self.shared.fit(max(0, self.config.max_bytes - self._local_bytes - growth))
            if self._local_bytes + growth > self.config.max_bytes:
                _log.warning("a request stops drafting: running requests fill the suffix cache's max_bytes")
                request.tree = None
                return False
        request.tree.reserve(more)
        return True
