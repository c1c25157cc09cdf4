"""Policies: given what is on offer, which draft to verify, and how much of it. (Interface; the policies are below.)"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hvd.payoff.cost import CostModel
from hvd.payoff.history import History
from hvd.types import Arm, Draft


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """One request at a cycle boundary: all that a policy may look at.

    cache     the suffix cache's draft, already made (it is free), or None
    history   what has happened to the request so far
    room      most draft tokens that may be verified now (max_tokens and the context bound it); may be 0
    context   positions in the KV cache
    eagle3    most tokens the EAGLE3 head could draft now; 0 when there is no head or it is past its position limit
    backlog   committed tokens that the head has not seen and must catch up with before it drafts
    """

    cache: Draft | None
    history: History
    room: int
    context: int
    eagle3: int = 0
    backlog: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """What to verify for one request.

    arm        CACHE: the first `length` tokens of the cache draft; EAGLE3: let the head draft `length` tokens;
               PLAIN: nothing, `length` is 0
    expected   draft tokens expected to be accepted; NaN when the policy does not predict
    reason     why, in a few words, for people
    """

    arm: Arm
    length: int = 0
    expected: float = float("nan")
    reason: str = ""


class Policy(ABC):
    """Chooses an arm and a length for every request of a batch. One instance an engine."""

    name: ClassVar[str]
    uses: ClassVar[frozenset[Arm]] = frozenset({Arm.CACHE, Arm.EAGLE3})
    """Arms the policy may choose besides plain; drafters that it does not use are not run for its requests."""

    @abstractmethod
    def choose(self, situations: Sequence[Situation], cost: CostModel) -> list[Choice]:
        """One choice a situation, in order. `length` never exceeds `room`, nor what the arm offers."""

    def observe(self, situation: Situation, choice: Choice, accepted: int) -> None:  # noqa: B027 - most policies do not learn
        """Told after the walk how many draft tokens were accepted. For policies that correct themselves online."""
