"""Predictors of a cache draft's payoff. All run in NumPy; training is elsewhere (`hvd.training.fit`).

    ScalarPredictor     the paper's: one number, the expected accepted length
    SurvivalPredictor   P(accepted length >= k) for every k, from one small MLP over token and state features
    FallbackSurvival    the same without a trained file: a fixed formula, corrected by what happens

A survival model foretells *hazards*, q_k = P(token k accepted | tokens 1..k-1 accepted); survival is their running
product, so it never increases, whatever the model says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import log, log1p
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hvd.errors import PredictorError
from hvd.payoff.features import STATE_NAMES, TOKEN_NAMES, features, log_places
from hvd.payoff.history import History
from hvd.payoff.predictor_file import read_predictor_file, write_predictor_file
from hvd.types import Draft, Float32Array


@dataclass(frozen=True, eq=False)
class MLPWeights:
    """A multilayer perceptron: normalised input, ReLU between layers, linear output.

    layers   (W float32 [in, out], b float32 [out]) of every layer
    mean     float32 [in]   subtracted from the input
    std      float32 [in]   the input is divided by it; a column with std 0 (constant in training) is ignored
    Raises PredictorError where shapes don't fit together or a value is not finite.
    """

    layers: tuple[tuple[Float32Array, Float32Array], ...]
    mean: Float32Array
    std: Float32Array

    def __post_init__(self) -> None:
        width = len(self.mean)
        if not self.layers or self.std.shape != self.mean.shape or self.mean.ndim != 1:
            raise PredictorError("weights need at least one layer, and mean and std of one length")
        for i, (weight, bias) in enumerate(self.layers):
            if weight.ndim != 2 or weight.shape[0] != width or bias.shape != (weight.shape[1],):
                raise PredictorError(
                    f"layer {i}: weight {weight.shape} and bias {bias.shape} don't fit an input of {width}"
                )
            width = weight.shape[1]
        for array in (self.mean, self.std, *(a for layer in self.layers for a in layer)):
            if array.dtype != np.float32 or not np.isfinite(array).all():
                raise PredictorError("weights, mean and std must be finite float32 values")

    @property
    def inputs(self) -> int:
        """Columns of the input."""
        return len(self.mean)

    @property
    def outputs(self) -> int:
        """Columns of the output."""
        return len(self.layers[-1][1])

    def folded(self) -> tuple[tuple[Float32Array, Float32Array], ...]:
        """The layers with the normalisation folded into the first: they take raw inputs."""
        scale = np.divide(1.0, self.std, out=np.zeros_like(self.std), where=self.std > 0)
        weight, bias = self.layers[0]
        first = scale[:, None] * weight
        return ((first, bias - self.mean @ first), *self.layers[1:])

    def forward(self, inputs: Float32Array) -> Float32Array:
        """float32 [.., in] -> float32 [.., out]."""
        return _forward(self.folded(), inputs)


def _forward(layers: tuple[tuple[Float32Array, Float32Array], ...], x: Float32Array) -> Float32Array:
    for weight, bias in layers[:-1]:
        x = x @ weight + bias
        np.maximum(x, 0.0, out=x)
    weight, bias = layers[-1]
    out: Float32Array = x @ weight + bias
    return out


def sigmoid(logits: Float32Array) -> Float32Array:
    """1 / (1 + exp(-x)), safe for any x."""
    out: Float32Array = np.tanh(logits * np.float32(0.5))
    out += np.float32(1.0)
    out *= np.float32(0.5)
    return out


class Predictor:
    """A trained predictor as kept in a file: its weights, and what is known of how they were made."""

    kind: ClassVar[str]
    input_names: ClassVar[tuple[str, ...]]

    def __init__(self, weights: MLPWeights, metadata: Mapping[str, Any] | None = None) -> None:
        """`metadata`: JSON values only (trained on, scores). PredictorError when the weights don't fit the features."""
        if weights.inputs != len(self.input_names) or weights.outputs != 1:
            raise PredictorError(
                f"a {self.kind} predictor takes {len(self.input_names)} features and gives 1 value; "
                f"these weights take {weights.inputs} and give {weights.outputs}"
            )
        self.weights = weights
        self.metadata = dict(metadata or {})


