"""Asks predictors and fixed rules, at states met by replay, whether a cache draft will pay; counts who was right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """One request where a gate stands. `history` is that of the moment: use it before going on.

    draft      the cache's main draft; `others`: what it offers besides
    payoff     accepted tokens of the main draft if verified whole; None when there is none, or it is unknown
    step       what was done there; None offline
    """

    draft: Draft | None
    others: tuple[Draft, ...]
    history: History
    payoff: int | None
    step: StepRecord | None = None


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

    def look(self, state: State) -> None:
        """One state. Every live one must be shown, for what it teaches."""
        self._learn_from_hit(state.history)
        if state.draft is None:
            return
        forecast = self._of.online.forecast(state.history, state.draft, state.others) if self._online else None
        if state.payoff is not None:
            self._ask(state, state.draft, state.payoff)
            if forecast is not None:
                self._curve(ONLINE, forecast.survival, state.payoff)
        if forecast is None or state.step is None:
            return
        if state.step.arm is not Arm.CACHE:
            self._pending = forecast, state.history.generated_length
        elif state.payoff is None or state.step.accepted == min(state.payoff, state.step.drafted):  # it was this draft
            self._of.online.learn(forecast, state.step.drafted, state.step.accepted)

    def _learn_from_hit(self, history: History) -> None:
        """A draft that was not verified: whether its first token was right is known by now (as in `Hybrid`)."""
        if self._pending is None:
            return
        (forecast, position), self._pending = self._pending, None
        ago = history.generated_length - position - 1
        if 0 <= ago < HIT_WINDOW:
            self._of.online.learn(forecast, 1, int(history.hit(ago)))

    def _ask(self, state: State, draft: Draft, payoff: int) -> None:
        pays = payoff >= PAYOFF
        if self._of.survival is not None:
            self._curve(TRAINED, self._of.survival.survival(state.history, draft, state.others), payoff)
        if self._of.scalar is not None:
            expected = self._of.scalar.predict(state_features(state.history, draft))
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
