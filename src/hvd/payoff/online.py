"""What policies learn while decoding: how far to trust a predictor, and what an EAGLE3 head gets accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd.payoff.features import offers, slots
from hvd.payoff.history import History
from hvd.payoff.predictor import Network, SurvivalPredictor
from hvd.types import Draft, Float32Array, Float64Array

_SHIFT_RATE = 0.02
_SHIFT_LIMIT = 3.0
_LOSS_MEMORY = 0.98
_LOSS_LIMIT = 3.0
_TRUST = math.log(9.0)
_FLOOR = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """What was foretold of a cache draft, kept until the outcome is known. All arrays float32 [n], one entry a token.

    A draft longer than n is hopeless behind its n-th token.

    survival          P(accepted length >= k), non-increasing
    fallback, trained hazards by the formula and by the trained predictor, if there is one, both as corrected then
    prior, bucket     the formula's, as `kernels.learn` wants them
    """

    survival: Float32Array
    fallback: Float32Array
    trained: Float32Array
    prior: Float32Array
    bucket: Float32Array


class OnlineSurvival:
    """A trained predictor and a fallback, each corrected by outcomes and weighed by how well it foretold them.

    The fallback is a fixed formula over the trie's facts and the request's shadow hits (`kernels._prior`; a logistic
    fit to recorded replies of people and models at the cycle boundaries of decoding with the whole cache draft). Places
    alike share a bucket (depth of the match, hit rate, first token or later, slot), and what happened in a bucket moves
    its odds: a Beta posterior whose prior, worth `PRIOR_TRIALS`, is the formula's own expectation over those trials.
    Old outcomes fade, so that a bucket holds `MEMORY` trials at most.

    The mixture's weights follow the two log losses, faded over some fifty outcomes: a wrong predictor, or one trained
    on other workloads, soon counts for nothing; beside a good one the fallback hardly speaks. The trained one's
    log-odds also get a slowly learned shift.
    """

    PRIOR_TRIALS = 8.0
    MEMORY = 200.0

    def __init__(self, predictor: SurvivalPredictor | None = None) -> None:
        from hvd.payoff import kernels  # Numba takes a third of a second to import

        self.predictor = predictor
        self.shift = 0.0
        self._lead = 0.0
        self._kernels = kernels
        self._network = predictor.network if predictor is not None else Network.none()
        self._outcomes = np.zeros((4, kernels.BUCKETS))
        kernels.warm_up()

    @property
    def trust(self) -> float:
        """Weight of the trained predictor in [0, 1]; 0 without one."""
        return 1.0 / (1.0 + math.exp(-(_TRUST + self._lead))) if self.predictor is not None else 0.0

    def forecast(self, history: History, draft: Draft, others: Sequence[Draft] = ()) -> Forecast:
        """Foretell a non-empty main draft of the cache. `others`: what it offers besides."""
        found = self.forecasts(history, [draft, *others])[0]
        assert found is not None
        return found

    def forecasts(self, history: History, drafts: Sequence[Draft]) -> list[Forecast | None]:
        """Foretell non-empty cache drafts, the main one first. None for one that is but the beginning of another."""
        placed = slots(drafts)
        packed = offers(history, placed)
        out = np.empty((len(placed), 5, packed.tokens.shape[1]), np.float32)
        lengths = np.empty(len(placed), np.int64)
        self._kernels.forecast(*packed, *self._network, self.trust, self.shift, self._outcomes, out, lengths)
        found = {id(draft): (rows, n) for draft, rows, n in zip(placed, out, lengths.tolist(), strict=True) if n}
        return [Forecast(*found[id(d)][0][:, : found[id(d)][1]]) if id(d) in found else None for d in drafts]

    def learn(self, forecast: Forecast, tried: int, accepted: int) -> None:
        """Take in an outcome: of the first `tried` tokens the first `accepted` were right."""
        tried = min(tried, len(forecast.prior))
        accepted = min(tried, accepted)
        if tried < 1:
            return
        kernels = self._kernels
        kernels.learn(forecast.prior, forecast.bucket, tried, accepted, self._outcomes, self.PRIOR_TRIALS, self.MEMORY)
        if self.predictor is not None:
            fallback, trained, expected = kernels.log_losses(
                forecast.fallback, forecast.trained, tried, accepted, _FLOOR
            )
            lead = min(_LOSS_LIMIT, max(-_LOSS_LIMIT, fallback - trained))
            self._lead = self._lead * _LOSS_MEMORY + lead
            self.shift = min(_SHIFT_LIMIT, max(-_SHIFT_LIMIT, self.shift + _SHIFT_RATE * (accepted - expected)))


@dataclass(slots=True, eq=False)
class HeadRecord:
    """What one request's head drafts came to, by depth (index 0 = first token)."""

    tried: Float64Array
    accepted: Float64Array


class HeadAcceptance:
    """P(the head's token k is accepted | those before it were), from outcomes by depth.

    Beta estimates in two layers: a request starts from the engine's estimate, worth a few outcomes; the engine starts
    from one that is worth a try on any hardware (the head that ships is right in 42 to 56 % of such places). Old
    outcomes fade, and a little with every cycle that goes by without the head: so a head once found bad gets another
    try, rarely, and its share of bad tries stays tiny.
    """

    MAX_DEPTH = 64
    PRIOR = (2.0, 4.0)
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
