"""Opens the graphs that `graph` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvd.errors import CheckpointError
from hvd.models.onnx.api import OnnxRuntimeError, Operator, Session
from hvd.models.onnx.cache import GRAPH_FILE
from hvd.models.onnx.linear import linear_operators


def open_session(directory: Path, threads: int | None = None, operators: Sequence[Operator] = ()) -> Session:
    """Open a graph that may have the operators of `linear_operators`, and these. threads None = all cores. Raises
    CheckpointError if it is unreadable."""
    try:
        return Session(directory / GRAPH_FILE, threads, [*linear_operators(), *operators])
    except OnnxRuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"can't open the converted model in {directory} ({reason}); remove it to convert anew"
        ) from error
