"""What verification and drafting cost in seconds: measured curves, corrected online.

`hvd.payoff.profile` measures the curves. While decoding, every pass is compared with what the curves said:

    believed = measured curve * exp(pace + deviation of the size)

The *pace* follows the machine as a whole (busy, throttled) within some ten passes and leaves every choice as it is,
since a policy only compares costs. The *deviations* say that one size is dearer than the profile thought; they move
slowly. Each surprise is clipped first: one outlier, however large, moves nothing by more than a few per cent.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hvd.errors import ConfigError, PredictorError
from hvd.payoff.files import write_whole
from hvd.types import Float64Array

FORMAT = "hvd-cost"
VERSION = 2

_CLIP = 0.4
_PACE_RATE = 0.1
_DEVIATION_RATE = 0.02
_DEVIATION_LIMIT = math.log(4.0)
_PACE_LIMIT = math.log(1000.0)


@dataclass(frozen=True, eq=False)
class Surface:
    """Seconds over size (verify width or draft length) and context, from measurements on a grid.

    sizes      ascending, >= 1              contexts   ascending, >= 0
    seconds    [contexts, sizes], > 0

    Between grid points it interpolates linearly. Behind the last size or context it goes on with the last slope; before
    the first it stays level. More never costs less: noise that says so is levelled out.
    """

    sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: Float64Array
    _tables: dict[int, Float64Array] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        table = np.asarray(self.seconds, np.float64)
        if table.shape != (len(self.contexts), len(self.sizes)) or table.size == 0:
            raise PredictorError(
                f"a table of seconds must be [{len(self.contexts)}, {len(self.sizes)}], not {table.shape}"
            )
        for name, grid, least in (("sizes", self.sizes, 1), ("contexts", self.contexts, 0)):
            if grid[0] < least or any(b <= a for a, b in pairwise(grid)):
                raise PredictorError(f"{name} must ascend from at least {least}, got {grid}")
        if not np.isfinite(table).all() or table.min() <= 0.0:
            raise PredictorError("seconds must be finite and positive")
        level = np.maximum.accumulate(np.maximum.accumulate(table, axis=0), axis=1)
        object.__setattr__(self, "seconds", level)

    def _table(self, limit: int) -> Float64Array:
        """[contexts, limit]: seconds at every size 1..limit."""
        if limit not in self._tables:
            self._tables[limit] = self._densify(limit)
        return self._tables[limit]

    def _densify(self, limit: int) -> Float64Array:
        wanted = np.arange(1, limit + 1)
        rows = [np.interp(wanted, self.sizes, row) for row in self.seconds]
        beyond = np.maximum(0, wanted - self.sizes[-1])
        if len(self.sizes) > 1:
            step = self.sizes[-1] - self.sizes[-2]
            slopes = (self.seconds[:, -1] - self.seconds[:, -2]) / step
            rows = [row + beyond * slope for row, slope in zip(rows, slopes, strict=True)]
        else:
            rows = [row * np.maximum(1, wanted / self.sizes[0]) for row in rows]
        table: Float64Array = np.maximum.accumulate(np.array(rows), axis=0)
        return table

    def curve(self, limit: int, context: int) -> Float64Array:
        """Seconds at sizes 1..limit, float64 [limit]."""
        # Rounded up, so that a few dense tables serve all limits.
        table = self._table(-(-limit // 64) * 64)[:, :limit]
        contexts = self.contexts
        if len(contexts) == 1 or context <= contexts[0]:
            first: Float64Array = table[0]
            return first
        right = bisect_left(contexts, context, 1, len(contexts) - 1)
        low, high = contexts[right - 1], contexts[right]
        row: Float64Array = table[right - 1] + (context - low) / (high - low) * (table[right] - table[right - 1])
        return row

    def to_json(self) -> dict[str, Any]:
        """The measurements as JSON values."""
        return {"sizes": self.sizes, "contexts": self.contexts, "seconds": self.seconds.tolist()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Surface:
        """Inverse of `to_json`."""
        return cls(tuple(value["sizes"]), tuple(value["contexts"]), np.array(value["seconds"], np.float64))


class _Deviation:
    """Log factors of a surface's sizes: one a grid size, interpolated between them."""

    def __init__(self, sizes: Sequence[int], rate: float) -> None:
        self._rate = rate
        self._sizes = np.array(sizes)
        self._logs = np.zeros(len(sizes))
        self._dense: Float64Array | None = np.ones(1)

    def factors(self, limit: int) -> Float64Array:
        """exp of the deviation at sizes 1..limit."""
        if self._dense is None or len(self._dense) < limit:
            wanted = np.arange(1, -(-limit // 64) * 64 + 1)
            self._dense = np.exp(np.interp(wanted, self._sizes, self._logs))
        return self._dense[:limit]

    def move(self, size: int, surprise: float) -> None:
        """Pull the grid sizes around `size`, nearer ones more."""
        right = min(int(np.searchsorted(self._sizes, size)), len(self._sizes) - 1)
        left = max(0, right - 1)
        span = max(1, int(self._sizes[right] - self._sizes[left]))
        share = min(1.0, max(0.0, (size - int(self._sizes[left])) / span)) if right > left else 1.0
        for index, weight in ((left, 1.0 - share), (right, share)):
            moved = self._logs[index] + self._rate * weight * surprise
            self._logs[index] = min(_DEVIATION_LIMIT, max(-_DEVIATION_LIMIT, moved))
        self._dense = None


class CostModel:
    """Seconds of a cycle's parts. Batches: see `verify_batch`.

    verify           a pass of one request by verify width and context
    eagle3           drafting by length and context, one token of backlog included; None = not measured, then a token
                     is taken to cost a quarter of the narrowest pass until drafts are observed
    backlog_seconds  seconds for each further token that the head has to catch up with
    overhead         seconds of a cycle outside the target and the head (gate, trie, sampling)
    min_width        narrowest pass the backend really computes: a narrower one costs as much
    shared_passes    requests of one pass share the reading of the weights
    hardware, model  fingerprints of what was measured; "" = of nothing in particular
    """

    def __init__(
        self,
        verify: Surface,
        *,
        eagle3: Surface | None = None,
        backlog_seconds: float = 0.0,
        overhead: float = 0.0,
        min_width: int = 1,
        shared_passes: bool = True,
        hardware: str = "",
        model: str = "",
    ) -> None:
        self.min_width = min_width
        self.shared_passes = shared_passes
        self.overhead = overhead
        self.hardware = hardware
        self.model = model
        self._verify = verify
        self._eagle3 = eagle3
        self._head = eagle3 or Surface((1,), (0,), verify.seconds[:1, :1] / 4)
        self._backlog_seconds = backlog_seconds
        self._pace = 0.0
        self._verify_deviation = _Deviation(verify.sizes, _DEVIATION_RATE)
        self._head_deviation = _Deviation(self._head.sizes, _PACE_RATE)

    @property
    def measured_context(self) -> int:
        """The longest context that passes were measured at; costs behind it are extrapolated."""
        return self._verify.contexts[-1]

    # -- asking ---------------------------------------------------------------------------------------------------

    def verify_curve(self, limit: int, context: int) -> Float64Array:
        """Seconds of a pass of one request alone at widths 1..limit, float64 [limit], non-decreasing."""
        limit = max(1, limit)
        wide = max(limit, self.min_width)
        seconds = self._verify.curve(wide, context) * self._verify_deviation.factors(wide)
        seconds *= math.exp(self._pace)
        seconds[: self.min_width - 1] = seconds[self.min_width - 1]
        level: Float64Array = np.maximum.accumulate(seconds)[:limit]
        return level

    def verify(self, width: int, context: int) -> float:
        """Seconds of a pass of one request alone."""
        return float(self.verify_curve(width, context)[-1])

    def verify_batch(self, widths: Sequence[int], contexts: Sequence[int]) -> float:
        """Seconds of a pass over several requests.

        With `shared_passes` the linear layers cost what one request of the summed width would, and each request adds
        what its own context costs beyond the shortest measured one. Otherwise requests run one after the other.
        """
        if not self.shared_passes:
            return sum(self.verify(w, c) for w, c in zip(widths, contexts, strict=True))
        base = self._verify.contexts[0]
        extra = sum(self.verify(w, c) - self.verify(w, base) for w, c in zip(widths, contexts, strict=True))
        return self.verify(sum(widths), base) + extra

    def batch_curve(self, limit: int, contexts: Sequence[int]) -> Float64Array:
        """Seconds of a shared pass over requests at these contexts, by *total* width 1..limit, float64 [limit].

        As `verify_batch`, with every request's width at the mean.
        """
        base = self._verify.contexts[0]
        curve = self.verify_curve(limit, base)
        mean = np.maximum(0, np.arange(1, limit + 1) // len(contexts) - 1)
        for context in contexts:
            if context > base:
                curve = curve + (self.verify_curve(limit, context) - self.verify_curve(limit, base))[mean]
        return np.maximum.accumulate(curve)

    def eagle3_curve(self, limit: int, backlog: float, context: int) -> Float64Array:
        """Seconds to catch up with `backlog` tokens and draft 1..limit with the head, float64 [limit]."""
        seconds = self._head.curve(limit, context) + max(0.0, backlog - 1) * self._backlog_seconds
        return seconds * self._head_deviation.factors(limit) * math.exp(self._pace)

    def eagle3(self, length: int, backlog: int, context: int) -> float:
        """Seconds to catch up with `backlog` tokens and draft `length` tokens; 0 for length 0."""
        return float(self.eagle3_curve(length, backlog, context)[-1]) if length > 0 else 0.0

    # -- learning -------------------------------------------------------------------------------------------------

    def observe_verify(self, widths: Sequence[int], contexts: Sequence[int], seconds: float) -> None:
        """Take in the measured seconds of a pass. Sizes move only where the pass had one of them."""
        if not widths or not seconds > 0.0:
            return
        surprise = self._surprise(seconds, self.verify_batch(widths, contexts))
        self._pace = _clip(self._pace + _PACE_RATE * surprise, _PACE_LIMIT)
        size = sum(widths) if self.shared_passes else max(widths)
        if self.shared_passes or min(widths) == size:
            self._verify_deviation.move(max(size, self.min_width), surprise)

    def observe_eagle3(self, length: int, backlog: int, context: int, seconds: float) -> None:
        """Take in the measured seconds of a draft of the head."""
        if length < 1 or not seconds > 0.0:
            return
        self._head_deviation.move(length, self._surprise(seconds, self.eagle3(length, backlog, context)))

    def observe_overhead(self, seconds: float) -> None:
        """Take in the seconds that a cycle spent outside the target and the head."""
        surprise = _clip(seconds - self.overhead, self.overhead + 1e-4)
        self.overhead = max(0.0, self.overhead + _PACE_RATE * surprise)

    @staticmethod
    def _surprise(measured: float, believed: float) -> float:
        return _clip(math.log(measured / believed), _CLIP)

    # -- keeping --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the measurements to a JSON file, atomically; online corrections belong to the moment and stay out.

        Raises ConfigError when the file can't be written.
        """
        content = {
            "format": FORMAT,
            "version": VERSION,
            "hardware": self.hardware,
            "model": self.model,
            "min_width": self.min_width,
            "shared_passes": self.shared_passes,
            "overhead": self.overhead,
            "verify": self._verify.to_json(),
            "eagle3": self._eagle3.to_json() if self._eagle3 else None,
            "backlog_seconds": self._backlog_seconds,
        }
        content["checksum"] = _checksum(content)
        try:
            write_whole(Path(path), json.dumps(content, indent=1).encode())
        except OSError as error:
            raise ConfigError(f"can't write the cost file {path}: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | Path, *, model: str | None = None, hardware: str | None = None) -> CostModel:
        """Read a cost file and leave it alone.

        Raises PredictorError when it is missing, torn or of another version, and, where a fingerprint is given, when it
        is of another model or machine.
        """
        content = _read(Path(path))
        for what, want in (("model", model), ("hardware", hardware)):
            if want is not None and content.get(what) != want:
                raise PredictorError(f"{path}: measured with another {what}; run 'hvd profile' again")
        try:
            _check_ranges(content)
            return cls(
                Surface.from_json(content["verify"]),
                eagle3=Surface.from_json(content["eagle3"]) if content["eagle3"] else None,
                backlog_seconds=float(content["backlog_seconds"]),
                overhead=float(content["overhead"]),
                min_width=int(content["min_width"]),
                shared_passes=bool(content["shared_passes"]),
                hardware=str(content["hardware"]),
                model=str(content["model"]),
            )
        except (KeyError, TypeError, ValueError, IndexError, OverflowError, PredictorError) as error:
            raise PredictorError(f"{path}: incomplete or out of range ({error}); run 'hvd profile' again") from error


def _clip(value: float, limit: float) -> float:
    return min(limit, max(-limit, value))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise PredictorError(f"{path}: can't be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise PredictorError(f"{path}: not a cost file, or torn; run 'hvd profile' again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PredictorError(f"{path}: not a cost file; run 'hvd profile' to make one")
    if content.get("version") != VERSION:
        raise PredictorError(
            f"{path}: version {content.get('version')}, this program reads {VERSION}; run 'hvd profile' again"
        )
    if content.get("checksum") != _checksum(content):
        raise PredictorError(f"{path}: torn or edited, its checksum does not match; run 'hvd profile' again")
    return content


def _checksum(content: dict[str, Any]) -> str:
    """SHA-256 of all the rest of the file."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _check_ranges(content: dict[str, Any]) -> None:
    if type(content["min_width"]) is not int or not 1 <= content["min_width"] <= 2**16:
        raise PredictorError(f"min_width must be a whole number from 1 on, got {content['min_width']!r}")
    for key in ("backlog_seconds", "overhead"):
        if not 0.0 <= content[key] < math.inf:
            raise PredictorError(f"{key} must be finite and not negative, got {content[key]!r}")


@cache
def hardware_fingerprint() -> str:
    """Hex digest of what a pass's time depends on: processor, cores in reach, operating system."""
    facts = (platform.system(), platform.machine(), _processor(), _cores())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
