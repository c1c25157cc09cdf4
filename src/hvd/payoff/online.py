"""What policies learn while decoding: how far to trust a predictor, and what an EAGLE3 head gets accepted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvd.payoff.history import History
from hvd.payoff.predictor import FallbackSurvival, SurvivalPredictor, sigmoid
from hvd.types import Draft, Float32Array, Float64Array

_SHIFT_RATE = 0.02
_SHIFT_LIMIT = 3.0
_LOSS_MEMORY = 0.98
_LOSS_LIMIT = 3.0
_TRUST = math.log(9.0)
_FLOOR = np.float32(1e-3)


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """What was foretold of a cache draft, kept until the outcome is known. All arrays [n], one entry a token.

    survival   P(accepted length >= k), non-increasing
    hazards    of the fallback and, when there is one, of the trained predictor (already shifted)
    prior, buckets   the fallback's, as `FallbackSurvival.learn` wants them
    """

    survival: Float32Array
    hazards: tuple[Float32Array, ...]
    prior: Float32Array
    buckets: NDArray[np.intp]


class OnlineSurvival:
    """A trained predictor and the fallback, each corrected by outcomes and weighed by how well it foretold them.

    The mixture's weights follow the two log losses, faded over some fifty outcomes: a wrong predictor, or one trained
    on other workloads, soon counts for nothing; beside a good one the fallback hardly speaks. The trained one's
    log-odds also get a slowly learned shift.
    """

    def __init__(self, predictor: SurvivalPredictor | None = None) -> None:
        self.predictor = predictor
        self.fallback = FallbackSurvival()
        self.shift = 0.0
        self._lead = 0.0

    @property
    def trust(self) -> float:
        """Weight of the trained predictor in [0, 1]; 0 without one."""
        return 1.0 / (1.0 + math.exp(-(_TRUST + self._lead))) if self.predictor is not None else 0.0

    def forecast(self, history: History, draft: Draft) -> Forecast:
        """Foretell a non-empty cache draft."""
        prior = self.fallback.prior(history, draft)
        buckets = self.fallback.buckets(history, draft)
        hazard = sigmoid(prior + self.fallback.shift(buckets))
        hazards: tuple[Float32Array, ...] = (hazard,)
        if self.predictor is not None:
            trained = sigmoid(self.predictor.logits(history, draft) + np.float32(self.shift))
            hazards = (hazard, trained)
            hazard = hazard + np.float32(self.trust) * (trained - hazard)
        return Forecast(np.multiply.accumulate(hazard), hazards, prior, buckets)

    def learn(self, forecast: Forecast, tried: int, accepted: int) -> None:
        """Take in an outcome: of the first `tried` tokens the first `accepted` were right."""
        seen = min(tried, accepted + 1, len(forecast.prior))
        if seen < 1:
            return
        self.fallback.learn(forecast.buckets, forecast.prior, tried, accepted)
        if self.predictor is not None:
            fallback, trained = forecast.hazards
            lead = _log_loss(fallback[:seen], accepted) - _log_loss(trained[:seen], accepted)
            self._lead = self._lead * _LOSS_MEMORY + min(_LOSS_LIMIT, max(-_LOSS_LIMIT, lead))
            miss = min(accepted, seen) - float(trained[:seen].sum())
            self.shift = min(_SHIFT_LIMIT, max(-_SHIFT_LIMIT, self.shift + _SHIFT_RATE * miss))


def _log_loss(hazards: Float32Array, accepted: int) -> float:
    """-log P(outcome): the first `accepted` were right, the one behind them, if it was tried, wrong."""
    right = np.maximum(hazards[:accepted], _FLOOR)
    wrong = np.maximum(1.0 - hazards[accepted:], _FLOOR)
    return -float(np.log(right).sum() + np.log(wrong).sum())


@dataclass(slots=True, eq=False)
class HeadRecord:
    """What one request's head drafts came to, by depth (index 0 = first token)."""

    tried: Float64Array
    accepted: Float64Array


class HeadAcceptance:
    """P(the head's token k is accepted | those before it were), from outcomes by depth.

    Beta estimates in two layers: a request starts from the engine's estimate, worth a few outcomes; the engine starts
    from an optimistic one, so that a new head is tried. Old outcomes fade, and a little with every cycle that goes by
    without the head: so a head once found bad gets another try, rarely, and its share of bad tries stays tiny.
    """

    MAX_DEPTH = 64
    PRIOR = (1.5, 2.0)
    REQUEST_PRIOR = 6.0
    MEMORY = 0.995
    IDLE_MEMORY = 0.9995

    def __init__(self) -> None:
        self._engine = self.open()

    def open(self) -> HeadRecord:
        """An empty record for a new request."""
        return HeadRecord(np.zeros(self.MAX_DEPTH), np.zeros(self.MAX_DEPTH))

    def survival(self, record: HeadRecord, length: int) -> Float64Array:
        """P(accepted length >= k), k = 1..length, float64 [length]."""
        n = min(length, self.MAX_DEPTH)
        right, of = self.PRIOR
        engine = (self._engine.accepted[:n] + right) / (self._engine.tried[:n] + of)
        own = (record.accepted[:n] + self.REQUEST_PRIOR * engine) / (record.tried[:n] + self.REQUEST_PRIOR)
        out = np.zeros(length)
        np.multiply.accumulate(own, out=out[:n])
        return out

    def learn(self, record: HeadRecord, tried: int, accepted: int) -> None:
        """Take in an outcome of `tried` drafted tokens."""
        for each in (record, self._engine):
            each.tried *= self.MEMORY
            each.accepted *= self.MEMORY
            each.tried[: min(tried, accepted + 1)] += 1.0
            each.accepted[:accepted] += 1.0

    def idle(self, record: HeadRecord) -> None:
        """A cycle went by in which the head could have drafted and did not."""
        for each in (record, self._engine):
            each.tried *= self.IDLE_MEMORY
            each.accepted *= self.IDLE_MEMORY
