"""The predictors that ship with the package are sound, and give way to the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd.errors import ConfigError, PredictorError
from hvd.payoff.predictor import ScalarPredictor, SurvivalPredictor, save_predictor
from hvd.payoff.shipped import NONE, gather_predictors
from support import paper_predictor


def test_both_kinds_ship_and_say_what_they_were_trained_on() -> None:
    shipped = gather_predictors()
    assert isinstance(shipped["survival"], SurvivalPredictor)
    assert isinstance(shipped["scalar"], ScalarPredictor)
    assert all(predictor.metadata for predictor in shipped.values())


def test_a_file_replaces_the_shipped_one_of_its_kind(tmp_path: Path) -> None:
    own = tmp_path / "own.npz"
    save_predictor(own, paper_predictor())
    gathered = gather_predictors(own)
    assert gathered["scalar"].weights.layers[0][0].shape[1] == 8
    assert isinstance(gathered["survival"], SurvivalPredictor)
    with pytest.raises(ConfigError, match="second predictor of kind 'scalar'"):
        gather_predictors([own, own])


def test_none_means_none(tmp_path: Path) -> None:
    assert gather_predictors(NONE) == {}
    with pytest.raises(ConfigError, match="stands alone"):
        gather_predictors([NONE, tmp_path / "x.npz"])
    with pytest.raises(PredictorError, match=r"x\.npz"):
        gather_predictors(tmp_path / "x.npz")
