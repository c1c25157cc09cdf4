"""The interface of a drafter: what the engine asks of the suffix cache, an EAGLE3 head, or a user's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from hvd.types import Arm, Draft, Float32Array, Int32Array

NO_LIMIT = 2**31 - 1


class Drafter(ABC):
    """Makes drafts for many live requests. One instance an engine; calls come from one thread.

    The life of a request: `open` once, then `observe` for every stretch of committed tokens (the prompt's
    included), whichever arm supplied them, `propose` when asked, `close` once. Engine-made request keys are
    unique for ever, so a caller's reused id never meets old state.

    A drafter never sees the target's noise, and may propose anything, a wrong or even an invalid token:
    the walk decides. It must not depend on anything but the committed text for its correctness.
    """

    arm: ClassVar[Arm]

    @abstractmethod
    def open(self, key: int, scope: str = "") -> None:
        """Start a request. `scope` names the tenant or session whose history it may share; those who name
        none share the scope ""."""

    @abstractmethod
    def observe(self, key: int, tokens: Int32Array, hidden: Float32Array | None, *, prompt: bool) -> None:
        """Take in committed tokens.

        tokens   int32 [n]          in order, directly behind those seen before
        hidden   float32 [n, A*H]   row i is the target's auxiliary hidden state of the token *before* tokens[i], the
                                    pair that an EAGLE3 head eats. (The last committed token has no state yet: the
                                    next pass computes it.) The first token's row is zeros, to be
                                    ignored.
                                    None when no drafter of the engine wants them.
        prompt   True for prompt tokens, False for generated ones
        """

    @abstractmethod
    def propose(self, key: int, room: int) -> Draft | None:
        """Draft at most `room` tokens behind the committed text; None when there is nothing to offer."""

    def alternatives(self, key: int, room: int) -> tuple[Draft, ...]:
        """Other drafts of at most `room` tokens than `propose`'s, for policies that compare."""
        return ()

    @abstractmethod
    def close(self, key: int, *, keep: bool) -> None:
        """End a request and free its state. `keep`: its response may serve later requests of its scope."""

    def limit(self, key: int) -> int:
        """Most tokens that `propose` could draft now, however much room there is."""
        return NO_LIMIT

    def backlog(self, key: int) -> int:
        """Committed tokens that the drafter still has to work through before it can draft."""
        return 0

    @property
    def all_or_nothing(self) -> bool:
        """Whether a part of what it drafts is worth little: a tree, whose number of nodes is not its depth."""
        return False

    @property
    def context_limit(self) -> int:
        """Longest text that it drafts for, in tokens."""
        return NO_LIMIT

    @property
    def fingerprint(self) -> str:
        """Names what the time of a draft depends on, in letters and digits: measured costs are kept under it."""
        return type(self).__name__.lower()

    def unhesitating(self) -> Drafter:
        """A drafter without requests that drafts as much as it is asked for: its cost is measured with it."""
        return self

    @property
    def wants_hidden(self) -> bool:
        """Whether `observe` needs the target's hidden states."""
        return False