class ScalarPredictor(Predictor):
    """The paper's predictor: an MLP (two hidden layers of 256 as published) over the state features."""

    kind = "scalar"
    input_names = STATE_NAMES

    def __init__(self, weights: MLPWeights, metadata: Mapping[str, Any] | None = None) -> None:
        super().__init__(weights, metadata)
        self._layers = weights.folded()

    def predict(self, features: Float32Array) -> float:
        """Expected accepted length of a draft with these state features, float32 [S]; not below 0."""
        return max(0.0, float(_forward(self._layers, features)[0]))


class SurvivalModel(ABC):
    """Foretells for every place of a cache draft whether the target will come that far."""

    @abstractmethod
    def hazard(self, history: History, draft: Draft) -> Float32Array:
        """q_k = P(token k accepted | those before it accepted), float32 [n] in [0, 1], for a non-empty draft."""

    def survival(self, history: History, draft: Draft) -> Float32Array:
        """P(accepted length >= k), k = 1..n, float32 [n], non-increasing, in [0, 1]."""
        out: Float32Array = np.multiply.accumulate(self.hazard(history, draft))
        return out


class SurvivalPredictor(Predictor, SurvivalModel):
    """A discrete-time hazard model: one small MLP, applied to every token of the draft.

    Its input is a token's features followed by the state's. The state's part of the first layer is the same for all
    tokens of a draft, so it is computed once.
    """

    kind = "survival"
    input_names = (*TOKEN_NAMES, *STATE_NAMES)

    def __init__(self, weights: MLPWeights, metadata: Mapping[str, Any] | None = None) -> None:
        super().__init__(weights, metadata)
        (first, self._bias), *self._rest = weights.folded()
        self._token = np.ascontiguousarray(first[: len(TOKEN_NAMES)])
        self._state = np.ascontiguousarray(first[len(TOKEN_NAMES) :])

    def logits(self, history: History, draft: Draft) -> Float32Array:
        """Log-odds of the hazards, float32 [n]."""
        state, token = features(history, draft)
        x = token @ self._token
        x += state @ self._state + self._bias
        if self._rest:
            np.maximum(x, 0.0, out=x)
            x = _forward(tuple(self._rest), x)
        column: Float32Array = x[:, 0]
        return column

    def hazard(self, history: History, draft: Draft) -> Float32Array:
        """See `SurvivalModel.hazard`."""
        return sigmoid(self.logits(history, draft))


