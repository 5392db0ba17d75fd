"""The few instructions that the kernels need word for word: streaming loads, asynchronous copies, the tensor-core step, predicated stores.

Everything here runs while a kernel is traced and emits one instruction or a handful. Registers hold pairs of bf16 as one `Uint32`.
Pointers are CuTe pointers: `tensor.iterator + elements`. Nothing here decides whether memory may be read yet: the caller got its pointer
through a door of `ops/order.py`.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute.arch import inline_ptx

Words = tuple[Any, Any, Any, Any]  # 16 bytes in four registers


def load_weight(pointer: Any) -> Words:
    """16 bytes of a weight: read once, so the first-level cache is passed by. The pointer must not be written while the kernel runs."""
    return inline_ptx(
        "ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[pointer],
    )


def load_global(pointer: Any) -> Words:
    """16 bytes of memory that other kernels write."""
    return inline_ptx(
        "ld.global.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Uint32] * 4, read_only_args=[pointer]
    )


def load_shared(pointer: Any) -> Words:
    """16 bytes of this block's shared memory."""
    return inline_ptx(
        "ld.shared.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Uint32] * 4, read_only_args=[pointer]
    )


def store_shared(pointer: Any, words: Words, predicate: Boolean | None = None) -> None:
    """16 bytes to this block's shared memory."""
    inline_ptx("st.shared.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[pointer, *words], predicate=predicate)


def store_global(pointer: Any, words: Words, predicate: Boolean | None = None) -> None:
    """16 bytes to global memory."""
    inline_ptx("st.global.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[pointer, *words], predicate=predicate)


def store_bf16(pointer: Any, value: Any, predicate: Boolean) -> None:
    """One fp32 value rounded to bf16 (nearest even), where the predicate holds."""
    inline_ptx(
        "{ .reg .b16 h; cvt.rn.bf16.f32 h, {$r1}; st.global.b16 [{$r0}], h; }" if predicate is None else _STORE_BF16,
        read_only_args=[pointer, value] + ([] if predicate is None else [Int32(predicate)]),
    )


_STORE_BF16 = "{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, {$r2}, 0; cvt.rn.bf16.f32 h, {$r1}; @p st.global.b16 [{$r0}], h; }"


def store_f32(pointer: Any, value: Any, predicate: Boolean) -> None:
    """One fp32 value, where the predicate holds."""
    inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[pointer, value], predicate=predicate)


def copy_async(target: Any, source: Any, wanted: Any, predicate: Boolean | None = None) -> None:
    """Start copying 16 bytes from global to shared memory; the last `16 - wanted` bytes become zero (`wanted` is 0 or 16)."""
    inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[target, source, wanted], predicate=predicate
    )


def mma_bf16(acc: list[Any], a: Words, b0: Any, b1: Any) -> None:
    """acc[16x8] += a[16x16] b[16x8], one warp, bf16 in and fp32 out; `acc` holds this lane's four values and is replaced in place."""
    acc[:] = inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$rw0}, {$rw1}, {$rw2}, {$rw3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$rw0}, {$rw1}, {$rw2}, {$rw3}};",
        read_only_args=[*a, b0, b1],
        read_write_args=acc,
    )


def low_bf16(word: Any) -> Any:
    """The fp32 value of the even element of a pair."""
    return inline_ptx("shl.b32 {$w0}, {$r0}, 16;", write_only_types=[Float32], read_only_args=[word])


def high_bf16(word: Any) -> Any:
    """The fp32 value of the odd element of a pair."""
    return inline_ptx("and.b32 {$w0}, {$r0}, 0xffff0000;", write_only_types=[Float32], read_only_args=[word])


def unpack(words: Words) -> list[Any]:
    """Eight fp32 values of 16 bytes of bf16, in memory order."""
    return [half(word) for word in words for half in (low_bf16, high_bf16)]


def pack(values: list[Any]) -> Words:
    """16 bytes of bf16 (round to nearest even) from eight fp32 values."""
    return tuple(
        inline_ptx("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high])
        for low, high in zip(values[0::2], values[1::2], strict=True)
    )


def peer_f32(pointer: Any, rank: Any) -> Any:
    """One fp32 value at the same shared-memory address in block `rank` of this cluster."""
    return inline_ptx(
        "{ .reg .b32 peer; mapa.shared::cluster.u32 peer, {$r0}, {$r1}; ld.shared::cluster.f32 {$w0}, [peer]; }",
        write_only_types=[Float32],
        read_only_args=[pointer.toint(), rank],
    )


def cluster_barrier() -> None:
    """All threads of the cluster meet; shared memory written before is visible to every block of it after."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) in fp32."""
    return Float32(1.0) / (Float32(1.0) + cute.math.exp(-x))
