"""Kernels for the order checker: right ones, and mutants that the types of `ops/order.py` were bent to let through.

`leak` takes the tensor out of its wrapper the way a careless author might, so that the checker, not the type, has to catch it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from vllm.model_executor.models.kimi_k3_fast.ops.build import (
    ACTIVATION,
    MAILBOX,
    OUTPUT,
    SETTLED,
    SIGNAL,
    STATIC,
    Access,
    KernelSpec,
    Param,
)
from vllm.model_executor.models.kimi_k3_fast.ops.device.vectors import prefetch_l2
from vllm.model_executor.models.kimi_k3_fast.ops.order import (
    Dynamic,
    Output,
    Peers,
    Settled,
    Signal,
    Static,
    dependency_wait,
    release_dependents,
)

ROWS = 256


def leak(guarded: Any) -> Any:
    return guarded._tensor


# -- weights and activations -----------------------------------------------------------------------------------------------------


@cute.kernel
def _good(w: Static, x: Dynamic, y: Output):
    i, _, _ = cute.arch.thread_idx()
    weight = w.early()[i]
    token = dependency_wait()
    y.after(token)[i] = weight * x.after(token)[i]


@cute.kernel
def _divides(w: Static, x: Dynamic, y: Output):
    """Divisions and a root are subroutines in SASS; one is called before the wait and again behind it."""
    i, _, _ = cute.arch.thread_idx()
    quotient = w.early()[i] / w.early()[0]
    token = dependency_wait()
    y.after(token)[i] = quotient / x.after(token)[i] + cute.math.sqrt(quotient)


@cute.kernel
def _hoisted(w: Static, x: Dynamic, y: Output):
    i, _, _ = cute.arch.thread_idx()
    value = leak(x)[i]
    token = dependency_wait()
    y.after(token)[i] = w.early()[i] * value


@cute.kernel
def _one_role(w: Static, x: Dynamic, y: Output):
    i, _, _ = cute.arch.thread_idx()
    if i < 32:
        token = dependency_wait()
        y.after(token)[i] = w.early()[i] * x.after(token)[i]
    else:  # a role that forgot to wait
        leak(y)[i] = w.early()[i] + leak(x)[i]


@cute.kernel
def _waits_in_a_branch(w: Static, x: Dynamic, y: Output):
    i, _, _ = cute.arch.thread_idx()
    if i < 32:
        dependency_wait()
    leak(y)[i] = w.early()[i] * leak(x)[i]


@cute.kernel
def _waits_in_a_loop(w: Static, x: Dynamic, y: Output):
    i, _, _ = cute.arch.thread_idx()
    for j in cutlass.range(i, unroll=1):
        leak(y)[j] = leak(x)[j]  # in the first turn nothing has been waited for
        dependency_wait()


@cute.kernel
def _early_output(w: Static, x: Dynamic, y: Output):
    i, _, _ = cute.arch.thread_idx()
    leak(y)[i] = w.early()[i]
    token = dependency_wait()
    y.after(token)[i] = x.after(token)[i]


@cute.kernel
def _never_waits(w: Static, x: Dynamic, y: Output):
    i, _, _ = cute.arch.thread_idx()
    prefetch_l2(w.early().iterator + i)


@cute.kernel
def _writes_a_weight(w: Static, x: Dynamic, y: Output):
    i, _, _ = cute.arch.thread_idx()
    token = dependency_wait()
    w.early()[i] = x.after(token)[i]


@cute.kernel
def _unfollowable(w: Static, x: Dynamic, y: Output):
    """An address read from memory that nobody declared to hold addresses."""
    i, _, _ = cute.arch.thread_idx()
    token = dependency_wait()
    words = cute.recast_tensor(x.after(token), cutlass.Int64)
    target = cute.make_ptr(Float32, words[i // 2], cute.AddressSpace.gmem, assumed_align=4)
    y.after(token)[i] = cute.make_tensor(target, cute.make_layout(1))[0]


@cute.kernel
def _non_coherent(w: Static, x: Dynamic, y: Output):
    i, _, _ = cute.arch.thread_idx()
    token = dependency_wait()
    pointer = x.after(token).iterator + i
    value = cute.arch.inline_ptx("ld.global.nc.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[pointer])
    y.after(token)[i] = value


@cute.kernel
def _chosen_pointer(w: Static, x: Dynamic, y: Output):
    """Before the wait, a load that goes to the weight or to the activation, as a run-time value decides."""
    i, _, _ = cute.arch.thread_idx()
    address = w.early().iterator.toint()
    if i > 7:
        address = leak(x).iterator.toint()
    value = cute.make_tensor(cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(ROWS))[i]
    token = dependency_wait()
    y.after(token)[i] = value


# -- what is settled -------------------------------------------------------------------------------------------------------------


@cute.kernel
def _reads_settled(s: Settled, x: Dynamic, y: Output):
    """Element by element and by a copy into shared memory, before the wait; behind it by any load."""
    i, _, _ = cute.arch.thread_idx()
    box = cute.arch.alloc_smem(Float32, ROWS)
    value = s.early()[i]
    copy = "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;"
    cute.arch.inline_ptx(copy, read_only_args=[box + i // 4 * 4, s.early().iterator + i // 4 * 4])
    cute.arch.cp_async_commit_group()
    token = dependency_wait()
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    y.after(token)[i] = value + s.after(token)[i] + x.after(token)[i] + cute.make_tensor(box, cute.make_layout(ROWS))[i]


@cute.kernel
def _settled_from_l1(s: Settled, x: Dynamic, y: Output):
    i, _, _ = cute.arch.thread_idx()
    value = leak(s)[i]
    token = dependency_wait()
    y.after(token)[i] = value * x.after(token)[i]


@cute.kernel
def _settled_written_early(s: Settled, x: Dynamic, y: Output):
    i, _, _ = cute.arch.thread_idx()
    leak(s)[i] = s.early()[i] + Float32(1.0)
    token = dependency_wait()
    y.after(token)[i] = x.after(token)[i]


@cute.kernel
def _settles(s: Settled, x: Dynamic, y: Output):
    i, _, _ = cute.arch.thread_idx()
    token = dependency_wait()
    release_dependents()
    y.after(token)[i] = x.after(token)[i]


@cute.kernel
def _says_it_settles(s: Settled, x: Dynamic, y: Output):
    i, _, _ = cute.arch.thread_idx()
    if i < 32:
        release_dependents()
    token = dependency_wait()
    y.after(token)[i] = x.after(token)[i]


# -- mailboxes -------------------------------------------------------------------------------------------------------------------


@cute.kernel
def _receive(signal: Signal, box: Dynamic, y: Output, weakened: cutlass.Constexpr):
    """Thread r waits for rank r's flag; behind the barrier every thread reads the mailbox."""
    i, _, _ = cute.arch.thread_idx()
    token = dependency_wait()
    if i < 4:
        flag = Int32(0)
        while flag == 0:
            if cutlass.const_expr(weakened):
                pointer = leak(signal).iterator + i
                load = "ld.relaxed.sys.global.b32 {$w0}, [{$r0}];"
                flag = cute.arch.inline_ptx(load, write_only_types=[Int32], read_only_args=[pointer])
            else:
                flag = signal.acquire(token, i)
    cute.arch.sync_threads()
    y.after(token)[i] = box.after(token)[i]


