"""Vector instructions for kernels that Numba compiles, written as LLVM code.

What a compiler makes of loops would leave the order of sums to it. Here it is said: a kernel made of these pieces gives
the same bits for a row whatever else it computes at once. Numba's disk cache doesn't see changes in this file; whoever
makes one touches the kernels' files too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Numbers in a vector; a processor with narrower registers takes several for one."""
BYTES = 4 * LANES
"""Of a vector."""

FLOAT, I8, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
VECTOR, INTEGERS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)
BYTE_LANES = ir.VectorType(I8, LANES)

_FEATURES = binding.get_host_cpu_features()
WIDE = bool(_FEATURES.get("avx512f"))
"""Whether a register holds a vector, and there are 32."""
_DOT_512 = bool(_FEATURES.get("avx512vnni"))
_DOT_256 = bool(_FEATURES.get("avxvnni"))
INTEGER_DOT = _DOT_512 or _DOT_256
"""Whether the processor multiplies bytes four at a time into sums of 32 bits (VNNI), which `Code.dot` needs."""


class Code:
    """Lays out instructions on vectors. Addresses are int64, offsets bytes."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def at(self, address: Any, *offsets: Any) -> Any:
        """The address so much further."""
        for offset in offsets:
            if isinstance(offset, int):
                offset = I64(offset)
            address = self.b.add(address, offset)
        return address

    def times(self, number: Any, factor: int) -> Any:
        """An int64 times a constant."""
        return self.b.mul(number, I64(factor))

    def load(self, address: Any, kind: Any = VECTOR) -> Any:
        """A value of that kind in memory, wherever it lies."""
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()), align=1)

    def halves(self, address: Any) -> Any:
        """A vector of float16 in memory, as floats."""
        return self.b.fpext(self.load(address, ir.VectorType(ir.HalfType(), LANES)), VECTOR)

    def store(self, value: Any, address: Any) -> None:
        """Write a value to memory, wherever it lies."""
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=1)

    def splat(self, scalar: Any) -> Any:
        """A vector of the same number."""
        kind = ir.VectorType(scalar.type, LANES)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        return self.b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(INTEGERS, [0] * LANES))

    def floats(self, number: float) -> Any:
        """A constant vector."""
        return ir.Constant(VECTOR, [ir.Constant(FLOAT, float(np.float32(number)))] * LANES)

    def integers(self, number: int) -> Any:
        """A constant vector of int32."""
        return ir.Constant(INTEGERS, [number] * LANES)

    def call(self, name: str, kind: Any, *arguments: Any) -> Any:
        """An LLVM intrinsic by its full name."""
        module = self.b.module
        known = module.globals.get(name)
        function = known or ir.Function(module, ir.FunctionType(kind, [a.type for a in arguments]), name)
        return self.b.call(function, arguments)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """x * y + z, rounded once."""
        return self.call(f"llvm.fma.v{LANES}f32", VECTOR, x, y, z)

    def larger(self, x: Any, y: Any) -> Any:
        """The larger of each pair."""
        return self.call(f"llvm.maxnum.v{LANES}f32", VECTOR, x, y)

    def absolute(self, x: Any) -> Any:
        """Without signs."""
        return self.call(f"llvm.fabs.v{LANES}f32", VECTOR, x)

    def rounded(self, x: Any) -> Any:
        """To the nearest whole number, halves to the even one."""
        return self.call(f"llvm.rint.v{LANES}f32", VECTOR, x)

    def largest(self, vector: Any) -> Any:
        """The largest of a vector."""
        return self.call(f"llvm.vector.reduce.fmax.v{LANES}f32", FLOAT, vector)

    def dot(self, sums: Any, unsigned: Any, signed: Any) -> Any:
        """To each of 16 sums the products of four unsigned bytes and four signed ones; all int32 [16]. Needs
        INTEGER_DOT."""
        if _DOT_512:
            return self.call("llvm.x86.avx512.vpdpbusd.512", INTEGERS, sums, unsigned, signed)
        kind = ir.VectorType(I32, LANES // 2)
        halves = [
            self.call("llvm.x86.avx512.vpdpbusd.256", kind, *(self._part(v, half, 2) for v in (sums, unsigned, signed)))
            for half in range(2)
        ]
        return self.b.shuffle_vector(*halves, ir.Constant(INTEGERS, list(range(LANES))))

    def _part(self, vector: Any, index: int, parts: int) -> Any:
        size = vector.type.count // parts
        pick = ir.Constant(ir.VectorType(I32, size), list(range(index * size, (index + 1) * size)))
        return self.b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), pick)

    def loop(self, count: Any, state: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """`for i in range(count): state = body(i, state)`; count is at least 1."""
        b, before = self.b, self.b.block
        head, behind = b.append_basic_block("loop"), b.append_basic_block("behind")
        b.branch(head)
        b.position_at_end(head)
        index, now = b.phi(I64), [b.phi(value.type) for value in state]
        new = body(index, list(now))
        following = b.add(index, I64(1))
        for phi, first, later in zip([index, *now], [I64(0), *state], [following, *new], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, b.block)
        b.cbranch(b.icmp_signed("<", following, count), head, behind)
        b.position_at_end(behind)
        return new

    def cases(self, number: Any, count: int, body: Callable[[int], None]) -> None:
        """Code for each number of 1 to count, of which the one is done that `number` says."""
        b = self.b
        behind = b.append_basic_block("behind")
        blocks = [b.append_basic_block(f"case{case}") for case in range(1, count + 1)]
        choice = b.switch(number, blocks[-1])
        for case, block in enumerate(blocks, start=1):
            choice.add_case(I64(case), block)
            b.position_at_end(block)
            body(case)
            b.branch(behind)
        b.position_at_end(behind)

    def exp(self, x: Any) -> Any:
        """e^x of x <= 0, to about one unit in the last place (Cephes' expf); e^-87 of all below."""
        b = self.b
        x = self.larger(x, self.floats(-87.0))
        whole = self.rounded(b.fmul(x, self.floats(math.log2(math.e))))
        rest = self.fma(whole, self.floats(-0.693359375), x)
        rest = self.fma(whole, self.floats(2.12194440e-4), rest)
        series = self.floats(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            series = self.fma(series, rest, self.floats(factor))
        fraction = b.fadd(self.fma(series, b.fmul(rest, rest), rest), self.floats(1.0))
        biased = b.add(b.fptosi(whole, INTEGERS), self.integers(127))
        return b.fmul(fraction, b.bitcast(b.shl(biased, self.integers(23)), VECTOR))

    def total(self, vector: Any) -> Any:
        """The sum of a vector, in halves."""
        while vector.type.count > 1:
            vector = self.b.fadd(self._part(vector, 0, 2), self._part(vector, 1, 2))
        return self.b.extract_element(vector, I32(0))


def primitive(signature: Any, generate: Callable[[Any, Sequence[Any]], Any]) -> Any:
    """A function for use in compiled code: `generate(builder, arguments)` lays out its instructions."""
    names = ", ".join(f"a{index}" for index in range(len(signature.args)))

    def typing(*_: Any) -> Any:
        return signature, lambda target, builder, _, given: generate(builder, given)

    scope: dict[str, Any] = {"typing": typing}
    exec(f"def made(context, {names}): return typing()", scope)  # Numba wants named arguments
    return intrinsic(scope["made"])


def vector_function(arguments: int, body: Callable[..., None]) -> Any:
    """One of so many int64, made of what `body(code, *arguments)` lays out."""

    def generate(builder: Any, given: Sequence[Any]) -> Any:
        body(Code(builder), *given)
        return ir.Constant(I8.as_pointer(), None)

    return primitive(types.void(*[types.int64] * arguments), generate)


def outside(arguments: int) -> Any:
    """A call of a C function by its address: (address, *int64) -> int64."""

    def generate(builder: Any, given: Sequence[Any]) -> Any:
        kind = ir.FunctionType(I64, [I64] * arguments)
        return builder.call(builder.inttoptr(given[0], kind.as_pointer()), list(given[1:]))

    return primitive(types.int64(*[types.int64] * (arguments + 1)), generate)


def room(floats: int) -> Any:
    """A function that gives the address of room for so many floats on the stack."""

    def generate(builder: Any, _: Sequence[Any]) -> Any:
        return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(FLOAT, floats)), I64)

    return primitive(types.int64(), generate)


pointer = primitive(types.voidptr(types.int64), lambda builder, given: builder.inttoptr(given[0], I8.as_pointer()))
"""The void pointer of an address, for `numba.carray`."""
address = primitive(types.int64(types.voidptr), lambda builder, given: builder.ptrtoint(given[0], I64))
"""The inverse."""