class FallbackSurvival(SurvivalModel):
    """Hazards from the trie's facts and the request's shadow hits; no trained file.

    A fixed formula (logistic in the match's depth, the smoothed count ratio and the hit rates) says where to start.
    Places alike share a bucket (depth of the match, first token or later, hit rate), and what happened in a bucket
    moves its odds: a Beta posterior whose prior, worth `PRIOR_TRIALS`, is the formula's own expectation over those
    trials. Old outcomes fade, so that a bucket holds `MEMORY` trials at most.
    """

    PRIOR_TRIALS = 8.0
    MEMORY = 200.0
    _DEPTHS = (2, 3, 5, 9, 17)
    _RATES = (0.35, 0.75)
    _BUCKETS = (len(_DEPTHS) + 1) * (len(_RATES) + 1) * 2

    def __init__(self) -> None:
        self._outcomes = np.zeros((3, self._BUCKETS))
        """Of every bucket: trials, accepted, expected by the formula."""
        self._shift = np.zeros(self._BUCKETS, np.float32)
        deepest = np.arange(4096)
        self._depth_bucket = 2 * np.searchsorted(self._DEPTHS, deepest, "right") * (len(self._RATES) + 1)

    def hazard(self, history: History, draft: Draft) -> Float32Array:
        """See `SurvivalModel.hazard`."""
        return sigmoid(self.prior(history, draft) + self.shift(self.buckets(history, draft)))

    def shift(self, buckets: NDArray[np.intp]) -> Float32Array:
        """What outcomes have added to the log-odds of these buckets, float32 [n]."""
        out: Float32Array = self._shift[buckets]
        return out

    def prior(self, history: History, draft: Draft) -> Float32Array:
        """Log-odds by the formula alone, float32 [n].

        Its coefficients are a logistic fit to recorded replies of people and models (chat, code, editing, tool calls,
        reading) at the cycle boundaries of decoding with the whole cache draft.
        """
        n = len(draft)
        near, far = _odds(history.hit_rate(8)), _odds(history.hit_rate(64))
        logits = np.add(draft.counts, 0.2, dtype=_F)
        logits /= np.add(np.maximum(draft.parent_counts - draft.counts, 0), 0.4, dtype=_F)
        np.log(logits, out=logits)
        logits *= _F(0.9)
        logits += _F(0.61) * log_places(max(0, draft.match_len - 1), n)
        logits += _F(0.62) * log_places(0, n)
        logits += _F(-2.36 + 0.11 * far + 0.36 * log1p(history.hit_run))
        logits[0] += _F(0.93 + 0.21 * near)
        out: Float32Array = logits
        return out

    def buckets(self, history: History, draft: Draft) -> NDArray[np.intp]:
        """Bucket of every place, int [n]."""
        rate = history.hit_rate(16)
        base = sum(rate > edge for edge in self._RATES)
        depth = np.arange(draft.match_len + 1, draft.match_len + len(draft) + 1)
        out: NDArray[np.intp] = self._depth_bucket.take(depth, mode="clip")
        out += base
        out[0] += len(self._RATES) + 1
        return out

    def learn(self, buckets: NDArray[np.intp], prior: Float32Array, tried: int, accepted: int) -> None:
        """Take in an outcome: of `tried` tokens the first `accepted` were right (then one was wrong, if any was left).

        `buckets` and `prior` are those of the moment of the decision.
        """
        where = buckets[: min(tried, accepted + 1)]
        expected = sigmoid(prior[: len(where)])
        trials, right, foretold = self._outcomes
        trials += np.bincount(where, minlength=self._BUCKETS)
        right += np.bincount(where[:accepted], minlength=self._BUCKETS)
        foretold += np.bincount(where, expected, minlength=self._BUCKETS)
        self._outcomes *= self.MEMORY / np.maximum(trials, self.MEMORY)
        mean = np.clip(foretold / np.maximum(trials, 1e-9), 0.01, 0.99)
        rate = (right + self.PRIOR_TRIALS * mean) / (trials + self.PRIOR_TRIALS)
        self._shift[:] = np.log(rate * (1 - mean) / (mean * (1 - rate)))


_F = np.float32


def _odds(probability: float) -> float:
    return log(probability / (1.0 - probability))


_KINDS: dict[str, type[ScalarPredictor] | type[SurvivalPredictor]] = {
    cls.kind: cls for cls in (ScalarPredictor, SurvivalPredictor)
}


def save_predictor(path: str | Path, predictor: Predictor) -> None:
    """Write a trained predictor to one file, atomically."""
    weights = predictor.weights
    arrays = {"mean": weights.mean, "std": weights.std}
    for i, (weight, bias) in enumerate(weights.layers):
        arrays |= {f"weight{i}": weight, f"bias{i}": bias}
    write_predictor_file(Path(path), predictor.kind, arrays, predictor.input_names, predictor.metadata)


def load_predictor(path: str | Path) -> ScalarPredictor | SurvivalPredictor:
    """Read a predictor. PredictorError when the file (left alone) is missing, torn, foreign or of another version."""
    kind, arrays, names, metadata = read_predictor_file(Path(path))
    if kind not in _KINDS:
        raise PredictorError(f"{path}: unknown kind of predictor {kind!r}, known are {', '.join(_KINDS)}")
    cls = _KINDS[kind]
    if names != cls.input_names:
        raise PredictorError(f"{path}: made for other features; train it again with this version")
    count = sum(name.startswith("weight") for name in arrays)
    try:
        layers = tuple((arrays[f"weight{i}"], arrays[f"bias{i}"]) for i in range(count))
        return cls(MLPWeights(layers, arrays["mean"], arrays["std"]), metadata)
    except KeyError as error:
        raise PredictorError(f"{path}: {error.args[0]} is missing") from error
    except PredictorError as error:
        raise PredictorError(f"{path}: {error}") from error
