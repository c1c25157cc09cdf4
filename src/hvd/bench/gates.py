"""Asks predictors and fixed rules, at states met by replay, whether a cache draft will pay; counts who was right."""

from __future__ import annotations

from collections.abc import Sequence

from hvd.bench.tallies import CurveTally, GateTally
from hvd.payoff.features import state_features
from hvd.payoff.history import HIT_WINDOW, History
from hvd.payoff.online import Forecast, OnlineSurvival
from hvd.payoff.predictor import Predictor, ScalarPredictor, SurvivalPredictor
from hvd.training.dataset import PAYOFF
from hvd.types import Arm, Draft, Float32Array, StepRecord

TRAINED, ONLINE, SCALAR = "survival", "online", "scalar"
"""The trained survival model alone; that model mixed with the fallback and corrected by outcomes, as policy `hvd` uses
it; the paper's scalar predictor."""
MATCH_LENGTHS = (4, 8)
SCORES = (3,)


class Gates:
    """The predictors of a run. `online` learns from prompt to prompt, as an engine's does."""

    def __init__(self, predictors: Sequence[Predictor]) -> None:
        self.survival = next((p for p in predictors if isinstance(p, SurvivalPredictor)), None)
        self.scalar = next((p for p in predictors if isinstance(p, ScalarPredictor)), None)
        self.online = OnlineSurvival(self.survival)

    def session(self, *, online: bool) -> GateSession:
        """Ask about the states of one prompt. `online`: they are live ones, so the corrected model is asked too."""
        return GateSession(self, online)


class GateSession:
    """One prompt's states, in order."""

    def __init__(self, gates: Gates, online: bool) -> None:
        self.gates = GateTally()
        self.curves: dict[str, CurveTally] = {}
        self._of, self._online = gates, online
        self._pending: tuple[Forecast, int] | None = None

    def look(self, history: History, draft: Draft | None, payoff: int | None, step: StepRecord | None) -> None:
        """One state; `payoff` None: no draft, or unknown. Every live state must be shown, for what it teaches."""
        self._learn_from_hit(history)
        forecast = self._of.online.forecast(history, draft) if self._online and draft is not None else None
        if draft is not None and payoff is not None:
            self._ask(history, draft, payoff)
            if forecast is not None:
                self._curve(ONLINE, forecast.survival, payoff)
        if forecast is None or step is None:
            return
        if step.arm is Arm.CACHE:
            if payoff is None or step.accepted == min(payoff, step.drafted):  # else it was another draft than this one
                self._of.online.learn(forecast, step.drafted, step.accepted)
        else:
            self._pending = forecast, history.generated_length

    def _learn_from_hit(self, history: History) -> None:
        """A draft that was not verified: whether its first token was right is known by now (as in `Hybrid`)."""
        if self._pending is None:
            return
        (forecast, position), self._pending = self._pending, None
        ago = history.generated_length - position - 1
        if 0 <= ago < HIT_WINDOW:
            self._of.online.learn(forecast, 1, int(history.hit(ago)))

    def _ask(self, history: History, draft: Draft, payoff: int) -> None:
        pays = payoff >= PAYOFF
        if self._of.survival is not None:
            self._curve(TRAINED, self._of.survival.survival(history, draft), payoff)
        if self._of.scalar is not None:
            expected = self._of.scalar.predict(state_features(history, draft))
            self.gates.count(SCALAR, expected > PAYOFF, pays)
        self.gates.count("any-match", True, pays)
        for length in MATCH_LENGTHS:
            self.gates.count(f"match-len {length}", draft.match_len >= length, pays)
        for score in SCORES:
            self.gates.count(f"score {score}", draft.score >= score, pays)

    def _curve(self, model: str, survival: Float32Array, payoff: int) -> None:
        """A survival model's curve, and as a gate: yes when P(payoff >= PAYOFF) is at least one half."""
        self.curves.setdefault(model, CurveTally()).count(survival, payoff)
        yes = len(survival) >= PAYOFF and float(survival[PAYOFF - 1]) >= 0.5
        self.gates.count(model, yes, payoff >= PAYOFF)
