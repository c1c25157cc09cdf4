"""How an EAGLE3 head's weights are moved: Muon for the matrices of its layer, AdamW for the rest, one schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from hvd.errors import ConfigError
from hvd.training.eagle3.module import HeadModule

OUTPUT_SHARE = 0.5
"""Rate of what AdamW moves as a share of the rate of what Muon moves."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate over a training.

    peak      its highest value, after the warm-up; falls as a cosine to a tenth
    warm_up   share of the training during which it rises
    """

    peak: float = 6e-3
    warm_up: float = 0.03

    def __post_init__(self) -> None:
        if not 0 < self.peak < math.inf:
            raise ConfigError(f"learning rate must be positive and finite, got {self.peak}")
        if not 0 <= self.warm_up < 1:
            raise ConfigError(f"the share of the warm-up must lie between 0 and 1, got {self.warm_up}")

    def rate(self, done: float) -> float:
        """When `done` of the training lies behind, 0 .. 1."""
        if done < self.warm_up:
            return self.peak * (done + 1e-3) / (self.warm_up + 1e-3)
        fallen = (done - self.warm_up) / (1 - self.warm_up)
        return self.peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, fallen))))


class HeadOptimizer:
    """Muon (Jordan et al., 2024; `torch.optim.Muon`, its steps scaled to the size of AdamW's) moves the matrices
    between hidden states. The output matrix, whose rows are tokens, and the gains of the norms are AdamW's.

    weight_decay   of the matrices of both
    clip           norm of the gradient is clipped here
    """

    def __init__(self, head: HeadModule, weight_decay: float, clip: float) -> None:
        matrices = [p for name, p in head.named_parameters() if p.ndim == 2 and not name.startswith("lm_head")]
        gains = [p for p in head.parameters() if p.ndim == 1]
        self._parameters, self._clip = list(head.parameters()), clip
        muon = torch.optim.Muon(matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self._muon: torch.optim.Optimizer = muon
        self._adamw = torch.optim.AdamW(
            [
                {"params": [head.lm_head.weight], "weight_decay": weight_decay},
                {"params": gains, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
        )

    def clear(self) -> None:
        """Forget the gradients."""
        for optimizer in (self._muon, self._adamw):
            optimizer.zero_grad(set_to_none=True)

    def step(self, rate: float) -> None:
        """Move the weights along the gradients; `rate` is Muon's, AdamW has `OUTPUT_SHARE` of it."""
        torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        for optimizer, share in ((self._muon, 1.0), (self._adamw, OUTPUT_SHARE)):
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"muon": self._muon.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""
        self._muon.load_state_dict(state["muon"])
        self._adamw.load_state_dict(state["adamw"])
