"""Our policy: the arm and the length with the most expected tokens a second.

Why the ratio, tokens over seconds of the cycle at hand, and not tokens minus a rate times seconds? The exact rule would
be the latter, with the rate at which the tokens *behind* this draft are going to be made. That rate isn't known: a
long-run average is far too high in the middle of prose and far too low within a copy. The ratio takes the draft's own
best rate for it (Dinkelbach: the best ratio r is where max E[tokens] - r * seconds = 0), and what follows a draft is
mostly like the draft. Replayed on recorded replies of thirty data sets, rates of 0.25 to 2 times that one, the plain
rate and running averages of the request's own did worse or at best as well. It needs no tuning and, with "plain" among
the choices, is never expected to lose against it.

Requests that are run one after the other each keep their own ratio. Requests that share a pass share its cost: then the
ratio is that of the whole pass, and tokens of all requests compete for width, likeliest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from hvd.errors import ConfigError
from hvd.payoff.cost import CostModel
from hvd.payoff.history import HIT_WINDOW, History
from hvd.payoff.online import Forecast, HeadAcceptance, HeadRecord, OnlineSurvival
from hvd.payoff.policy import Choice, Policy, Situation
from hvd.payoff.predictor import Predictor, SurvivalPredictor
from hvd.types import Arm, Draft, Float64Array

_TOLERANCE = 0.002
"""A dearer choice must be better by this share: smaller differences are noise, and following them is restless."""

_FREE: Float64Array = np.zeros(1)
"""Seconds of drafting from the cache, at any length."""

_SPREAD = 16
"""A head's catching up is charged as if spread over so many uses: paid once, it serves all later drafts. Charged
whole, the head would never be begun with behind a long prompt."""


@dataclass(slots=True, eq=False)
class _Request:
    """What the policy keeps of a request between cycles.

    drafts      of the cache, last on offer, until the outcome is known, the main one first
    forecasts   of these
    position    tokens generated when they were made
    """

    head: HeadRecord
    drafts: tuple[Draft, ...] = ()
    forecasts: Sequence[Forecast | None] = ()
    position: int = 0

    def forecast(self, draft: Draft | None) -> Forecast | None:
        """Of one of the drafts."""
        return next((found for d, found in zip(self.drafts, self.forecasts, strict=True) if d is draft), None)


@dataclass(frozen=True, slots=True, eq=False)
class _Offer:
    """An arm's draft: expected accepted tokens and seconds of drafting at lengths 1..n, float64 [n] ([1] = at any)."""

    arm: Arm
    gains: Float64Array
    seconds: Float64Array
    draft: Draft | None = None


