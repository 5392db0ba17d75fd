"""Who may read what, and when: the order of memory under programmatic dependent launch, as types of the trace.

Under programmatic dependent launch (PDL) a kernel starts while the kernel before it still runs. Reading a weight then is the
gain; reading an activation then is a race that shows up once in a million steps. So a kernel never receives a bare tensor. Each
parameter arrives wrapped in the type of its access, and only that type's door opens:

    w.early()        `Static`: loaded weights and tables, never written while serving. May be read any time.
    x.after(token)   `Dynamic`: activations, caches, states, mailboxes. Needs an `Ordered` token, which only
                     `dependency_wait()` or an acquire of a mailbox hands out.
    s.early()[i]     `Settled`: written so long ago that it is finished, though this thread has not waited yet (see below). Read
                     at any time, from L2; written, and read by other means, with a token.
    y.after(token)   `Output`: needs the token as well: the previous kernel may still read the buffer that is written here.
    f.acquire(token, i), f.release(token, i, value)
                     `Signal`: flags between ranks, strong at system scope.
    p.pointer(token, rank, type)
                     `Peers`: a table of addresses. The table is static, what it points to is a peer's mailbox and is not.

A wrong door is a TypeError while tracing, so it does not compile. What types cannot see, a wait that only some warps execute or a
compiler that moves a load, is checked on PTX and SASS by `ops/verify.py`.

Further rules of PDL, for the author of a kernel:
  - every thread that touches dynamic memory executes `dependency_wait()` itself: the wait orders the thread that executes it;
  - every kernel executes the wait before it ends, even one with nothing to wait for: kernel n+1 waits for n only, and sees the
    writes of n-1 because n has waited for n-1;
  - what is settled. Kernel n+1 does not start before every block of n has released it. Where n releases behind its own wait
    (`KernelSpec.settles`, which the order checker holds it to), all that was written in front of n is finished when n+1 starts.
    So is, behind an ordinary launch, all that was written in front of that one, and in a graph what was written before it. A
    parameter may be `Settled` where such a launch always stands between its last writer and its reader: the experts that w2
    reads are chosen in front of w13, which settles; slots and states of a step are written in front of its embedding; closed
    blocks that AttnRes mixes are written in front of o_proj or of the tail, which settle. L1 may still hold what was there
    before, so these reads pass it by. To settle costs nothing where a kernel runs on for long behind its wait.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Uint16, Uint32


class Ordered:
    """Proof that the earlier kernels' writes are visible to this thread.

    Made by `dependency_wait` and by acquires, by nothing else.
    """

    __slots__ = ("origin",)
    _key = object()

    def __init__(self, key: object, origin: str) -> None:
        if key is not Ordered._key:
            raise TypeError("An Ordered token is handed out by dependency_wait() or by an acquire; it cannot be made by hand.")
        self.origin = origin


def dependency_wait() -> Ordered:
    """Emit `griddepcontrol.wait`: returns when every kernel this one depends on has finished and its writes are visible."""
    cute.arch.griddepcontrol_wait()
    return Ordered(Ordered._key, "griddepcontrol.wait")


def release_dependents() -> None:
    """Emit `griddepcontrol.launch_dependents`: the next kernel may start once every block has called this or ended.

    It may then run up to its own `dependency_wait`, so early is safe, and good once this kernel's own loads are on their way.
    """
    cute.arch.griddepcontrol_launch_dependents()


class _Wrapped:
    """A tensor inside another object. Shape, type and layout are free to read."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __repr__(self) -> str:  # becomes part of the kernel's symbol, so it holds no address
        return type(self).__name__

    @property
    def shape(self) -> Any:
        return self._tensor.shape

    @property
    def layout(self) -> Any:
        return self._tensor.layout

    @property
    def element_type(self) -> Any:
        return self._tensor.element_type

    # The two methods by which the DSL carries an object across a kernel launch or a dynamic branch as the values inside it.
    def __extract_mlir_values__(self) -> list[Any]:
        return self._tensor.__extract_mlir_values__()

    def __new_from_mlir_values__(self, values: list[Any]) -> _Wrapped:
        return type(self)(self._tensor.__new_from_mlir_values__(values))


