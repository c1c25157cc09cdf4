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
"""Row numbers -> input rows, float32 [rows, inputs]."""

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
_CHUNK = 65_536
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
    batch          rows a step
    learning_rate  of Adam; `decay` lowers it to zero along half a cosine
    patience       epochs without a better validation loss before it stops; the best epoch's weights are kept
    """

    hidden: tuple[int, ...]
    epochs: int = 20
    batch: int = 65_536
    learning_rate: float = 1e-3
    decay: bool = False
    patience: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = (*self.hidden, self.epochs, self.batch, self.patience)
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
            raise ConfigError("hidden sizes, epochs, batch and patience must be integers of at least 1")
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
    rng = np.random.default_rng(options.seed)
    mean, std, used = _moments(problem, rng)
    layers = _first_layers((len(mean), *options.hidden, 1), used, rng)
    adam = _Adam(layers)
    scale = np.where(used, 1.0 / std, 0.0).astype(np.float32)
    steps = -(-len(problem.train) // options.batch) * options.epochs
    losses: list[tuple[float, float]] = []
    best, best_layers = 0, layers
    for epoch in range(options.epochs):
        total = weight = 0.0
        order = rng.permutation(problem.train)
        for start in range(0, len(order), options.batch):
            rows = order[start : start + options.batch]
            x = (problem.gather(rows) - mean) * scale
            loss, gradients = _gradients(layers, x, problem.target[rows], problem.weight[rows], problem.loss)
            adam.step(layers, gradients, _rate(options, adam.steps, steps))
            total, weight = total + loss, weight + float(problem.weight[rows].sum())
        losses.append((total / max(weight, 1e-30), _validation_loss(problem, layers, mean, scale)))
        if not np.isfinite(losses[-1]).all():
            raise ConfigError(f"the loss is no number any more at epoch {epoch + 1}; lower the learning rate")
        if epoch == 0 or losses[-1][1] < losses[best][1]:
            best, best_layers = epoch, [(w.copy(), b.copy()) for w, b in layers]
        if progress is not None:
            progress(epoch + 1, options.epochs)
        if epoch - best >= options.patience:
            break
    return Fitted(best_layers, mean, std, tuple(losses), best)


def forward(layers: Layers, x: Float32Array) -> Float32Array:
    """Output of standardised rows, float32 [rows]."""
    for weights, bias in layers[:-1]:
        x = np.maximum(x @ weights + bias, 0.0)
    weights, bias = layers[-1]
    output: Float32Array = (x @ weights + bias)[:, 0]
    return output


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
    for weights, bias in layers[:-1]:
        inputs.append(np.maximum(inputs[-1] @ weights + bias, 0.0))
    output = (inputs[-1] @ layers[-1][0] + layers[-1][1])[:, 0]
    loss, slope = _loss(output, target, weight, kind)
    back = (slope / max(float(weight.sum()), 1e-30)).astype(np.float32)[:, None]
    gradients: Layers = []
    for i in range(len(layers) - 1, -1, -1):
        gradients.append((inputs[i].T @ back, back.sum(0)))
        if i:
            back = (back @ layers[i][0].T) * (inputs[i] > 0.0)
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


def _validation_loss(problem: Problem, layers: Layers, mean: Float32Array, scale: Float32Array) -> float:
    total = 0.0
    for start in range(0, len(problem.valid), _CHUNK):
        rows = problem.valid[start : start + _CHUNK]
        output = forward(layers, (problem.gather(rows) - mean) * scale)
        total += _loss(output, problem.target[rows], problem.weight[rows], problem.loss)[0]
    return total / max(float(problem.weight[problem.valid].sum(dtype=np.float64)), 1e-30)


def _rate(options: FitOptions, step: int, steps: int) -> float:
    share = 0.5 * (1.0 + np.cos(np.pi * step / steps)) if options.decay else 1.0
    return float(options.learning_rate * share)


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
