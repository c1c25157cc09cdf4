"""Cost profiles for those who have not measured. They are examples, and say what is measured and what assumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvd.errors import ConfigError
from hvd.payoff.cost import CostModel, Surface


@dataclass(frozen=True, slots=True)
class Example:
    """A built-in profile. `about` is what people are told of it."""

    about: str
    make: Callable[[], CostModel]


def _cpu_small() -> CostModel:
    """benchmarks/results/engine-smollm2.json, "hvd int8", least of the repeats."""
    milliseconds = [[3.43, 4.18, 5.28, 8.42, 14.19, 22.1], [8.81, 9.46, 10.76, 15.66, 25.95, 43.47]]
    return _measured((512, 4096), (1, 2, 4, 8, 16, 32), milliseconds)


def _cpu_half() -> CostModel:
    """`hvd profile --quick` of Qwen2.5-Coder-0.5B-Instruct.Q4_K_M (int8), the machine of engine-smollm2.json."""
    milliseconds = [[9.40, 10.70, 13.19, 16.47, 30.17, 46.90], [9.52, 10.86, 13.77, 17.39, 31.22, 48.82]]
    return _measured((32, 256), (1, 2, 4, 8, 16, 32), milliseconds)


def _measured(contexts: tuple[int, ...], widths: tuple[int, ...], milliseconds: list[list[float]]) -> CostModel:
    seconds = np.array(milliseconds) / 1e3
    head = Surface((1, 8), (0,), seconds[:1, :1] * np.array([[0.25, 2.0]]))
    return CostModel(Surface(widths, contexts, seconds), eagle3=head)


def _gpu(billions: float, kv_bytes: int, bandwidth: float, teraflops: float) -> CostModel:
    """A pass of one request by arithmetic alone: read the weights and the KV cache, multiply meanwhile, launch.

    billions     parameters, 16 bits each               kv_bytes    bytes of KV cache a position
    bandwidth    bytes a second that are reached        teraflops   1e12 operations a second that are reached
    """
    widths, contexts = (1, 2, 4, 8, 16, 32, 64, 128), (0, 8192, 32768)
    launch, read = 0.5e-3, 2e9 * billions / bandwidth
    multiply = 2e9 * billions / (teraflops * 1e12)
    rows = [[launch + _overlapped(read + c * kv_bytes / bandwidth, multiply * w) for w in widths] for c in contexts]
    one = 0.06 * read + 0.2e-3  # a layer and the vocabulary's rows, launched on their own
    head = Surface((1, 8), (0,), np.array([[one, 8 * one]]))
    return CostModel(Surface(widths, contexts, np.array(rows)), eagle3=head, overhead=0.3e-3)


def _overlapped(read: float, multiply: float) -> float:
    """Reading and multiplying go on at the same time, a fifth of the shorter one apart."""
    return max(read, multiply) + 0.2 * min(read, multiply)


EXAMPLES = {
    "cpu-small": Example(
        "example, measured: SmolLM2-135M, 8 bits, 2 CPU cores; EAGLE3 assumed: a quarter of a pass a token",
        _cpu_small,
    ),
    "cpu-0.5b": Example(
        "example, measured: Qwen2.5-Coder-0.5B, 8 bits, 2 CPU cores, contexts up to 256; EAGLE3 assumed: "
        "a quarter of a pass a token",
        _cpu_half,
    ),
    "gpu-8b": Example(
        "example, ASSUMED, not measured: 8 billion parameters, 16 bits, a GPU that reaches 1.6 TB/s and "
        "150 TFLOP/s, one request at a time; EAGLE3 6 % of a pass + 0.2 ms a token",
        lambda: _gpu(8.0, 131_072, 1.6e12, 150.0),
    ),
    "gpu-70b": Example(
        "example, ASSUMED, not measured: 70 billion parameters, 16 bits, four GPUs that reach 6.4 TB/s and "
        "600 TFLOP/s together, one request at a time; EAGLE3 6 % of a pass + 0.2 ms a token",
        lambda: _gpu(70.0, 327_680, 6.4e12, 600.0),
    ),
}
DEFAULT = "gpu-8b"


def load_cost(name: str) -> tuple[CostModel, str]:
    """A cost profile, by the name of an example or from a file of 'hvd profile', and one line that says what it is.

    ConfigError for a name that is neither, PredictorError for a file that can't be read.
    """
    if name in EXAMPLES:
        return EXAMPLES[name].make(), f"{name} ({EXAMPLES[name].about})"
    if not Path(name).is_file():
        raise ConfigError(
            f"no cost profile {name!r}: give a file made by 'hvd profile' or one of {', '.join(EXAMPLES)}"
        )
    return CostModel.load(name), f"{name} (measured by 'hvd profile')"
