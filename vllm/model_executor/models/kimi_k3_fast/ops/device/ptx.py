"""Single instructions of the tensor-core and shared-memory kernels, each word for word: the step, asynchronous copies,
predicated stores.

All of it runs while a kernel is traced. Pointers are CuTe pointers (`tensor.iterator + elements`); whether memory may be read
yet was decided at the door of `ops/order.py` through which the caller got them. `vectors.py` has the plain wide loads and
BF16 packing.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint16, Uint32
from cutlass.cute.arch import inline_ptx

from .vectors import Words


def load_shared(pointer: Any) -> Words:
    """16 bytes of this block's shared memory."""
    return inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Uint32] * 4, read_only_args=[pointer]
    )


def store_shared(pointer: Any, words: Words, predicate: Boolean | None = None) -> None:
    """16 bytes to this block's shared memory, where the predicate holds."""
    inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[pointer, *words], predicate=predicate)


def store_global(pointer: Any, words: Words, predicate: Boolean) -> None:
    """16 bytes to global memory, where the predicate holds."""
    inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[pointer, *words], predicate=predicate)


def load_word(pointer: Any) -> Uint32:
    """4 bytes of global memory."""
    return inline_ptx("ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[pointer])


def store_word(pointer: Any, word: Uint32, predicate: Boolean) -> None:
    """4 bytes to global memory, where the predicate holds."""
    inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[pointer, word], predicate=predicate)


def store_shared_f32(pointer: Any, value: Any, predicate: Boolean | None = None) -> None:
    """One fp32 value to this block's shared memory, where the predicate holds."""
    inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[pointer, value], predicate=predicate)


def store_bf16(pointer: Any, value: Any, predicate: Boolean) -> None:
    """One fp32 value rounded to bf16 (nearest even) to global memory, where the predicate holds."""
    inline_ptx("st.global.b16 [{$r0}], {$r1};", read_only_args=[pointer, value.to(BFloat16).bitcast(Uint16)], predicate=predicate)


def store_f32(pointer: Any, value: Any, predicate: Boolean) -> None:
    """One fp32 value to global memory, where the predicate holds."""
    inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[pointer, value], predicate=predicate)


def copy_async(target: Any, source: Any, wanted: Any, predicate: Boolean | None = None) -> None:
    """Start copying 16 bytes from global to shared memory. `wanted` is 16, or 0 to write 16 zeros and read nothing."""
    inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[target, source, wanted], predicate=predicate
    )


def stream_async(target: Any, source: Any, predicate: Boolean | None = None) -> None:
    """Start copying 16 bytes that are read once from global to shared memory; L2 fetches the 256 bytes around them."""
    inline_ptx("cp.async.cg.shared.global.L2::256B [{$r0}], [{$r1}], 16;", read_only_args=[target, source], predicate=predicate)


def before_copies() -> None:
    """What this thread has read of its block's shared memory is read before any bulk copy that learns of it by an mbarrier writes
    there. Such copies go another way (the async proxy), on which an arrival alone orders nothing: without this the assembler lets
    the arrival go while loads are under way.
    """
    inline_ptx("fence.proxy.async.shared::cta;")


def evict_first() -> Int64:
    """The L2 policy for what is read once: it is the first to go."""
    return inline_ptx("createpolicy.fractional.L2::evict_first.b64 {$w0}, 1.0;", write_only_types=[Int64], read_only_args=[])


def copy_bulk(target: Any, source: Any, count: Any, barrier: Any, predicate: Boolean, policy: Int64 | None = None) -> None:
    """Start copying `count` bytes, a multiple of 16, from global to shared memory, where the predicate holds; they count on the
    barrier. Both ends are 16-byte aligned.
    """
    hint, last = ("", "") if policy is None else (".L2::cache_hint", ", {$r4}")
    name = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    inline_ptx(
        f"{name}{hint} [{{$r0}}], [{{$r1}}], {{$r2}}, [{{$r3}}]{last};",
        read_only_args=[target, source, Int32(count), barrier, *([] if policy is None else [policy])],
        predicate=opaque(Int32(predicate)) != 0,  # a predicate must be a register, whatever is known about it
    )


def multiply_bf16(a: Any, b: Any) -> Uint32:
    """Products of two bf16 pairs, each rounded to nearest even."""
    return inline_ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def prefetch_bytes(source: Any, count: Any, predicate: Boolean) -> None:
    """Ask for `count` bytes, a multiple of 16, to come into L2, where the predicate holds. Reads nothing into the kernel."""
    inline_ptx("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[source, Int32(count)], predicate=predicate)


def mma_bf16(acc: list[Any], a: Words, b0: Any, b1: Any) -> None:
    """acc[16x8] += a[16x16] b[16x8] by one warp, bf16 in, fp32 out. `acc` holds this lane's four values and is replaced in
    place.
    """
    acc[:] = inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, b0, b1, *acc],
    )


def peer_f32(pointer: Any, rank: Any) -> Float32:
    """One fp32 value at this shared-memory address in block `rank` of the cluster."""
    return inline_ptx(
        "{ .reg .b32 peer; mapa.shared::cluster.u32 peer, {$r0}, {$r1}; ld.shared::cluster.f32 {$w0}, [peer]; }",
        write_only_types=[Float32],
        read_only_args=[pointer.toint(), Int32(rank)],
    )


def cluster_barrier() -> None:
    """All threads of the cluster meet; shared memory written before is visible to every block of it after."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def opaque(value: Int32) -> Int32:
    """The same number, of which the compiler knows nothing."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def opaque_address(address: Int64) -> Int64:
    """The same address, of which the compiler knows nothing: a choice among parameters stays one of values in registers, which
    the order checker can follow, and does not become a load at a computed place among the parameters.
    """
    return inline_ptx("mov.b64 {$w0}, {$r0};", write_only_types=[Int64], read_only_args=[address])


def sigmoid(x: Any) -> Float32:
    """1 / (1 + exp(-x)) in fp32; saturates correctly at both ends."""
    return Float32(1.0) / (Float32(1.0) + cute.math.exp(-x))


def push_f32(pointer: Any, value: Any, rank: Any, predicate: Boolean) -> None:
    """Store one fp32 value at this shared-memory address in block `rank` of the cluster, where the predicate holds."""
    peer = inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[pointer.toint(), Int32(rank)]
    )
    inline_ptx("st.shared::cluster.f32 [{$r0}], {$r1};", read_only_args=[peer, value], predicate=predicate)


def send_f32(pointer: Any, value: Any, barrier: Any, rank: Any, predicate: Boolean) -> None:
    """Store one fp32 value at this shared-memory address in block `rank` of the cluster and count its four bytes on the mbarrier
    at `barrier` there, where the predicate holds. Who waits for that barrier sees the value: no cluster barrier is needed, whose
    release would wait for the block's stores to global memory as well."""
    place, counter = (cute.arch.map_dsmem_ptr(p, Int32(rank)).toint() for p in (pointer, barrier))
    inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [{$r0}], {$r1}, [{$r2}];",
        read_only_args=[place, Float32(value), counter],
        predicate=predicate,
    )


def warp_max_u32(value: Any) -> Uint32:
    """Largest of a warp's unsigned values, in every lane."""
    return inline_ptx("redux.sync.max.u32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Uint32], read_only_args=[value])
