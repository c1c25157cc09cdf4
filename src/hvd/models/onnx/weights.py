"""Weights in 4 or 8 bits, in blocks of 32 with a scale each.

A row of K weights is cut into blocks of 32. Weight i of a block is `(q[i] - zero_point) * scale`, with q and the zero
point unsigned integers of `bits` bits, or `q[i] * scale - minus` with a float. ONNX Runtime's MatMulNBits takes the
first form alone (float zero points exist there, but run 20 times slower), `linear_kernel` both.

GGUF's Q4_0 and Q8_0 are of the first form, Q4_1 and Q4_K of the second, and carry over. All others are dequantized and
rounded anew; `quantize` looks for the scale and zero point of least squared error instead of taking the block's
extremes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from hvd.errors import CheckpointError
from hvd.types import Float32Array

UInt8Array = NDArray[np.uint8]

BLOCK = 32
"""Weights that share a scale."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """A matrix [N, K] in blocks of 32 along K; B = ceil(K / 32) blocks a row.

    bits     4 or 8
    blocks   uint8 [N, B, 32 * bits / 8], two 4-bit weights a byte, the first in the low half
    scales   float32 [N, B]
    zeros    uint8 [N, ceil(B * bits / 8)], packed like the weights
    minus    float32 [N, B], for the second form; zeros are 0 there
    columns  K
    exact    True when the blocks are those of the checkpoint, not rounded anew
    """

    bits: int
    blocks: UInt8Array
    scales: Float32Array
    zeros: UInt8Array
    columns: int
    exact: bool = False
    minus: Float32Array | None = None

    @property
    def rows(self) -> int:
        """N."""
        return int(self.blocks.shape[0])

    def zero_points(self) -> Float32Array:
        """float32 [N, B]."""
        return unpack(self.zeros, self.bits)[:, : self.scales.shape[1]].astype(np.float32)

    def in_halves(self) -> BlockWeight:
        """The second form with scales and minus in float16, as records of 4 bits hold them; what GGUF's Q4_0 and Q4_1
        have is in float16 already. CheckpointError where that is too small for a scale."""
        minus = self.zero_points() * self.scales if self.minus is None else self.minus
        with np.errstate(over="ignore"):
            halves = [part.astype(np.float16).astype(np.float32) for part in (self.scales, minus)]
        if not all(np.isfinite(part).all() for part in halves):
            raise CheckpointError("weights are too large for 4 bits; take 'int8'")
        return replace(self, scales=halves[0], minus=halves[1], zeros=np.zeros_like(self.zeros))

    def dequantized(self) -> Float32Array:
        """float32 [N, K], the matrix that is multiplied with."""
        values = unpack(self.blocks, self.bits).astype(np.float32)
        if self.minus is None:
            values -= self.zero_points()[:, :, None]
            values *= self.scales[:, :, None]
        else:
            values *= self.scales[:, :, None]
            values -= self.minus[:, :, None]
        return values.reshape(self.rows, -1)[:, : self.columns]


def pack(values: UInt8Array, bits: int) -> UInt8Array:
    """Pack integers of `bits` bits (uint8 [..., n]) along the last axis; an odd rest is padded with 0."""
    if bits == 8:
        return values
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros_like(values[..., :1])], axis=-1)
    packed: UInt8Array = values[..., ::2] | (values[..., 1::2] << np.uint8(4))
    return packed


def unpack(packed: UInt8Array, bits: int) -> UInt8Array:
    """The inverse of `pack`, the padding included."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def quantize(weight: Float32Array, bits: int) -> BlockWeight:
    """Round float32 [N, K] to `bits` bits, each block with the scale and zero point of least squared error found."""
    rows, columns = weight.shape
    padded = np.pad(weight, ((0, 0), (0, -columns % BLOCK))) if columns % BLOCK else weight
    blocks = np.ascontiguousarray(padded, np.float32).reshape(-1, BLOCK)
    values = np.empty(blocks.shape, np.uint8)
    scales = np.empty(len(blocks), np.float32)
    zeros = np.empty(len(blocks), np.uint8)
    _round_blocks(blocks, 2**bits - 1, values, scales, zeros)
    return BlockWeight(
        bits,
        pack(values.reshape(rows, -1, BLOCK), bits),
        scales.reshape(rows, -1),
        pack(zeros.reshape(rows, -1), bits),
        columns,
    )