class Hybrid(Policy):
    """Survival curves against cost curves; "plain" is an arm; corrects itself by every outcome."""

    name = "hvd"
    predictor_kind = "survival"
    compares = True

    def __init__(self, predictor: SurvivalPredictor | None = None) -> None:
        """
        predictor    trained survival predictor; None = the fallback alone
        """
        self.survival = OnlineSurvival(predictor)
        self.heads = HeadAcceptance()
        self._requests: WeakKeyDictionary[History, _Request] = WeakKeyDictionary()

    @classmethod
    def make(cls, argument: str | None, predictor: Predictor | None, **options: Any) -> Policy:
        """See `Policy.make`."""
        if argument is not None:
            raise ConfigError(f"policy 'hvd' takes no argument, got {argument!r}")
        if predictor is not None and not isinstance(predictor, SurvivalPredictor):
            raise ConfigError(f"policy 'hvd' needs a predictor of kind 'survival', got one of kind {predictor.kind!r}")
        return cls(predictor, **options)

    def choose(self, situations: Sequence[Situation], cost: CostModel) -> list[Choice]:
        """See `Policy.choose`."""
        offers = [self._offers(situation, cost) for situation in situations]
        if cost.shared_passes and len(situations) > 1:
            return _share(situations, offers, cost)
        return [_alone(situation, each, cost) for situation, each in zip(situations, offers, strict=True)]

    def observe(self, situation: Situation, choice: Choice, accepted: int) -> None:
        """See `Policy.observe`."""
        request = self._requests.get(situation.history)
        if request is None:
            return
        forecast = request.forecast(choice.draft or situation.cache) if choice.arm is Arm.CACHE else None
        if forecast is not None:
            self.survival.learn(forecast, choice.length, accepted)
            request.drafts = request.forecasts = ()
        if choice.arm is Arm.EAGLE3:
            self.heads.learn(request.head, choice.length, accepted)
        elif situation.eagle3:
            self.heads.idle(request.head)

    def foretold(self, situation: Situation, choice: Choice) -> dict[Arm, Float64Array]:
        """See `Policy.foretold`."""
        request = self._requests[situation.history]
        found: dict[Arm, Float64Array] = {}
        draft = situation.shown(choice)
        forecast = request.forecast(draft)
        if draft is not None and forecast is not None:
            found[Arm.CACHE] = np.zeros(min(len(draft), situation.room))
            found[Arm.CACHE][: len(forecast.survival)] = forecast.survival[: situation.room]
        length = min(situation.eagle3, situation.room)
        if length > 0:
            found[Arm.EAGLE3] = self.heads.survival(request.head, length)
        return found

    def _offers(self, situation: Situation, cost: CostModel) -> list[_Offer]:
        """What the cache and the head have to offer, with expectations."""
        request = self._requests.get(situation.history)
        if request is None:
            request = self._requests[situation.history] = _Request(self.heads.open())
        self._learn_unverified(situation.history, request)
        offers = []
        request.drafts = drafts = situation.cached
        request.forecasts = self.survival.forecasts(situation.history, drafts) if drafts else ()
        for draft, forecast in zip(drafts, request.forecasts, strict=True):
            if forecast is not None:
                gains = np.add.accumulate(forecast.survival[: situation.room], dtype=np.float64)
                offers.append(_Offer(Arm.CACHE, gains, _FREE, draft))
        length = min(situation.eagle3, situation.room)
        if length > 0:
            offers.append(self._head_offer(request, situation, length, cost))
        request.position = situation.history.generated_length
        return offers

    def _head_offer(self, request: _Request, situation: Situation, length: int, cost: CostModel) -> _Offer:
        gains = np.add.accumulate(self.heads.survival(request.head, length))
        uses = min(_SPREAD, max(1, situation.room // 2))
        seconds = cost.eagle3_curve(length, 1 + (situation.backlog - 1) / uses, situation.context)
        if situation.whole:
            seconds[:-1] = np.inf
        return _Offer(Arm.EAGLE3, gains, seconds)

    def _learn_unverified(self, history: History, request: _Request) -> None:
        """A draft that was on offer and not verified: whether its first token was right is known all the same."""
        forecast = request.forecasts[0] if request.drafts and not request.drafts[0].age else None
        request.drafts = request.forecasts = ()
        ago = history.generated_length - request.position - 1
        if forecast is not None and 0 <= ago < HIT_WINDOW:
            self.survival.learn(forecast, 1, int(history.hit(ago)))


def _first_best(rates: Float64Array) -> int:
    """Index of the first rate within the tolerance of the best."""
    return int(np.argmax(rates >= rates.max() * (1.0 - _TOLERANCE)))


def _alone(situation: Situation, offers: Sequence[_Offer], cost: CostModel) -> Choice:
    """The best ratio of one request that pays for its own passes."""
    if not offers:
        return Choice(Arm.PLAIN, expected=0.0, reason="plain: no draft")
    longest = max(len(offer.gains) for offer in offers)
    seconds = cost.verify_curve(longest + 1, situation.context) + cost.overhead
    best, choice = 1.0 / seconds[0], _plain(offers)
    for offer in offers:
        n = len(offer.gains)
        rates = (1.0 + offer.gains) / (seconds[1 : n + 1] + offer.seconds)
        index = _first_best(rates)
        if rates[index] > best * (1.0 + _TOLERANCE):
            best, choice = float(rates[index]), _drafted(offer, index)
    return choice


def _plain(offers: Sequence[_Offer]) -> Choice:
    if not offers:
        return Choice(Arm.PLAIN, expected=0.0, reason="plain: no draft")
    return Choice(Arm.PLAIN, expected=0.0, reason=f"plain: {offers[0].arm} first token {offers[0].gains[0]:.0%}")


def _drafted(offer: _Offer, index: int) -> Choice:
    gain = float(offer.gains[index])
    of = len(offer.gains) if offer.draft is None else len(offer.draft)
    reason = f"{offer.arm} {index + 1} of {of}: {gain:.1f} expected"
    return Choice(offer.arm, index + 1, gain, reason, offer.draft)


def _share(situations: Sequence[Situation], offers: Sequence[Sequence[_Offer]], cost: CostModel) -> list[Choice]:
    """Split the width of a shared pass: the most expected tokens of all requests over its seconds.

    First each request takes the arm that is worth more at the rate of an all-plain pass. Then all tokens of the chosen
    cache drafts are put in one row, likeliest first, and the pass takes as many from its front as pay. (Survival never
    increases along a draft, so the front holds a beginning of every draft: the greedy choice is the best one.)
    """
    count = len(situations)
    contexts = [situation.context for situation in situations]
    limit = count + sum(max((len(o.gains) for o in each), default=0) for each in offers)
    seconds = cost.batch_curve(limit, contexts) + cost.overhead * count
    picked = [_worth_most(each, seconds, count) for each in offers]
    heads = [o for o in picked if isinstance(o, Choice)]
    spent = sum(
        cost.eagle3(c.length, s.backlog, s.context)
        for c, s in zip(picked, situations, strict=True)
        if isinstance(c, Choice)
    )
    base = count + sum(choice.length for choice in heads)
    tokens = count + sum(choice.expected for choice in heads)
    lengths = _cut([o for o in picked if isinstance(o, _Offer)], base, tokens, seconds + spent)
    return [_shared_choice(each, choice, lengths) for each, choice in zip(offers, picked, strict=True)]


def _worth_most(offers: Sequence[_Offer], seconds: Float64Array, count: int) -> _Offer | Choice | None:
    """The cache's offer, still to be cut; or the head's choice, which is final; None = plain."""
    rate = count / seconds[count - 1]
    best, picked = 0.0, None
    for offer in offers:
        n = len(offer.gains)
        worth = offer.gains - rate * (seconds[count : count + n] - seconds[count - 1] + offer.seconds)
        index = int(np.argmax(worth))
        if worth[index] > best:
            best, picked = float(worth[index]), offer if offer.arm is Arm.CACHE else _drafted(offer, index)
    return picked


def _cut(offers: Sequence[_Offer], base: int, tokens: float, seconds: Float64Array) -> dict[int, int]:
    """Length of each cache draft, by id of the offer, for the best ratio of the pass.

    base, tokens   width and expected tokens of the pass without any of them
    seconds        [..] of the whole pass by total width
    """
    if not offers:
        return {}
    survivals = [np.diff(offer.gains, prepend=0.0) for offer in offers]
    owners: NDArray[np.intp] = np.repeat(np.arange(len(offers)), [len(s) for s in survivals])
    row = np.concatenate(survivals)
    order = np.argsort(-row, kind="stable")
    gains = np.concatenate(([0.0], np.add.accumulate(row[order])))
    taken = _first_best((tokens + gains) / seconds[base - 1 : base + len(row)])
    lengths = np.bincount(owners[order[:taken]], minlength=len(offers))
    return {id(offer): int(n) for offer, n in zip(offers, lengths, strict=True)}


def _shared_choice(offers: Sequence[_Offer], picked: _Offer | Choice | None, lengths: dict[int, int]) -> Choice:
    if isinstance(picked, Choice):
        return picked
    if picked is None or not lengths[id(picked)]:
        return _plain(offers)
    return _drafted(picked, lengths[id(picked)] - 1)
