"""What lay before a policy when it chose, for people to look at. Costs nothing unless it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvd.payoff.cost import CostModel
from hvd.payoff.features import STATE_NAMES, state_features
from hvd.payoff.policy import Choice, Policy, Situation
from hvd.types import Arm, Draft, Float64Array


@dataclass(frozen=True, slots=True, eq=False)
class Prospect:
    """One arm's draft as the policy saw it, at lengths k = 1..n.

    survival   float64 [n]   P(accepted length >= k); None when the policy does not predict it
    seconds    float64 [n]   of a cycle that verifies k tokens: pass, drafting with all catching up, overhead; by the
                             cost model as it was then. (A policy may charge less now for what serves later drafts too.)
    """

    arm: Arm
    survival: Float64Array | None
    seconds: Float64Array

    @property
    def rates(self) -> Float64Array | None:
        """Expected committed tokens a second at each length, float64 [n]: accepted ones and the bonus token."""
        if self.survival is None:
            return None
        rates: Float64Array = (1.0 + np.add.accumulate(self.survival)) / self.seconds
        return rates


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """One decision.

    cache          the cache draft that the choice is about or, if about none, the first on offer; None without one
    features       state features of that draft by name; empty without one
    plain_seconds  of a cycle without a draft
    prospects      the arms that could have been chosen besides plain
    backlog        committed tokens that the EAGLE3 head would have had to catch up with
    """

    choice: Choice
    cache: Draft | None
    features: dict[str, float]
    plain_seconds: float
    prospects: tuple[Prospect, ...]
    backlog: int = 0


def explain(policy: Policy, situation: Situation, choice: Choice, cost: CostModel) -> Explanation:
    """Explain a choice just made. To be called before anything else happens to the request, the policy or the costs."""
    foretold, cache = policy.foretold(situation, choice), situation.shown(choice)
    cached = min(len(cache), situation.room) if cache is not None else 0
    lengths = {Arm.CACHE: cached, Arm.EAGLE3: min(situation.eagle3, situation.room)}
    features = state_features(situation.history, cache).tolist() if cache is not None else []
    return Explanation(
        choice=choice,
        cache=cache,
        features=dict(zip(STATE_NAMES, features, strict=False)),
        plain_seconds=cost.verify(1, situation.context) + cost.overhead,
        prospects=tuple(
            Prospect(arm, foretold.get(arm), _seconds(arm, length, situation, cost))
            for arm, length in lengths.items()
            if length > 0 and arm in policy.uses
        ),
        backlog=situation.backlog,
    )


def _seconds(arm: Arm, length: int, situation: Situation, cost: CostModel) -> Float64Array:
    seconds: Float64Array = cost.verify_curve(length + 1, situation.context)[1:] + cost.overhead
    if arm is Arm.EAGLE3:
        seconds = seconds + cost.eagle3_curve(length, situation.backlog, situation.context)
    return seconds
