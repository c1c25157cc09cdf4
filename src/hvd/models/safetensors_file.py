"""One .safetensors file, mapped into memory. https://huggingface.co/docs/safetensors has the format.

Read here rather than through the library because its NumPy side has no bfloat16, and fingerprints want the raw bytes.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd.errors import CheckpointError
from hvd.types import Float32Array

_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}
FLOAT_KINDS = ("F64", "F32", "F16", "BF16")
_MAX_HEADER = 100 * 1024 * 1024


class SafetensorsFile:
    """Names, number formats and shapes of the tensors of one file; each tensor on demand. CheckpointError if torn."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} can't be read: {error}") from error
        self._header, self._start = self._read_header()
        self._header.pop("__metadata__", None)
        for name in self._header:
            self._check(name)

    def _read_header(self) -> tuple[dict[str, Any], int]:
        if len(self._data) < 8:
            raise self._torn(f"it has only {len(self._data)} bytes")
        (size,) = struct.unpack("<Q", self._data[:8].tobytes())
        if size > min(_MAX_HEADER, len(self._data) - 8):
            raise self._torn(f"its header claims {size} bytes of the file's {len(self._data)}")
        try:
            header = json.loads(self._data[8 : 8 + size].tobytes())
        except (ValueError, RecursionError) as error:
            raise self._torn(f"its header is no JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._torn("its header is no JSON object")
        return header, 8 + size

    def _check(self, name: str) -> None:
        try:
            kind, shape, (start, end) = self.kind(name), self._header[name]["shape"], self._header[name]["data_offsets"]
            if any(type(number) is not int for number in (*shape, start, end)):
                raise TypeError("not whole numbers")
        except (KeyError, TypeError, ValueError) as error:
            raise self._torn(f"the entry of tensor {name} is malformed") from error
        if kind not in _DTYPES:
            raise CheckpointError(f"{self.path}: tensor {name} has number format {kind}; read are {', '.join(_DTYPES)}")
        if end - start != math.prod(shape) * np.dtype(_DTYPES[kind]).itemsize:
            raise self._torn(f"tensor {name} has {end - start} bytes, not what {kind} {shape} takes")
        if start < 0 or min(shape, default=0) < 0 or self._start + end > len(self._data):
            raise self._torn(f"tensor {name} ends at byte {self._start + end} of {len(self._data)}")

    def _torn(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is torn or no safetensors file: {why}; fetch it again")

    def __contains__(self, name: str) -> bool:
        return name in self._header

    def names(self) -> list[str]:
        """Names of all tensors of the file."""
        return list(self._header)

    def kind(self, name: str) -> str:
        """Number format: "F32", "BF16", ..."""
        return str(self._header[name]["dtype"])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._header[name]["shape"])

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Bytes of a tensor, uint8 [n], not copied."""
        start, end = self._header[name]["data_offsets"]
        return self._data[self._start + start : self._start + end]

    def array(self, name: str) -> NDArray[Any]:
        """A tensor in its own number format (read-only where the file allows it); bfloat16 comes as float32."""
        kind = self.kind(name)
        array = np.frombuffer(self.raw(name), dtype=_DTYPES[kind]).reshape(self.shape(name))
        return bfloat16_to_float32(array) if kind == "BF16" else array


def bfloat16_to_float32(bits: NDArray[np.uint16]) -> Float32Array:
    """Exact: a bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
