"""Policies: given what is on offer, which draft to verify, and how much of it. The interface, and one by name.

    plain       never a draft                                                                            rules.py
    cache       the whole cache draft whenever there is one
    eagle3      the head whenever there is one
    any-match   any cache draft, else the head, else plain
    match-len   the cache draft when its match length is at least a threshold (4), else the head, else plain
    score       the same with the suffix score (3)
    hvd-paper   the paper's: predicted payoff above tau (6), else the head, else plain                   paper.py
    hvd         ours: arm and length with the most expected tokens a second; plain is an arm             hybrid.py

A threshold may be part of the name: "match-len:5". Others register in the entry-point group "hvd.policies".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar

from hvd.errors import ConfigError
from hvd.payoff.cost import CostModel
from hvd.payoff.history import History
from hvd.payoff.predictor import Predictor
from hvd.types import Arm, Draft, Float64Array


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """One request at a cycle boundary: all that a policy may look at.

    cache     the suffix cache's draft, already made (it is free), or None
    alternatives   other drafts of the suffix cache; () unless the policy `compares`
    history   what has happened to the request so far
    room      most draft tokens that may be verified now (max_tokens and the context bound it); may be 0
    context   positions in the KV cache
    eagle3    most tokens the EAGLE3 head could draft now; 0 when there is no head or it is past its position limit
    backlog   committed tokens that the head has not seen and must catch up with before it drafts
    whole     the head's draft is a tree: to be taken as large as it gets, or not at all
    """

    cache: Draft | None
    history: History
    room: int
    context: int
    eagle3: int = 0
    backlog: int = 0
    whole: bool = False
    alternatives: tuple[Draft, ...] = ()

    @property
    def cached(self) -> tuple[Draft, ...]:
        """The suffix cache's drafts, `cache` first; () where it has none, or there is no room."""
        if self.room < 1:
            return ()
        main = () if self.cache is None or not len(self.cache) else (self.cache,)
        return (*main, *self.alternatives)

    def shown(self, choice: Choice) -> Draft | None:
        """The cache draft that a choice is about; that first on offer when it is about none."""
        return choice.draft or next(iter(self.cached), None)


@dataclass(frozen=True, slots=True)
class Choice:
    """What to verify for one request.

    arm        CACHE: the first `length` tokens of the cache draft; EAGLE3: let the head draft `length` tokens;
               PLAIN: nothing, `length` is 0
    expected   draft tokens expected to be accepted; NaN when the policy does not predict
    reason     why, in a few words, for people
    draft      CACHE: which of the alternatives; None = the situation's `cache`
    """

    arm: Arm
    length: int = 0
    expected: float = float("nan")
    reason: str = ""
    draft: Draft | None = None


class Policy(ABC):
    """Chooses an arm and a length for every request of a batch. One instance an engine."""

    name: ClassVar[str]
    uses: ClassVar[frozenset[Arm]] = frozenset({Arm.CACHE, Arm.EAGLE3})
    """Arms the policy may choose besides plain; drafters that it does not use are not run for its requests."""
    compares: ClassVar[bool] = False
    """Whether it wants to see the suffix cache's alternatives."""
    needs: ClassVar[frozenset[Arm]] = frozenset()
    """Arms without which the policy makes no sense: an engine that lacks one refuses it."""
    predictor_kind: ClassVar[str | None] = None
    """The kind of predictor that `make` wants, or can use; None = none."""

    @classmethod
    def make(cls, argument: str | None, predictor: Predictor | None, **options: Any) -> Policy:
        """Build the policy for `make_policy`: `argument` is what stood behind the colon in its name.

        As it stands: for policies that take neither an argument nor a predictor. Raises ConfigError.
        """
        if argument is not None:
            raise ConfigError(f"policy {cls.name!r} takes no argument, got {argument!r}")
        return cls(**options)

    @abstractmethod
    def choose(self, situations: Sequence[Situation], cost: CostModel) -> list[Choice]:
        """One choice a situation, in order. `length` never exceeds `room`, nor what the arm offers."""

    def observe(self, situation: Situation, choice: Choice, accepted: int) -> None:  # noqa: B027 - most policies do not learn
        """Told after the walk how many draft tokens were accepted. For policies that correct themselves online."""

    def foretold(self, situation: Situation, choice: Choice) -> dict[Arm, Float64Array]:
        """P(accepted length >= k), k = 1.., of each arm's draft, as it was taken to be in the last `choose`, which made
        this choice. Of the cache's drafts: `Situation.shown`.

        Only for those who want to show a decision, before the next one; {} = the policy does not predict it.
        """
        return {}


_GROUP = "hvd.policies"
_BUILT_IN = {
    "plain": "hvd.payoff.rules:Plain",
    "cache": "hvd.payoff.rules:Cache",
    "eagle3": "hvd.payoff.rules:Eagle3",
    "any-match": "hvd.payoff.rules:AnyMatch",
    "match-len": "hvd.payoff.rules:MatchLength",
    "score": "hvd.payoff.rules:Score",
    "hvd-paper": "hvd.payoff.paper:Paper",
    "hvd": "hvd.payoff.hybrid:Hybrid",
}


def policy_names() -> list[str]:
    """Names that `make_policy` knows: the built-in ones, then those of installed packages."""
    return [*_BUILT_IN, *sorted({entry.name for entry in entry_points(group=_GROUP)} - set(_BUILT_IN))]


def make_policy(name: str, *, predictor: Predictor | None = None, **options: Any) -> Policy:
    """A policy by name, "name" or "name:argument".

    predictor   for policies that use one: "hvd" a `SurvivalPredictor` (or none), "hvd-paper" a `ScalarPredictor`
    options     keyword arguments of the policy's class

    Raises ConfigError for an unknown name (naming those there are), a wrong argument or the wrong kind of predictor.
    """
    base, colon, argument = name.partition(":")
    try:
        return policy_class(base).make(argument if colon else None, predictor, **options)
    except TypeError as error:
        raise ConfigError(f"policy {base!r}: {error}") from error


def policy_class(name: str) -> type[Policy]:
    """The class behind a policy's name (without argument). Raises ConfigError for an unknown name."""
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        found = getattr(import_module(module), attribute)
    else:
        entries = entry_points(group=_GROUP, name=name)
        if not entries:
            raise ConfigError(f"unknown policy {name!r}, known are {', '.join(policy_names())}")
        found = next(iter(entries)).load()
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f"policy {name!r} must be a class derived from hvd.payoff.policy.Policy, got {found!r}")
    return found
