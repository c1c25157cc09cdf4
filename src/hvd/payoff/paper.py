"""The policy of arXiv 2606.01019: a predicted payoff against a fixed threshold, the whole draft or none of it."""

from __future__ import annotations

from typing import Any

from hvd.errors import ConfigError
from hvd.payoff.features import state_features
from hvd.payoff.policy import Choice, Policy, Situation
from hvd.payoff.predictor import Predictor, ScalarPredictor
from hvd.payoff.rules import Rule, has_cache, head_or_plain, number, whole_cache

TAU = 6.0


class Paper(Rule):
    """Predicted accepted length above tau: the whole cache draft. Otherwise the head, or plain without one."""

    name = "hvd-paper"
    predictor_kind = "scalar"

    def __init__(self, predictor: ScalarPredictor, tau: float = TAU) -> None:
        if not 0 <= tau < float("inf"):
            raise ConfigError(f"policy 'hvd-paper': tau must be at least 0 and finite, got {tau}")
        self.predictor = predictor
        self.tau = tau

    @classmethod
    def make(cls, argument: str | None, predictor: Predictor | None, **options: Any) -> Policy:
        """See `Policy.make`; the argument is tau."""
        if not isinstance(predictor, ScalarPredictor):
            raise ConfigError(
                "policy 'hvd-paper' needs a predictor of kind 'scalar'; train one: 'hvd train predictor --kind scalar'"
            )
        return cls(predictor, number(cls.name, argument)) if argument is not None else cls(predictor, **options)

    def choose_one(self, situation: Situation) -> Choice:
        """See `Rule.choose_one`."""
        if not has_cache(situation):
            return head_or_plain(situation)
        assert situation.cache is not None
        payoff = self.predictor.predict(state_features(situation.history, situation.cache))
        if payoff > self.tau:
            return whole_cache(situation, f"payoff {payoff:.1f}", payoff)
        return head_or_plain(situation, f"payoff {payoff:.1f} <= {self.tau:g}")