def carry_over(raw: UInt8Array, kind: str, rows: int, columns: int) -> BlockWeight | None:
    """GGUF blocks as they are, or None where they are not of this form.

    raw    the tensor's bytes, block by block: Q4_0, Q8_0: a float16 scale, then the weights. Q4_1: scale and minimum in
           float16, then the weights. Q4_K: eight of our blocks with a float16 scale of their 6-bit scales, another one
           of their 6-bit minima, those in 12 bytes, then the weights
    kind   GGUF's name of the block type
    """
    if kind not in ("Q4_0", "Q4_1", "Q4_K", "Q8_0") or columns % (256 if kind == "Q4_K" else BLOCK):
        return None
    blocks = raw.reshape(rows, columns // (256 if kind == "Q4_K" else BLOCK), -1)
    scales, minus, bits = _half(blocks, 0), None, 4
    zero = 8
    if kind == "Q8_0":  # signed bytes
        bits, zero, values = 8, 128, np.bitwise_xor(blocks[..., 2:], np.uint8(128))
    elif kind == "Q4_K":
        parts, minima = _six_bits(blocks[..., 4:16])
        minus, scales = (_half(blocks, 2) * minima).reshape(rows, -1), (scales * parts).reshape(rows, -1)
        data = blocks[..., 16:].reshape(rows, -1, 1, BLOCK)  # low halves are one block, high halves the next
        values = np.concatenate([data & 15, data >> 4], axis=-2).reshape(rows, -1, BLOCK)
    else:  # the low halves are weights 0..15, the high ones 16..31
        data = blocks[..., 4:] if kind == "Q4_1" else blocks[..., 2:]
        values = np.concatenate([data & 15, data >> 4], axis=-1)
        if kind == "Q4_1":
            minus = -_half(blocks, 2)[..., 0]
    if kind != "Q4_K":
        scales = scales[..., 0]
    zeros = np.full(scales.shape, zero if minus is None else 0, np.uint8)
    packed = np.ascontiguousarray(pack(values, bits))
    return BlockWeight(bits, packed, np.ascontiguousarray(scales), pack(zeros, bits), columns, True, minus)


def _half(blocks: UInt8Array, start: int) -> Float32Array:
    """A float16 of each block [.., bytes], as float32 [.., 1]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16).astype(np.float32)


def _six_bits(packed: UInt8Array) -> tuple[Float32Array, Float32Array]:
    """Eight scales and eight minima of 6 bits in 12 bytes [.., 12], float32 [.., 8] each (gguf-py, quants.py)."""
    first, second, both = np.moveaxis(packed.reshape(*packed.shape[:-1], 3, 4), -2, 0)
    scales = np.concatenate([first & 0x3F, (both & 0x0F) | ((first >> 2) & 0x30)], axis=-1)
    minima = np.concatenate([second & 0x3F, (both >> 4) | ((second >> 2) & 0x30)], axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


SHRINKS = np.array([1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8], np.float32)
"""Candidate ranges of a block, as shares of what its extremes span: clipping an outlier often helps the other 31."""


@njit(cache=True, parallel=True, fastmath=False)
def _round_blocks(blocks, top, values, scales, zeros):  # type: ignore[no-untyped-def]
    """For each block: try every shrink with the zero point below and above, refit the scale, keep the least error."""
    for b in prange(blocks.shape[0]):
        block = blocks[b]
        low, high = min(np.float32(0.0), block.min()), max(np.float32(0.0), block.max())
        if high == low:
            values[b, :], scales[b], zeros[b] = 0, np.float32(0.0), 0
            continue
        best = np.float32(np.inf)
        tries = len(SHRINKS) if top == 15 else 1
        for t in range(2 * tries):
            step = (high - low) * SHRINKS[t // 2] / np.float32(top)
            zero = np.float32(min(max(np.floor(-low / step) + t % 2, 0.0), top))
            dot = np.float32(0.0)
            square = np.float32(0.0)
            for i in range(32):
                q = min(max(np.rint(block[i] / step) + zero, np.float32(0.0)), np.float32(top)) - zero
                dot += q * block[i]
                square += q * q
            if square == 0.0:
                continue
            scale = dot / square
            error = -dot * scale  # + sum of squares of the block, the same for all tries
            if error < best:
                best, scales[b], zeros[b] = error, scale, np.uint8(zero)
                for i in range(32):
                    values[b, i] = np.uint8(min(max(np.rint(block[i] / step) + zero, np.float32(0.0)), np.float32(top)))
