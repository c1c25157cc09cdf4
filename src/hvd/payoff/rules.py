"""Policies that follow a fixed rule. They learn nothing and look at no costs; they are what a gate has to beat."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from hvd.errors import ConfigError
from hvd.payoff.cost import CostModel
from hvd.payoff.policy import Choice, Policy, Situation
from hvd.payoff.predictor import Predictor
from hvd.types import Arm, Draft

NO_DRAFT = Choice(Arm.PLAIN, reason="no draft")


def whole_cache(situation: Situation, reason: str, expected: float = float("nan")) -> Choice:
    """The cache draft as far as there is room."""
    assert situation.cache is not None
    length = min(len(situation.cache), situation.room)
    return Choice(Arm.CACHE, length, min(expected, float(length)), reason)  # the order keeps NaN


def head_or_plain(situation: Situation, reason: str = "") -> Choice:
    """The head's draft as far as there is room; plain without a head."""
    length = min(situation.eagle3, situation.room)
    if length < 1:
        return Choice(Arm.PLAIN, reason=reason) if reason else NO_DRAFT
    return Choice(Arm.EAGLE3, length, reason=reason or f"eagle3 {length}")


def has_cache(situation: Situation) -> bool:
    """Whether the cache offers something that there is room for."""
    return situation.cache is not None and len(situation.cache) > 0 and situation.room > 0


class Rule(Policy):
    """A policy that looks at each request by itself."""

    def choose(self, situations: Sequence[Situation], cost: CostModel) -> list[Choice]:
        """See `Policy.choose`."""
        return [self.choose_one(situation) for situation in situations]

    @abstractmethod
    def choose_one(self, situation: Situation) -> Choice:
        """The choice for one request."""


class Plain(Rule):
    """Never a draft: what speculation is compared with."""

    name = "plain"
    uses = frozenset()

    def choose_one(self, situation: Situation) -> Choice:
        """See `Rule.choose_one`."""
        return Choice(Arm.PLAIN, reason="plain")


class Cache(Rule):
    """SuffixDecoding alone: the whole cache draft whenever there is one."""

    name = "cache"
    uses = frozenset({Arm.CACHE})

    def choose_one(self, situation: Situation) -> Choice:
        """See `Rule.choose_one`."""
        return whole_cache(situation, "cache") if has_cache(situation) else NO_DRAFT


class Eagle3(Rule):
    """EAGLE3 alone: the head whenever there is one."""

    name = "eagle3"
    uses = frozenset({Arm.EAGLE3})
    needs = frozenset({Arm.EAGLE3})

    def choose_one(self, situation: Situation) -> Choice:
        """See `Rule.choose_one`."""
        return head_or_plain(situation)


class AnyMatch(Rule):
    """The rule of llama.cpp's chain of drafters: any match at all, else the head."""

    name = "any-match"

    def choose_one(self, situation: Situation) -> Choice:
        """See `Rule.choose_one`."""
        return whole_cache(situation, "match") if has_cache(situation) else head_or_plain(situation)


class _Threshold(Rule):
    """The cache draft when a figure of it reaches a threshold, else the head, else plain."""

    figure: ClassVar[str]
    default: ClassVar[float]

    def __init__(self, threshold: float | None = None) -> None:
        """`threshold` must be at least 0; None = the class's default."""
        value = self.default if threshold is None else threshold
        if not 0 <= value < float("inf"):
            raise ConfigError(f"policy {self.name!r}: the threshold must be at least 0 and finite, got {threshold}")
        self.threshold = value

    @classmethod
    def make(cls, argument: str | None, predictor: Predictor | None, **options: Any) -> Policy:
        """See `Policy.make`; the argument is the threshold."""
        return cls(number(cls.name, argument)) if argument is not None else cls(**options)

    @staticmethod
    @abstractmethod
    def measure(draft: Draft) -> float:
        """The figure compared with the threshold."""

    def choose_one(self, situation: Situation) -> Choice:
        """See `Rule.choose_one`."""
        if not has_cache(situation):
            return head_or_plain(situation)
        assert situation.cache is not None
        value = self.measure(situation.cache)
        if value >= self.threshold:
            return whole_cache(situation, f"{self.figure} {value:.3g}")
        return head_or_plain(situation, f"{self.figure} {value:.3g} < {self.threshold:g}")


class MatchLength(_Threshold):
    """TensorRT-LLM's rule for suffix automata (`use_sa_spec`): match length at least 4."""

    name = "match-len"
    figure = "match"
    default = 4.0

    @staticmethod
    def measure(draft: Draft) -> float:
        """Tokens of context that the cache matched."""
        return float(draft.match_len)


class Score(_Threshold):
    """ArcticInference's rule: suffix score at least the number of neural draft tokens (3)."""

    name = "score"
    figure = "score"
    default = 3.0

    @staticmethod
    def measure(draft: Draft) -> float:
        """The suffix cache's score."""
        return draft.score


def number(policy: str, argument: str) -> float:
    """The number behind the colon of a policy's name. Raises ConfigError."""
    try:
        return float(argument)
    except ValueError as error:
        raise ConfigError(f"policy {policy!r} takes a number behind the colon, got {argument!r}") from error