class Guarded(_Wrapped):
    """A tensor behind a door: its memory is not free to read."""

    _alternative = ""

    def __init__(self, tensor: Any) -> None:
        if isinstance(tensor, Guarded):
            raise TypeError(
                f"Expected a plain tensor, found one that is already {type(tensor).__name__}; its access is decided once."
            )
        super().__init__(tensor)

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(f"A {type(self).__name__} tensor is not read or written directly: {self._alternative}.")

    __setitem__ = __getitem__


class Static(Guarded):
    """A weight or table that nothing writes while the model serves."""

    _alternative = "use .early()"

    def early(self) -> Any:
        """The tensor, readable at any time, also before the dependency wait."""
        return self._tensor

    def after(self, token: Ordered) -> Any:
        raise TypeError("A Static tensor needs no token: use .early(). If another kernel writes it, declare it Dynamic.")


class Dynamic(Guarded):
    """A tensor that another kernel writes: activation, cache, recurrent state or mailbox."""

    _alternative = "use .after(token) with the token of dependency_wait()"

    def early(self) -> Any:
        raise TypeError(f"A {type(self).__name__} tensor cannot be read before the dependency wait: use .after(token).")

    def after(self, token: Ordered) -> Any:
        """The tensor, for loads and stores that the program places behind the wait that made `token`."""
        if not isinstance(token, Ordered):
            raise TypeError(f"Expected the Ordered token of dependency_wait() or of an acquire, found {type(token).__name__}.")
        return self._tensor


class Settled(Dynamic):
    """A tensor whose last writer has finished when this kernel starts, by a launch in between that lets nothing pass."""

    _alternative = "use .early()[index], or .after(token)"

    def early(self) -> FromL2:
        """The tensor, to be read from L2 at any time."""
        return FromL2(self._tensor)


class FromL2(_Wrapped):
    """A tensor whose elements, of 16 or 32 bits, are read by loads that pass L1 by. `iterator`: for copies into shared memory
    that do so, too; that nothing else reads there the order checker sees."""

    @property
    def stride(self) -> Any:
        return self._tensor.stride

    @property
    def iterator(self) -> Any:
        return self._tensor.iterator

    def __getitem__(self, index: Any) -> Any:
        dtype = self.element_type
        if dtype.width not in (16, 32):
            raise TypeError(f"Expected elements of 16 or 32 bits, found {dtype.__name__}: copy it into shared memory.")
        word, bits = (Uint32, 32) if dtype.width == 32 else (Uint16, 16)
        pointer = self.iterator + cute.crd2idx(index, self.layout)
        load = f"ld.relaxed.gpu.global.b{bits} {{$w0}}, [{{$r0}}];"
        return cute.arch.inline_ptx(load, write_only_types=[word], read_only_args=[pointer]).bitcast(dtype)


class Output(Dynamic):
    """A tensor this kernel writes. Writing early would race with the kernel that still reads the buffer's previous content."""


class Signal(Dynamic):
    """Flags (int32) by which ranks order their mailboxes."""

    _alternative = "use .acquire(token, index) or .release(token, index, value)"

    def acquire(self, token: Ordered, index: Any) -> Int32:
        """The flag; what its writer wrote before releasing it may be read afterwards."""
        pointer = self.after(token).iterator + index
        return cute.arch.inline_ptx(
            "ld.acquire.sys.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[pointer]
        )

    def release(self, token: Ordered, index: Any, value: Any) -> None:
        """Set the flag; whoever acquires it sees everything this thread wrote before."""
        pointer = self.after(token).iterator + index
        cute.arch.inline_ptx("st.release.sys.global.b32 [{$r0}], {$r1};", read_only_args=[pointer, Int32(value)])


class Peers(Guarded):
    """A table of addresses (int64), one for each rank, made once; behind each lies memory that other ranks write."""

    _alternative = "use .pointer(token, rank, type)"

    def pointer(self, token: Ordered, rank: Any, dtype: Any, align: int = 16) -> Any:
        """A pointer into rank's memory, for accesses that the program places behind the wait that made `token`."""
        if not isinstance(token, Ordered):
            raise TypeError(f"Expected the Ordered token of dependency_wait() or of an acquire, found {type(token).__name__}.")
        return cute.make_ptr(dtype, self._tensor[rank], cute.AddressSpace.gmem, assumed_align=align)
