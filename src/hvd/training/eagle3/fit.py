"""The training loop of an EAGLE3 head: packs, losses, checkpoints. Knows nothing of files but its checkpoint."""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvd.errors import ConfigError, TrainingError
from hvd.payoff.files import write_whole
from hvd.training.eagle3.module import HeadModule, Pack
from hvd.training.eagle3.optimizer import HeadOptimizer, Schedule
from hvd.training.eagle3.packs import make_pack, packs_of
from hvd.training.eagle3.states import StateStore
from hvd.training.eagle3.text import Document

FORMAT = 2
DIGEST = 32
"""Bytes of the digest at the end of a checkpoint."""


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How a head is trained.

    steps           steps of the training-time test
    decay           weight of step i in the loss is decay**i
    length          most tokens of a pack, and of a document
    prompt_share    share of the prompts' tokens that count too, drawn anew each epoch: text that costs no decoding
    packs           packs a step of the optimizer
    epochs          rounds over the training text
    learning_rate   its highest value; see `Schedule`
    warm_up         share of the training during which it rises
    weight_decay    of matrices
    clip            norm of the gradient is clipped here
    patience        evaluations without a better accepted length before training ends; one evaluation an epoch
    precision       "bfloat16" (products) or "float32"
    save_seconds    time between two checkpoints
    """

    steps: int = 5
    decay: float = 0.8
    length: int = 2048
    prompt_share: float = 0.2
    packs: int = 1
    epochs: int = 10
    learning_rate: float = 6e-3
    warm_up: float = 0.03
    weight_decay: float = 0.01
    clip: float = 1.0
    patience: int = 3
    precision: str = "bfloat16"
    seed: int = 0
    save_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name in ("steps", "length", "packs", "epochs", "patience"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.prompt_share <= 1:
            raise ConfigError(f"the share of the prompts must lie between 0 and 1, got {self.prompt_share}")
        if self.precision not in ("bfloat16", "float32"):
            raise ConfigError(f"precision must be 'bfloat16' or 'float32', got {self.precision!r}")
        Schedule(self.learning_rate, self.warm_up)


@dataclass(frozen=True, slots=True)
class Score:
    """A head on held-out text, had it drafted behind every token.

    accepted   mean accepted length of a chain of k, for k = 1 .. steps; one more is tokens per cycle
    accuracy   at each step, whether its token is right given that all before were
    loss       mean of the weighted loss
    """

    accepted: tuple[float, ...]
    accuracy: tuple[float, ...]
    loss: float


@dataclass(slots=True)
class Point:
    """The learning curve at one evaluation. seconds: spent training, over all runs."""

    epoch: int
    updates: int
    seconds: float
    train_loss: float
    score: Score


@dataclass(slots=True)
class _Place:
    """Where training is; what a checkpoint holds beside weights and optimizer."""

    epoch: int = 0
    batch: int = 0
    updates: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    rows: float = 0.0
    worse: int = 0
    curve: list[Point] = field(default_factory=list)


class Fit:
    """Trains a head; can be killed at any time and goes on exactly where its checkpoint was.

    held        documents to evaluate on; the best weights by the accepted length of a chain of 4 are kept
    settings    what a checkpoint must agree with to be resumed: JSON values beside the options
    """

    def __init__(
        self,
        head: HeadModule,
        train: tuple[StateStore, Sequence[Document]],
        held: tuple[StateStore, Sequence[Document]],
        checkpoint: Path,
        options: FitOptions,
        settings: dict[str, Any],
    ) -> None:
        """Resumes when the checkpoint is there. TrainingError when it is damaged, of another version, or was
        made with other settings."""
        if not train[1] or not held[1]:
            raise TrainingError("nothing to learn from: no document is left to train on, or none to hold out")
        self.head, self.options = head, options
        self._train, self._held, self._checkpoint = train, held, checkpoint
        self._optimizer = HeadOptimizer(head, options.weight_decay, options.clip)
        self._schedule = Schedule(options.learning_rate, options.warm_up)
        self._settings = {**settings, **{k: v for k, v in asdict(options).items() if k not in ("save_seconds",)}}
        self._place = _Place()
        self._best: dict[str, torch.Tensor] | None = None
        self._saved = time.monotonic()
        if checkpoint.exists():
            self._resume()

    @property
    def curve(self) -> list[Point]:
        """One point an evaluation so far."""
        return self._place.curve

    def run(self, progress: Callable[[str, int, int], None] = lambda what, done, total: None) -> None:
        """Train to the end; afterwards the head holds its best weights. TrainingError for a loss that is no number."""
        place = self._place
        try:
            while place.epoch < self.options.epochs and place.worse < self.options.patience:
                self._epoch(progress)
        except KeyboardInterrupt:
            self._save()
            raise
        self._save()
        if self._best is not None:
            self.head.load_state_dict(self._best)

    def _epoch(self, progress: Callable[[str, int, int], None]) -> None:
        place, options = self._place, self.options
        batches = self._batches(place.epoch)
        self.head.train()
        while place.batch < len(batches):
            started = time.monotonic()
            done = place.epoch + place.batch / len(batches)
            self._update(batches[place.batch], self._schedule.rate(done / options.epochs))
            place.batch += 1
            place.updates += 1
            place.seconds += time.monotonic() - started
            name = f"epoch {place.epoch + 1} of {options.epochs}, loss {place.loss / max(1.0, place.rows):.3f}"
            progress(name, place.epoch * len(batches) + place.batch, options.epochs * len(batches))
            if time.monotonic() - self._saved > options.save_seconds:
                self._save()
        self._close_epoch()

    def _close_epoch(self) -> None:
        place = self._place
        score = evaluate(self.head, *self._held, self.options)
        best = max((rank(point.score) for point in place.curve), default=-math.inf)
        place.curve.append(
            Point(place.epoch + 1, place.updates, round(place.seconds, 1), place.loss / max(1.0, place.rows), score)
        )
        place.worse = 0 if rank(score) > best else place.worse + 1
        if place.worse == 0:
            self._best = {name: tensor.detach().cpu().clone() for name, tensor in self.head.state_dict().items()}
        place.epoch, place.batch, place.loss, place.rows = place.epoch + 1, 0, 0.0, 0.0
        self._save()

    def _batches(self, epoch: int) -> list[list[list[int]]]:
        """Updates of packs of documents, drawn anew each epoch."""
        documents = self._train[1]
        order = np.random.default_rng((self.options.seed, epoch)).permutation(len(documents)).tolist()
        packs = list(packs_of(order, documents, self.options.length))
        return [packs[i : i + self.options.packs] for i in range(0, len(packs), self.options.packs)]

    def _update(self, packs: Sequence[Sequence[int]], rate: float) -> None:
        store, documents = self._train
        self._optimizer.clear()
        rng = np.random.default_rng((self.options.seed, self._place.epoch, self._place.batch))
        rows_of = [make_pack(store, documents, pack, self._device, self.options.prompt_share, rng) for pack in packs]
        total = sum(int(row.counts.sum()) for row in rows_of)
        for row in rows_of:
            loss, rows = _loss(self.head, row, self.options)
            if not torch.isfinite(loss):
                raise TrainingError(
                    f"the loss became {loss.item()} at update {self._place.updates + 1} of epoch "
                    f"{self._place.epoch + 1}; the last good checkpoint is kept in {self._checkpoint}: start again "
                    "with a lower --learning-rate or --precision float32"
                )
            (loss / total).backward()  # type: ignore[no-untyped-call]
            self._place.loss += loss.item()
            self._place.rows += rows
        self._optimizer.step(rate)

    @property
    def _device(self) -> torch.device:
        return self.head.fc.weight.device

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        buffer = io.BytesIO()
        torch.save(
            {
                "format": FORMAT,
                "settings": self._settings,
                "head": self.head.state_dict(),
                "best": self._best,
                "optimizer": self._optimizer.state_dict(),
                "place": asdict(self._place),
            },
            buffer,
        )
        try:
            write_whole(self._checkpoint, buffer.getvalue() + _digest(buffer.getvalue()))
        except OSError as error:
            raise TrainingError(f"can't write {self._checkpoint}: {error.strerror or error}") from error
        self._saved = time.monotonic()

    def _resume(self) -> None:
        damaged = f"{self._checkpoint} is damaged or not a checkpoint of this program; --restart begins anew"
        try:
            content = self._checkpoint.read_bytes()
        except OSError as error:
            raise TrainingError(f"can't read {self._checkpoint}: {error.strerror or error}") from error
        if _digest(content[:-DIGEST]) != content[-DIGEST:]:
            raise TrainingError(damaged)
        try:
            saved = torch.load(io.BytesIO(content[:-DIGEST]), map_location=self._device, weights_only=True)
            made_by, settings = saved["format"], saved["settings"]
        except (RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
            raise TrainingError(damaged) from error
        if made_by != FORMAT:
            raise TrainingError(
                f"{self._checkpoint} was made by another version (format {made_by}, this one reads {FORMAT}); "
                "--restart trains anew, text and hidden states stay"
            )
        for name in {**settings, **self._settings}:
            old, new = settings.get(name), self._settings.get(name)
            if old != new:
                raise TrainingError(
                    f"{self._checkpoint} was made with {name} {_short(old)}, now {_short(new)}; "
                    "give the same settings to go on, or --restart"
                )
        self.head.load_state_dict(saved["head"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._best = saved["best"]
        curve = [Point(**{**point, "score": Score(**point["score"])}) for point in saved["place"].pop("curve")]
        self._place = _Place(**saved["place"], curve=curve)


def evaluate(head: HeadModule, store: StateStore, documents: Sequence[Document], options: FitOptions) -> Score:
    """Draft behind every token of the answers and count, step by step, what the text confirms."""
    head.eval()
    device = head.fc.weight.device
    right, valid = np.zeros(options.steps), np.zeros(options.steps)
    total = rows = 0.0
    for pack in packs_of(range(len(documents)), documents, options.length):
        row = make_pack(store, documents, pack, device)
        with torch.no_grad(), _autocast(device, options):
            results = list(head.steps(row, options.steps))
        alive: torch.Tensor | None = None
        for step, result in enumerate(results):
            total += options.decay**step * result.loss.item()
            reached = result.valid if alive is None else alive & result.valid
            alive = reached & result.right
            right[step] += int(alive.sum())
            valid[step] += int(reached.sum())
            rows += int(result.rows) if step == 0 else 0
    chains = right / max(1.0, valid[0])  # P(first k right), over all rows
    accuracy = np.divide(right, valid, out=np.zeros_like(right), where=valid > 0)
    return Score(tuple(np.cumsum(chains).tolist()), tuple(accuracy.tolist()), total / max(1.0, rows))


def _loss(head: HeadModule, pack: Pack, options: FitOptions) -> tuple[torch.Tensor, float]:
    """Weighted loss summed over the rows, and the rows of the first step."""
    total, rows = torch.zeros((), device=pack.tokens.device), 0.0
    with _autocast(pack.tokens.device, options):
        for step, result in enumerate(head.steps(pack, options.steps)):
            total = total + options.decay**step * result.loss
            rows += float(result.rows) if step == 0 else 0.0
    return total, rows


def _autocast(device: torch.device, options: FitOptions) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.precision == "bfloat16")


def rank(score: Score) -> float:
    """What "better" means: the accepted length of a chain of 4, or of the longest one measured."""
    return score.accepted[min(4, len(score.accepted)) - 1]


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST).digest()


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
