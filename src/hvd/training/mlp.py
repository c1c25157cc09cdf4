"""Fits a small multilayer perceptron with ReLU and one output, in NumPy: Adam, mini-batches, early stopping.

Adam: Kingma and Ba, arXiv 1412.6980, algorithm 1. First weights: He et al., arXiv 1502.01852.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from hvd.errors import ConfigError
from hvd.types import BoolArray, Float32Array, Int64Array

Layers = list[tuple[Float32Array, Float32Array]]
"""(weights float32 [inputs, outputs], bias float32 [outputs]) of each layer."""

Gather = Callable[[Int64Array], Float32Array]
"""Row numbers -> input rows, float32 [rows, inputs], an array that the caller may change."""

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
_CHUNK = 65_536
_SMALLEST_BATCH = 256
_MOMENT_ROWS = 262_144


class Loss(StrEnum):
    """SQUARED: mean squared error of the output. LOGISTIC: binary cross-entropy, the output is a logit."""

    SQUARED = "squared"
    LOGISTIC = "logistic"


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How to fit.

    hidden         sizes of the hidden layers
    epochs         most passes over the training rows
    batch          rows a step; fewer where an epoch would have less than `least_steps` steps
    learning_rate  of Adam; `decay` lowers it to zero along half a cosine
    patience       epochs without a better validation loss before it stops; the best epoch's weights are kept
    """

    hidden: tuple[int, ...]
    epochs: int = 20
    batch: int = 65_536
    learning_rate: float = 1e-3
    decay: bool = False
    patience: int = 5
    least_steps: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = (*self.hidden, self.epochs, self.batch, self.patience, self.least_steps)
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
            raise ConfigError("hidden sizes, epochs, batch, patience and least_steps must be integers of at least 1")
        if not 0.0 < self.learning_rate < 10.0:
            raise ConfigError(f"learning_rate must be in (0, 10), got {self.learning_rate!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Rows to learn from.

    gather         input rows by number
    target         float32 [rows]; 0 or 1 for LOGISTIC
    weight         float32 [rows], of each row's loss
    train, valid   int64, row numbers
    ignored        bool [inputs], columns that must not count
    """

    gather: Gather
    target: Float32Array
    weight: Float32Array
    train: Int64Array
    valid: Int64Array
    ignored: BoolArray
    loss: Loss


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """The result: output = layers((x - mean) / std), ReLU between layers.

    losses   (training, validation) loss of every epoch run
    best     the epoch, counted from 0, whose weights these are
    """

    layers: Layers
    mean: Float32Array
    std: Float32Array
    losses: tuple[tuple[float, float], ...]
    best: int


def fit_mlp(problem: Problem, options: FitOptions, progress: Callable[[int, int], None] | None = None) -> Fitted:
    """Fit; the same problem and options give the same weights. `progress(done, total)` counts epochs.

    ConfigError when there is nothing to train or to validate on, or the loss stops being a number.
    """
    if not len(problem.train) or not len(problem.valid):
        raise ConfigError("fitting needs training rows and validation rows; collect more traces")
    fitter = _Fitter(problem, options)
    losses: list[tuple[float, float]] = []
    best, best_layers = 0, fitter.layers
    for epoch in range(options.epochs):
        losses.append((fitter.epoch(), fitter.validation_loss()))
        if not np.isfinite(losses[-1]).all():
            raise ConfigError(f"the loss is no number any more at epoch {epoch + 1}; lower the learning rate")
        if epoch == 0 or losses[-1][1] < losses[best][1]:
            best, best_layers = epoch, [(w.copy(), b.copy()) for w, b in fitter.layers]
        if progress is not None:
            progress(epoch + 1, options.epochs)
        if epoch - best >= options.patience:
            break
    return Fitted(best_layers, fitter.mean, fitter.std, tuple(losses), best)


class _Fitter:
    """Layers on their way, and all that a step needs."""

    def __init__(self, problem: Problem, options: FitOptions) -> None:
        self.problem, self.options = problem, options
        self.rng = np.random.default_rng(options.seed)
        self.mean, self.std, used = _moments(problem, self.rng)
        self.layers = _first_layers((len(self.mean), *options.hidden, 1), used, self.rng)
        self._scale = np.where(used, 1.0 / self.std, 0.0).astype(np.float32)
        self._adam = _Adam(self.layers)
        self._batch = min(options.batch, max(_SMALLEST_BATCH, len(problem.train) // options.least_steps))
        self._steps = -(-len(problem.train) // self._batch) * options.epochs

    def epoch(self) -> float:
        """One pass over the training rows in a new order; their mean loss on the way."""
        problem, total = self.problem, 0.0
        order = self.rng.permutation(problem.train)
        for start in range(0, len(order), self._batch):
            rows = order[start : start + self._batch]
            loss, gradients = _gradients(
                self.layers, self._inputs(rows), problem.target[rows], problem.weight[rows], problem.loss
            )
            self._adam.step(self.layers, gradients, self._rate())
            total += loss
        return total / _total(problem.weight[problem.train])

    def validation_loss(self) -> float:
        """Mean loss of the validation rows."""
        problem, total = self.problem, 0.0
        for start in range(0, len(problem.valid), _CHUNK):
            rows = problem.valid[start : start + _CHUNK]
            output = forward(self.layers, self._inputs(rows))
            total += _loss(output, problem.target[rows], problem.weight[rows], problem.loss)[0]
        return total / _total(problem.weight[problem.valid])

    def _inputs(self, rows: Int64Array) -> Float32Array:
        x = self.problem.gather(rows)
        x -= self.mean
        x *= self._scale
        return x

    def _rate(self) -> float:
        share = 0.5 * (1.0 + np.cos(np.pi * self._adam.steps / self._steps)) if self.options.decay else 1.0
        return float(self.options.learning_rate * share)


def _total(weight: Float32Array) -> float:
    return max(float(weight.sum(dtype=np.float64)), 1e-30)


def forward(layers: Layers, x: Float32Array) -> Float32Array:
    """Output of standardised rows, float32 [rows]."""
    for layer in layers[:-1]:
        x = _relu(x, layer)
    weights, bias = layers[-1]
    output: Float32Array = (x @ weights + bias)[:, 0]
    return output


def _relu(x: Float32Array, layer: tuple[Float32Array, Float32Array]) -> Float32Array:
    out: Float32Array = x @ layer[0]
    out += layer[1]
    np.maximum(out, 0.0, out=out)
    return out


def _moments(problem: Problem, rng: np.random.Generator) -> tuple[Float32Array, Float32Array, BoolArray]:
    """Mean and deviation of each column, and which columns vary and are not ignored (others: std 1)."""
    rows = problem.train
    if len(rows) > _MOMENT_ROWS:
        rows = rng.choice(rows, _MOMENT_ROWS, replace=False)
    x = problem.gather(rows)
    mean, std = x.mean(0, dtype=np.float64), x.std(0, dtype=np.float64)
    used = (std > 1e-6) & ~problem.ignored
    return mean.astype(np.float32), np.where(used, std, 1.0).astype(np.float32), used


def _first_layers(sizes: tuple[int, ...], used: BoolArray, rng: np.random.Generator) -> Layers:
    layers = [
        (
            (rng.standard_normal((rows, columns)) * np.sqrt(2.0 / rows)).astype(np.float32),
            np.zeros(columns, np.float32),
        )
        for rows, columns in pairwise(sizes)
    ]
    # A column that never varied is never learned; without this its first random weights would stay.
    layers[0][0][~used] = 0.0
    return layers


def _gradients(
    layers: Layers, x: Float32Array, target: Float32Array, weight: Float32Array, kind: Loss
) -> tuple[float, Layers]:
    """Summed loss of the rows, and the gradient of their mean loss."""
    inputs = [x]
    for layer in layers[:-1]:
        inputs.append(_relu(inputs[-1], layer))
    output = (inputs[-1] @ layers[-1][0] + layers[-1][1])[:, 0]
    loss, slope = _loss(output, target, weight, kind)
    back = (slope / max(float(weight.sum()), 1e-30)).astype(np.float32)[:, None]
    gradients: Layers = []
    for i in range(len(layers) - 1, -1, -1):
        gradients.append((inputs[i].T @ back, back.sum(0)))
        if i:
            back = back @ layers[i][0].T
            back *= inputs[i] > 0.0
    return loss, gradients[::-1]


def _loss(output: Float32Array, target: Float32Array, weight: Float32Array, kind: Loss) -> tuple[float, Float32Array]:
    """Summed weighted loss, and its slope by the output, float32 [rows]."""
    if kind is Loss.SQUARED:
        error = output - target
        return float((weight * error * error).sum(dtype=np.float64)), 2.0 * weight * error
    # log(1 + exp(z)) - y z, in the form that does not overflow
    each = np.maximum(output, 0.0) - output * target + np.log1p(np.exp(-np.abs(output)))
    chance = (1.0 / (1.0 + np.exp(-np.clip(output, -60.0, 60.0)))).astype(np.float32)
    slope: Float32Array = weight * (chance - target)
    return float((weight * each).sum(dtype=np.float64)), slope


class _Adam:
    """Running means of every weight's gradient and of its square."""

    def __init__(self, layers: Layers) -> None:
        self.steps = 0
        self._means = [[np.zeros_like(part) for part in layer] for layer in layers]
        self._squares = [[np.zeros_like(part) for part in layer] for layer in layers]

    def step(self, layers: Layers, gradients: Layers, rate: float) -> None:
        """Change the layers in place."""
        self.steps += 1
        rate *= float(np.sqrt(1.0 - _BETA2**self.steps) / (1.0 - _BETA1**self.steps))
        for layer, gradient, means, squares in zip(layers, gradients, self._means, self._squares, strict=True):
            for part, slope, mean, square in zip(layer, gradient, means, squares, strict=True):
                mean += (1.0 - _BETA1) * (slope - mean)
                square += (1.0 - _BETA2) * (slope * slope - square)
                part -= np.float32(rate) * mean / (np.sqrt(square) + np.float32(_EPSILON))
