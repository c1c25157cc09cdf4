"""How a head's weights are moved: who moves what, along which schedule, and that a saved state is the whole state."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hvd.errors import ConfigError
from hvd.models.checkpoint import load_checkpoint
from hvd.models.torch_target import TorchTarget
from hvd.training.eagle3.module import HeadModule
from hvd.training.eagle3.optimizer import OUTPUT_SHARE, HeadOptimizer, Schedule
from hvd.training.eagle3.train import Eagle3Options, new_head


@pytest.fixture
def head(tiny_model: Callable[..., Path]) -> HeadModule:
    checkpoint = load_checkpoint(tiny_model("llama"))
    target = TorchTarget(checkpoint, dtype="float32")
    return new_head(checkpoint, target, np.arange(0, target.spec.vocab_size, 2), Eagle3Options())


def _push(head: HeadModule, optimizer: HeadOptimizer, seed: int, rate: float = 1e-3) -> None:
    """A step along random gradients."""
    random = torch.Generator().manual_seed(seed)
    optimizer.clear()
    for parameter in head.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=random)
    optimizer.step(rate)


def test_the_rate_rises_to_its_peak_and_falls_to_a_tenth() -> None:
    schedule = Schedule(2.0, warm_up=0.1)
    rates = [schedule.rate(done) for done in np.linspace(0, 1, 101)]
    assert rates.index(max(rates)) == 10
    assert max(rates) == pytest.approx(2.0)
    assert 0 < rates[0] < 0.1
    assert rates[-1] == pytest.approx(0.2)
    assert all(later < sooner for sooner, later in itertools.pairwise(rates[10:]))


@pytest.mark.parametrize("peak", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_not_positive_is_refused(peak: float) -> None:
    with pytest.raises(ConfigError, match="learning rate must be positive"):
        Schedule(peak)


def test_every_parameter_is_moved_once(head: HeadModule) -> None:
    """Matrices between hidden states along all directions alike (Muon), rows of the output matrix by their size (AdamW:
    a first step is the sign of the gradient)."""
    before = {name: parameter.detach().clone() for name, parameter in head.named_parameters()}
    _push(head, HeadOptimizer(head, 0.0, 1.0), seed=0)
    moved = {name: before[name] - parameter.detach() for name, parameter in head.named_parameters()}
    assert all(bool(step.abs().max() > 0) for step in moved.values())
    along = torch.linalg.svdvals(moved["midlayer.mlp.gate_proj.weight"])
    assert float(along.max() / along.min()) < 3
    assert moved["lm_head.weight"].abs().mean().item() == pytest.approx(1e-3 * OUTPUT_SHARE, rel=0.05)
    assert moved["norm.weight"].abs().mean().item() == pytest.approx(1e-3 * OUTPUT_SHARE, rel=0.05)


def test_a_saved_state_goes_on_bit_for_bit(head: HeadModule) -> None:
    optimizer = HeadOptimizer(head, 0.01, 1.0)
    _push(head, optimizer, seed=0)
    twin = copy.deepcopy(head)
    other = HeadOptimizer(twin, 0.01, 1.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in (1, 2):
        _push(head, optimizer, seed)
        _push(twin, other, seed)
    for one, two in zip(head.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)
    fresh = copy.deepcopy(head)
    _push(fresh, HeadOptimizer(fresh, 0.01, 1.0), seed=3)
    _push(head, optimizer, seed=3)
    assert not torch.equal(fresh.fc.weight, head.fc.weight)  # the state matters
