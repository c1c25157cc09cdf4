"""The predictors that ship with the package, used where the user gives none of a kind.

scripts/train-predictors makes them anew; docs/predictors.md says from what.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

from hvd.errors import ConfigError
from hvd.payoff.predictor import Predictor, load_predictor

NONE = "none"
"""Given in place of a file: no predictor at all, not even a shipped one."""

_KINDS = ("survival", "scalar")


def gather_predictors(given: str | Path | Sequence[str | Path] | None = None) -> dict[str, Predictor]:
    """One predictor a kind: the files given, and the shipped ones for the other kinds; none for "none".

    Raises ConfigError for what is no path, and for two files of one kind, PredictorError for a file that can't be read.
    """
    if given is not None and not isinstance(given, str | Path | Sequence):
        raise ConfigError(f"predictor must be a file, several files or {NONE!r}, got {given!r}")
    paths = [] if given is None else [given] if isinstance(given, str | Path) else list(given)
    wrong = next((path for path in paths if not isinstance(path, str | Path)), None)
    if wrong is not None:
        raise ConfigError(f"predictor must be a file, several files or {NONE!r}, got {wrong!r}")
    if NONE in map(str, paths):
        if len(paths) > 1:
            raise ConfigError(f"predictor {NONE!r} stands alone; leave out the files beside it")
        return {}
    gathered: dict[str, Predictor] = {}
    for path in paths:
        predictor = load_predictor(path)
        if predictor.kind in gathered:
            raise ConfigError(f"{path}: a second predictor of kind {predictor.kind!r}; give one of each kind")
        gathered[predictor.kind] = predictor
    for kind in _KINDS:
        if kind not in gathered:
            with as_file(files(__name__) / f"{kind}.npz") as path:
                gathered[kind] = load_predictor(path)
    return gathered