@cute.kernel
def _send(peers: Peers, signals: Peers, x: Dynamic, y: Output, weakened: cutlass.Constexpr):
    """Every thread pushes its value to rank 1; behind the barrier one thread raises the flag there."""
    i, _, _ = cute.arch.thread_idx()
    token = dependency_wait()
    box = cute.make_tensor(peers.pointer(token, 1, Float32), cute.make_layout(ROWS))
    box[i] = x.after(token)[i]
    cute.arch.sync_threads()
    if i == 0:
        flag = signals.pointer(token, 1, Int32, align=4)
        if cutlass.const_expr(weakened):
            cute.arch.inline_ptx("st.relaxed.sys.global.b32 [{$r0}], {$r1};", read_only_args=[flag, Int32(1)])
        else:
            cute.arch.inline_ptx("st.release.sys.global.b32 [{$r0}], {$r1};", read_only_args=[flag, Int32(1)])


def _launch(kernel: Any) -> Any:
    def entry(config: tuple[Any, ...], *args: Any) -> None:
        *tensors, stream = args
        kernel(*tensors, *config).launch(grid=[1, 1, 1], block=[ROWS, 1, 1], stream=stream, use_pdl=True)

    return entry


def _spec(kernel: Any, params: tuple[Param, ...], *config: Any) -> KernelSpec:
    name = kernel.__name__.lstrip("_") + "".join("_weakened" if c else "" for c in config)
    return KernelSpec(name, "order", config, _launch(kernel), params)


def _plain(kernel: Any, first: tuple[str, Access] = ("w", STATIC)) -> KernelSpec:
    accesses = (first, ("x", ACTIVATION), ("y", OUTPUT))
    return _spec(kernel, tuple(Param(name, "f32", (ROWS,), access) for name, access in accesses))


def _settled(kernel: Any, settles: bool = False) -> KernelSpec:
    return replace(_plain(kernel, ("s", SETTLED)), settles=settles)


def _receiver(weakened: bool) -> KernelSpec:
    params = (Param("signal", "i32", (4,), SIGNAL), Param("box", "f32", (ROWS,), MAILBOX), Param("y", "f32", (ROWS,), OUTPUT))
    return _spec(_receive, params, weakened)


def _sender(weakened: bool) -> KernelSpec:
    tables = (Param("peers", "i64", (2,), STATIC, points_to=MAILBOX), Param("signals", "i64", (2,), STATIC, points_to=SIGNAL))
    params = (*tables, Param("x", "f32", (ROWS,), ACTIVATION), Param("y", "f32", (ROWS,), OUTPUT))
    return _spec(_send, params, weakened)


RIGHT = [
    _plain(_good),
    _plain(_divides),
    _receiver(False),
    _sender(False),
    _settled(_reads_settled),
    _settled(_settles, settles=True),
]

# Each mutant, with words of the finding that has to name it.
MUTANTS = [
    (_plain(_hoisted), "load of ACTIVATION before the dependency wait"),
    (_plain(_one_role), "load of ACTIVATION before the dependency wait"),
    (_plain(_waits_in_a_branch), "load of ACTIVATION before the dependency wait"),
    (_plain(_waits_in_a_loop), "load of ACTIVATION before the dependency wait"),
    (_plain(_early_output), "store of OUTPUT before the dependency wait"),
    (_plain(_never_waits), "no thread surely executes the dependency wait"),
    (_plain(_writes_a_weight), "a static parameter is never written"),
    (_plain(_unfollowable), "cannot be followed to a kernel parameter"),
    (_plain(_non_coherent), "by a non-coherent load"),
    (_plain(_chosen_pointer), "load of ACTIVATION before the dependency wait"),
    (_receiver(True), "load of MAILBOX without an acquire"),
    (_sender(True), "without release"),
    (_settled(_settled_from_l1), "by a load that may find in L1 what was there before"),
    (_settled(_settled_written_early), "store of SETTLED before the dependency wait"),
    (_settled(_says_it_settles, settles=True), "releases its dependents before the dependency wait"),
]
