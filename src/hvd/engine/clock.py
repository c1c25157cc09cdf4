"""Where a step's time goes."""

from __future__ import annotations

import time


class Clock:
    """Seconds by phase, filled by laps: `lap("gate")` counts what has passed since the lap before as the gate's."""

    def __init__(self) -> None:
        self.seconds = {"propose": 0.0, "gate": 0.0, "explain": 0.0, "forward": 0.0, "prefill": 0.0, "walk": 0.0}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> float:
        """Close a lap; returns its seconds."""
        now = time.perf_counter()
        passed, self._last = now - self._last, now
        self.seconds[phase] += passed
        return passed
