"""One .gguf file, mapped into memory. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md has the format.

The `gguf` package's reader makes an array of every token and every merge, seconds for a vocabulary of 150,000; this one
reads the same header in a tenth of a second. That package dequantizes the blocks.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd.errors import CheckpointError, UnsupportedModelError

# ggml type number -> (name, floats a block, bytes a block)
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
}
TYPE_NAMES = tuple(name for name, _, _ in _TYPES.values())
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True, eq=False)
class GGUFTensor:
    """A tensor as the file holds it.

    kind     number format, one of TYPE_NAMES
    shape    outermost dimension first (the file has them the other way round)
    data     uint8 [rows, bytes a row], rows = all dimensions but the innermost
    """

    kind: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block (of one float for plain formats)."""
        return next(size for name, _, size in _TYPES.values() if name == self.kind)


class GGUFFile:
    """Metadata and tensors of a GGUF file (versions 2 and 3, little-endian, in one piece). CheckpointError if torn.

    metadata   key -> value; arrays are lists
    tensors    the file's own name -> GGUFTensor
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} can't be read: {error}") from error
        self._at = 0
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, MemoryError, OverflowError, RecursionError) as error:
            raise self._torn(f"its header breaks off or is garbled near byte {self._at}") from error

    def _torn(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is torn or no GGUF file: {why}; fetch it again")

    def _read(self) -> None:
        if self._map[:4] != b"GGUF":
            raise self._torn("it does not begin with GGUF")
        self._at = 4
        version = self._u32()
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{self.path} is GGUF of version {version} (or big-endian); versions 2 and 3, little-endian, are read"
            )
        tensors, pairs = self._u64(), self._u64()
        for _ in range(pairs):
            key = self._string()
            self.metadata[key] = self._value(self._u32())
        pieces = self.metadata.get("split.count", 0)
        if type(pieces) is not int:
            raise self._torn(f"its split.count is {str(pieces)[:60]!r}")
        if pieces > 1:
            raise UnsupportedModelError(f"{self.path} is one of {pieces} pieces; merge them with llama-gguf-split")
        entries = [self._tensor_entry() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise self._torn(f"its alignment is {str(alignment)[:60]!r}")
        start = -(-self._at // alignment) * alignment
        content = np.frombuffer(self._map, np.uint8)
        for name, shape, type_number, offset in entries:
            self.tensors[name] = self._tensor(content, name, shape, type_number, start + offset)

    def _u32(self) -> int:
        (value,) = _U32.unpack_from(self._map, self._at)
        self._at += 4
        return int(value)

    def _u64(self) -> int:
        (value,) = _U64.unpack_from(self._map, self._at)
        self._at += 8
        return int(value)

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        data, at, unpack, strings = self._map, self._at, _U64.unpack_from, []
        for _ in range(count):
            end = at + 8 + unpack(data, at)[0]
            if end > len(data):
                raise struct.error("string beyond the end of the file")
            strings.append(data[at + 8 : end].decode())
            at = end
        self._at = at
        return strings

    def _value(self, type_number: int) -> Any:
        if type_number == _STRING:
            return self._string()
        if type_number == _ARRAY:
            return self._array(self._u32(), self._u64())
        return self._scalars(type_number, 1)[0]

    def _array(self, type_number: int, count: int) -> list[Any]:
        if type_number == _STRING:
            return self._strings(count)
        if type_number == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        return list(self._scalars(type_number, count))

    def _scalars(self, type_number: int, count: int) -> tuple[Any, ...]:
        if type_number not in _SCALARS:
            raise self._torn(f"value type {type_number} is unknown")
        form = struct.Struct(f"<{count}{_SCALARS[type_number]}")
        values = form.unpack_from(self._map, self._at)
        self._at += form.size
        return values

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        shape = tuple(self._u64() for _ in range(self._u32()))[::-1]
        return name, shape, self._u32(), self._u64()

    def _tensor(
        self, content: NDArray[np.uint8], name: str, shape: tuple[int, ...], type_number: int, start: int
    ) -> GGUFTensor:
        if type_number not in _TYPES:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} has {_foreign_type(type_number)}; read are {', '.join(TYPE_NAMES)}"
            )
        kind, floats, size = _TYPES[type_number]
        if not shape or min(shape) < 1 or shape[-1] % floats:
            raise self._torn(f"tensor {name} of shape {shape} does not divide into {kind} blocks")
        row_bytes = shape[-1] // floats * size
        end = start + math.prod(shape[:-1]) * row_bytes
        if end > len(content):
            raise self._torn(f"tensor {name} ends at byte {end} of {len(content)}")
        return GGUFTensor(kind, shape, content[start:end].reshape(-1, row_bytes))


def _foreign_type(type_number: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return f"number format {GGMLQuantizationType(type_number).name}"
    except ValueError:
        return f"number format {type_number}"
