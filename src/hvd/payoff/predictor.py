"""Trained predictors of a cache draft's payoff; training is elsewhere (`hvd.training.fit`), serving in `online`.

    ScalarPredictor     the paper's: one number, the expected accepted length
    SurvivalPredictor   P(accepted length >= k) for every k, from one small MLP over token and state features

A survival model foretells *hazards*, q_k = P(token k accepted | tokens 1..k-1 accepted); survival is their running
product, so it never increases, whatever the model says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvd.errors import PredictorError
from hvd.payoff.features import CONTEXT_NAMES, RIVAL_NAMES, STATE_NAMES, TOKEN_NAMES, features, slots
from hvd.payoff.history import History
from hvd.payoff.predictor_file import read_predictor_file, write_predictor_file
from hvd.types import Draft, Float32Array, Int64Array


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


class SurvivalPredictor(Predictor):
    """A discrete-time hazard model: one small MLP, applied to every token of the draft.

    Its input is a token's features followed by the state's. The state's part of the first layer is the same for all
    tokens of a draft, so it is computed once.
    """

    kind = "survival"
    input_names = (*TOKEN_NAMES, *CONTEXT_NAMES, *RIVAL_NAMES)

    def __init__(self, weights: MLPWeights, metadata: Mapping[str, Any] | None = None) -> None:
        super().__init__(weights, metadata)
        self.network = Network.of(weights)

    def hazard(self, history: History, draft: Draft, others: Sequence[Draft] = ()) -> Float32Array:
        """q_k = P(token k accepted | those before it accepted), float32 [n] in [0, 1], for a non-empty draft.

        others   what the cache offers besides, when this is its main draft (`Situation.alternatives`)
        """
        state, token = features(history, slots([draft, *others]), 2 if draft.age else 0)
        inputs = np.concatenate((token, np.broadcast_to(state, (len(token), len(state)))), axis=1)
        return sigmoid(self.weights.forward(inputs)[:, 0])

    def survival(self, history: History, draft: Draft, others: Sequence[Draft] = ()) -> Float32Array:
        """P(accepted length >= k), k = 1..n, float32 [n], non-increasing, in [0, 1]. As `hazard`."""
        out: Float32Array = np.multiply.accumulate(self.hazard(history, draft, others))
        return out


class Network(NamedTuple):
    """A survival predictor's weights as `kernels.forecast` wants them; normalisation folded in."""

    place: Float32Array
    state: Float32Array
    bias: Float32Array
    sizes: Int64Array
    flat: Float32Array

    @staticmethod
    def of(weights: MLPWeights) -> Network:
        """Of a trained model."""
        (first, bias), *rest = weights.folded()
        parts = [part.ravel() for layer in rest for part in layer]
        return Network(
            np.ascontiguousarray(first[: len(TOKEN_NAMES)]),
            np.ascontiguousarray(first[len(TOKEN_NAMES) :]),
            np.ascontiguousarray(bias),
            np.array([len(bias), *(len(layer[1]) for layer in rest)], np.int64),
            np.concatenate(parts) if parts else np.zeros(0, np.float32),
        )

    @staticmethod
    def none() -> Network:
        """In place of a model where there is none."""
        empty, nothing = np.zeros((0, 0), np.float32), np.zeros(0, np.float32)
        return Network(empty, empty, nothing, np.zeros(0, np.int64), nothing)


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
