"""Wide loads and stores, and BF16 packing: the pieces every memory-bound kernel here is made of.

A 16-byte access is the widest a thread has on all three architectures. It travels as four 32-bit words; a word holds two BF16,
the even element in the low half. FP32 is BF16 with 16 more mantissa bits, so unpacking is a shift or a mask and costs no
conversion.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

Words = tuple[Uint32, Uint32, Uint32, Uint32]


def load_words(pointer: Any) -> Words:
    """16 bytes from global memory, through L1. `pointer` is 16-byte aligned."""
    return cute.arch.inline_ptx(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Uint32] * 4, read_only_args=[pointer]
    )


def load_words_streaming(pointer: Any) -> Words:
    """16 bytes that are read once: kept out of L1 and fetched with the 256 bytes around them.

    Not `ld.global.nc`: the assembler moves a non-coherent load across `griddepcontrol.wait`, and so undoes a weight stream that
    was to start before it (seen on sm_90a). A plain load stays where it was written.
    """
    return cute.arch.inline_ptx(
        "ld.global.L1::no_allocate.L2::256B.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[pointer],
    )


def store_words(pointer: Any, words: Words) -> None:
    """16 bytes to global memory. `pointer` is 16-byte aligned."""
    cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[pointer, *words])


def prefetch_l2(pointer: Any) -> None:
    """Ask for the line at `pointer` to come into L2. Allowed for static memory at any time; nothing is read into the kernel."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[pointer])


def unpack_bf16(word: Uint32) -> tuple[Float32, Float32]:
    """The two BF16 of a word as FP32, exactly: (even, odd)."""
    return (word << 16).bitcast(Float32), (word & Uint32(0xFFFF0000)).bitcast(Float32)


@dsl_user_op
def pack_bf16(even: Float32, odd: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two FP32 rounded to nearest-even BF16, in one word."""
    operands = [Float32(odd).ir_value(loc=loc, ip=ip), Float32(even).ir_value(loc=loc, ip=ip)]
    return Uint32(
        llvm.inline_asm(T.i32(), operands, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", has_side_effects=False, loc=loc, ip=ip)
    )


def dot_words(a: Words, b: Words, total: Float32) -> Float32:
    """total + sum of the eight products of two 16-byte BF16 vectors, in FP32."""
    for x, y in zip(a, b, strict=True):
        (x0, x1), (y0, y1) = unpack_bf16(x), unpack_bf16(y)
        total = total + x0 * y0
        total = total + x1 * y1
    return total


def lane_and_warp() -> tuple[Int32, Int32]:
    """Lane and warp of this thread in a block of one dimension."""
    thread, _, _ = cute.arch.thread_idx()
    return thread % 32, thread // 32
