"""Weights in 4 or 8 bits, laid out for ONNX Runtime's MatMulNBits and GatherBlockQuantized.

A row of K weights is cut into blocks of 32. Weight i of a block is `(q[i] - zero_point) * scale`, with q and the
zero point unsigned integers of `bits` bits and one float32 scale a block. (Float zero points exist, but run 20 times
slower.)

GGUF's Q4_0 and Q8_0 blocks are of this form and carry over exactly. All other blocks, Q4_1 and the K-quants included
(their offset is a float), are dequantized and rounded anew; `quantize` looks for the scale and zero point of least
squared error instead of taking the block's extremes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

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
    columns  K
    exact    True when the blocks are those of the checkpoint, not rounded anew
    """

    bits: int
    blocks: UInt8Array
    scales: Float32Array
    zeros: UInt8Array
    columns: int
    exact: bool = False

    @property
    def rows(self) -> int:
        """N."""
        return int(self.blocks.shape[0])

    def dequantized(self) -> Float32Array:
        """float32 [N, K], the matrix that the runtime multiplies with."""
        count = self.scales.shape[1]
        zeros = unpack(self.zeros, self.bits)[:, :count].astype(np.float32)
        values = unpack(self.blocks, self.bits).astype(np.float32)
        values -= zeros[:, :, None]
        values *= self.scales[:, :, None]
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

    raw    the tensor's bytes: for each block a float16 scale, then 16 (Q4_0) or 32 (Q8_0) bytes
    kind   GGUF's name of the block type
    """
    if kind not in ("Q4_0", "Q8_0") or columns % BLOCK:
        return None
    blocks = raw.reshape(rows, columns // BLOCK, -1)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    data = blocks[..., 2:]
    if kind == "Q8_0":  # signed bytes
        bits, values = 8, np.bitwise_xor(data, np.uint8(128))
    else:  # the low halves are weights 0..15, the high ones 16..31
        bits, values = 4, pack(np.concatenate([data & 15, data >> 4], axis=-1), 4)
    zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
    return BlockWeight(bits, np.ascontiguousarray(values), scales, pack(zeros, bits), columns, exact=True)


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
