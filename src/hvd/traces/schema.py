"""What a trace is, and how it lies in a Parquet file. (docs/trace-format.md describes the format for others.)

One row a request. Token ids and step records are all that replay needs; the class of every token of the
vocabulary stands once in the file's metadata, so that replay needs neither the model nor its tokenizer.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hvd.errors import TraceError
from hvd.types import Arm, CycleTimes, FinishReason, Int32Array, StepRecord

SCHEMA_VERSION = 1
VERSION_KEY = b"hvd.trace.version"
CLASSES_KEY = b"hvd.trace.token_classes"

_TIMES = pa.struct([(name, pa.float64()) for name in ("propose", "gate", "forward", "walk")])
_STEP = pa.struct(
    [
        ("position", pa.int32()),
        ("context", pa.int32()),
        ("arm", pa.string()),
        ("drafted", pa.int32()),
        ("accepted", pa.int32()),
        ("committed", pa.int32()),
        ("width", pa.int32()),
        ("offered", pa.int32()),
        ("match_len", pa.int32()),
        ("score", pa.float64()),
        ("expected", pa.float64()),
        ("reason", pa.string()),
        ("times", _TIMES),
    ]
)
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("model", pa.string()),
        ("model_fingerprint", pa.string()),
        ("tokenizer_fingerprint", pa.string()),
        ("dataset", pa.string()),
        ("category", pa.string()),
        ("split", pa.string()),
        ("prompt", pa.list_(pa.int32())),
        ("response", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("sampling", pa.string()),
        ("policy", pa.string()),
        ("created", pa.float64()),
        ("steps", pa.list_(_STEP)),
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One request as it went.

    id                     unique; the part before the first '#' is its group (one document, one task)
    model                  the target's name; "recorded" when the response was not written by a model of ours
    model_fingerprint      of the target (`TargetSpec.fingerprint`); "" when recorded
    tokenizer_fingerprint  token ids of traces with different fingerprints mean different things
    prompt, response       int32 [p], int32 [n]; a response that ended by itself ends with its stop token
    token_classes          uint8 [V], class of every token id of the vocabulary (`hvd.tokenizer`)
    finish_reason          LENGTH and CANCELLED mean that the response would have gone on
    sampling               the sampling parameters, as JSON
    created                seconds since 1970
    steps                  what happened in each cycle; empty when recorded
    """

    id: str
    prompt: Int32Array
    response: Int32Array
    token_classes: NDArray[np.uint8]
    finish_reason: FinishReason = FinishReason.STOP
    model: str = ""
    model_fingerprint: str = ""
    tokenizer_fingerprint: str = ""
    dataset: str = ""
    category: str = ""
    split: str = ""
    sampling: str = "{}"
    policy: str = ""
    created: float = 0.0
    steps: tuple[StepRecord, ...] = ()

    @property
    def group(self) -> str:
        """What must stay on one side of a split between training and test."""
        return self.id.split("#", 1)[0]

    @property
    def cut(self) -> bool:
        """Whether the response was cut off: a draft that fits up to its end might have fitted further."""
        return self.finish_reason is not FinishReason.STOP

    @property
    def max_tokens(self) -> int | None:
        """The limit among the sampling parameters; None without one. TraceError when they are no JSON object."""
        try:
            limit = json.loads(self.sampling).get("max_tokens")
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise TraceError(f"trace {self.id}: its sampling parameters are not a JSON object") from error
        return limit if isinstance(limit, int) else None


def metadata(token_classes: NDArray[np.uint8]) -> dict[bytes, bytes]:
    """The file metadata: schema version and token classes (zlib, base64)."""
    packed = base64.b64encode(zlib.compress(np.asarray(token_classes, np.uint8).tobytes()))
    return {VERSION_KEY: str(SCHEMA_VERSION).encode(), CLASSES_KEY: packed}


def classes_of(meta: dict[bytes, bytes] | None, name: str) -> NDArray[np.uint8]:
    """The token classes in a file's metadata. TraceError when it is no trace or of another version."""
    version = (meta or {}).get(VERSION_KEY)
    if meta is None or version is None:
        raise TraceError(f"{name} is not a trace file of hvd (no {VERSION_KEY.decode()} in its metadata)")
    if version != str(SCHEMA_VERSION).encode():
        raise TraceError(
            f"{name} has trace schema version {version.decode(errors='replace')}, "
            f"this hvd reads {SCHEMA_VERSION}; collect the traces again or use the hvd that wrote them"
        )
    return np.frombuffer(zlib.decompress(base64.b64decode(meta[CLASSES_KEY])), np.uint8)


def to_table(traces: Sequence[Trace], token_classes: NDArray[np.uint8]) -> Any:
    """Traces as a pyarrow Table that carries the file metadata."""
    rows = [_row(trace) for trace in traces]
    return pa.Table.from_pylist(rows, SCHEMA.with_metadata(metadata(token_classes)))


def from_table(table: Any, token_classes: NDArray[np.uint8]) -> list[Trace]:
    """The inverse of `to_table`. KeyError or ValueError when a column is missing or holds nonsense."""
    prompts, responses = _token_lists(table["prompt"]), _token_lists(table["response"])
    rest = table.drop_columns(["prompt", "response"]).to_pylist()
    return [
        _trace(row, prompt, response, token_classes)
        for row, prompt, response in zip(rest, prompts, responses, strict=True)
    ]


def _row(trace: Trace) -> dict[str, Any]:
    row = {name: getattr(trace, name) for name in SCHEMA.names if name not in ("steps", "finish_reason")}
    row["finish_reason"] = trace.finish_reason.value
    row["steps"] = [_step_row(step) for step in trace.steps]
    return row


def _step_row(step: StepRecord) -> dict[str, Any]:
    row = {field.name: getattr(step, field.name) for field in _STEP if field.name not in ("arm", "times")}
    row["arm"] = step.arm.value
    row["times"] = {field.name: getattr(step.times, field.name) for field in _TIMES}
    return row


def _token_lists(column: Any) -> list[Int32Array]:
    """A list<int32> column as one array a row, without a Python object for each token."""
    if column.null_count:
        raise ValueError(f"{column.null_count} rows without tokens")
    return [np.asarray(cell.values.to_numpy(zero_copy_only=False), np.int32) for cell in column]


def _trace(row: dict[str, Any], prompt: Int32Array, response: Int32Array, token_classes: NDArray[np.uint8]) -> Trace:
    steps = tuple(
        StepRecord(**{**step, "arm": Arm(step["arm"]), "times": CycleTimes(**step["times"])})
        for step in row.pop("steps")
    )
    finish = FinishReason(row.pop("finish_reason"))
    return Trace(
        **row,
        prompt=prompt,
        response=response,
        token_classes=token_classes,
        finish_reason=finish,
        steps=steps,
    )
