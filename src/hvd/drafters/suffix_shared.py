"""Responses of earlier requests, by scope, in suffix trees that never outgrow a bound in bytes.

Nothing can be taken out of a suffix automaton, so room is made by copying: the least recently used scope is rebuilt
from the more recently used half of its responses, a few thousand tokens with every response that comes in, while the
old tree goes on serving; then the new one takes its place. So no insert waits for a large rebuild, and what was evicted
is gone from all counts. A rebuild begins at half of the bound, which leaves room for both trees.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from hvd.drafters import suffix_tree
from hvd.drafters.suffix_tree import PackedRules, SuffixTree
from hvd.types import Int32Array

TEXT_OVERHEAD = 256
"""Bytes of the Python objects around a kept response, about."""

COPY_RATIO, COPY_LEAST = 4, 2048
"""With n tokens inserted a rebuild advances by n * ratio + least tokens, or one response."""


_versions = itertools.count(1)


@dataclass(slots=True, eq=False)
class Response:
    """A finished response: its tokens, int32 [n], and when it was last used (a counter)."""

    tokens: Int32Array
    used: int


@dataclass(slots=True, eq=False)
class Scope:
    """The responses of one tenant or session. `responses[i]` is text number i of `tree`.

    version     changes with the tree and is never used twice: a request's position in another version is void
    heir        the scope being built to take this one's place; None when there is none
    waiting     responses that the heir still lacks, the next one last
    """

    tree: SuffixTree = field(default_factory=SuffixTree)
    responses: list[Response] = field(default_factory=list)
    version: int = 0
    heir: Scope | None = None
    waiting: list[Response] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the trees and the responses."""
        texts = 4 * self.tree.tokens + TEXT_OVERHEAD * len(self.responses)
        return self.tree.nbytes + texts + (self.heir.tree.nbytes if self.heir else 0)

    def add(self, response: Response, rules: PackedRules) -> None:
        """Put a response into the tree."""
        self.tree.reserve(len(response.tokens))
        suffix_tree.insert(self.tree.packed, response.tokens, rules)
        self.responses.append(response)
        self.version = next(_versions)

    def begin_rebuild(self) -> None:
        """Choose the responses that stay: the last used ones that make up at most half of the tokens."""
        room = self.tree.tokens // 2
        kept = set()
        for response in sorted(self.responses, key=lambda response: -response.used):
            room -= len(response.tokens)
            if room < 0:
                break
            kept.add(id(response))
        self.waiting = [response for response in reversed(self.responses) if id(response) in kept]
        self.heir = Scope(SuffixTree(sum(len(response.tokens) for response in self.waiting)))

    def rebuild(self, quota: int, rules: PackedRules) -> int:
        """Copy about `quota` tokens into the heir, which takes over when it lacks nothing; returns the quota left."""
        assert self.heir is not None
        while self.waiting and quota > 0:
            response = self.waiting.pop()
            self.heir.add(response, rules)
            quota -= len(response.tokens)
        if not self.waiting:
            self.tree, self.responses = self.heir.tree, self.heir.responses
            self.heir = None
            self.version = next(_versions)
        return quota


class SharedResponses:
    """All scopes, the least recently used first."""

    def __init__(self, rules: PackedRules) -> None:
        self._rules = rules
        self._scopes: OrderedDict[str, Scope] = OrderedDict()
        self._rebuilding: str | None = None
        self._clock = 0
        self.nbytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return sum(len(scope.responses) for scope in self._scopes.values())

    def __iter__(self) -> Iterator[tuple[str, list[Int32Array]]]:
        """Scopes by name, least recently used first, each with its responses in order of arrival."""
        for name, scope in self._scopes.items():
            yield name, [response.tokens for response in scope.responses]

    def get(self, name: str) -> Scope | None:
        """The scope of this name, if it holds anything."""
        return self._scopes.get(name)

    def touch(self, name: str, text: int) -> None:
        """Note that a response of a scope was of use."""
        self._clock += 1
        self._scopes.move_to_end(name)
        self._scopes[name].responses[text].used = self._clock

    def add(self, name: str, tokens: Int32Array, budget: int) -> None:
        """Keep a response, and make room by evicting others so that all bytes stay within `budget`.

        Of a response that alone would take more than a quarter of the budget only the end is kept.
        """
        tokens = tokens[max(0, len(tokens) - budget // (4 * suffix_tree.BYTES_PER_TOKEN)) :]
        if not len(tokens):
            return
        scope = self._scopes.setdefault(name, Scope())
        self._scopes.move_to_end(name)
        self._clock += 1
        response = Response(tokens, self._clock)
        before = scope.nbytes if scope.responses else 0
        if scope.heir is not None:
            scope.waiting.insert(0, response)
        scope.add(response, self._rules)
        self.nbytes += scope.nbytes - before
        self._make_room(COPY_RATIO * len(tokens) + COPY_LEAST, budget)

    def fit(self, budget: int) -> None:
        """Drop whole scopes, least recently used first, until all bytes are within `budget`."""
        while self.nbytes > budget and self._scopes:
            self._drop(next(iter(self._scopes)))

    def _make_room(self, quota: int, budget: int) -> None:
        """Go on with the rebuild under way; begin others while more than half of the budget is taken."""
        while quota > 0 and self._scopes and (self._rebuilding is not None or self.nbytes > budget // 2):
            name = self._rebuilding or next(iter(self._scopes))
            scope = self._scopes[name]
            before, responses = scope.nbytes, len(scope.responses)
            if scope.heir is None:
                scope.begin_rebuild()
                self._rebuilding = name
            quota = scope.rebuild(quota, self._rules)
            self.nbytes += scope.nbytes - before
            if scope.heir is None:
                self._rebuilding = None
                self.evicted += responses - len(scope.responses)
                if not scope.responses:
                    self._drop(name)
        self.fit(budget)

    def _drop(self, name: str) -> None:
        scope = self._scopes.pop(name)
        self.nbytes -= scope.nbytes
        self.evicted += len(scope.responses)
        if self._rebuilding == name:
            self._rebuilding = None
