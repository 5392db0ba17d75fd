"""Device half of the mailboxes: send to peers, receive from them, within a bound. `comm/layout.py` has the protocol.

A kernel uses it in this order:

    exchange = Exchange(world, bound_ns, token, post)       # behind the dependency wait: reads the epoch
    exchange.send(to, index, data, inside)                  # any number of times, by any threads
    words = exchange.receive(senders, index, inside)        # any number of times
    exchange.arrive(blocks)                                 # once, behind a barrier of the block: the last block counts up

Counting in is an atomic behind a fence, some microseconds where stores to peers are under way: the block's last thread does it,
when its warp has received what it waits for, or has nothing to receive.

All blocks of a launch that sends and receives must be able to run at once, as a block waits for its counterparts on the other
ranks. One launch may send and the next one receive (`sent`): neither waits for blocks of its own kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx

from ...comm.layout import HEADER, WORD, first_word
from ..order import Dynamic, Ordered, Peers
from .vectors import pack_bf16, unpack_bf16

NAN_PAIR = 0x7FFF7FFF  # two BF16 NaN: what a reader gets that has given up


@dataclass
class Post:
    """The mailbox as kernel arguments: the peers' addresses, the own box, the epoch counter, this rank, words for each sender."""

    peers: Peers
    box: Dynamic
    epoch: Dynamic
    rank: Any
    words: Any


class Exchange:
    """One thread's view of this call's epoch."""

    def __init__(self, world: int, bound_ns: int, token: Ordered, post: Post, sent: bool = False) -> None:
        """`sent`: the launch before sent in this epoch, and counted up; this one receives."""
        self.world, self.bound_ns, self.token, self.post = world, bound_ns, token, post
        self.box = post.box.after(token).iterator.toint()
        self.counter = post.epoch.after(token).iterator
        load = "ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];"
        last = inline_ptx(load, write_only_types=[Int32], read_only_args=[self.counter])
        self.epoch = last if sent else last + 1

    def _word(self, box: Any, sender: Any, index: Any) -> Any:
        """Address of one word in a box."""
        at = first_word(self.world, self.post.words, self.epoch & 1, sender) + index
        return box + HEADER + Int64(at) * WORD

    def box_of(self, rank: Any) -> Any:
        """Address of a rank's box. A load from a table: do it well before sending."""
        return self.post.peers.pointer(self.token, rank, Int32).toint()

    def send(self, box: Any, index: Any, data: Uint32, inside: Boolean) -> None:
        """Store one word into the box at `box`, where `inside` holds."""
        store = "st.relaxed.sys.global.v2.b32 [{$r0}], {{$r1}, {$r2}};"
        inline_ptx(store, read_only_args=[self._word(box, self.post.rank, index), data, self.epoch], predicate=inside)

    def arrive(self, blocks: int) -> None:
        """Count this block in, by its last thread: behind a barrier of the block, as all its threads must have read the epoch."""
        _arrive(self.counter, self.epoch, blocks)

    def receive(self, senders: list[Any], index: Any, inside: Boolean, relayed: bool = False) -> list[Uint32]:
        """The words that `senders` sent at `index`, or at the index of each, in this epoch. Two NaN each, where `inside` fails or
        a rank is lost.

        `relayed`: senders answer only when others have answered them. Such a wait has a quarter more time: whoever waits for the
        rank that is missing names it first, and not a rank that waits itself.
        """
        indices = index if isinstance(index, list) else [index] * len(senders)
        addresses = [self._word(self.box, sender, at) for sender, at in zip(senders, indices, strict=True)]
        bound_ns = self.bound_ns * 5 // 4 if relayed else self.bound_ns
        data = _receive(self, addresses, senders, inside, bound_ns)
        return [data[i] for i in range(len(senders))]


def add_up(words: list[Uint32]) -> Uint32:
    """A word of each rank, in their order: its two BF16 summed in FP32 and rounded once."""
    even, odd = Float32(0.0), Float32(0.0)
    for word in words:
        low, high = unpack_bf16(word)
        even, odd = even + low, odd + high
    return pack_bf16(even, odd)


@cute.jit
def _arrive(counter: Any, epoch: Int32, blocks: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    threads, _, _ = cute.arch.block_dim()
    if thread == threads - 1:
        add = "atom.add.acq_rel.gpu.global.s32 {$w0}, [{$r0}], 1;"
        before = inline_ptx(add, write_only_types=[Int32], read_only_args=[counter + 1])
        if before == blocks - 1:
            store = "st.relaxed.gpu.global.v2.b32 [{$r0}], {{$r1}, {$r2}};"
            inline_ptx(store, read_only_args=[counter, epoch, Int32(0)])


@cute.jit
def _receive(own: Any, addresses: Any, senders: Any, inside: Boolean, bound_ns: cutlass.Constexpr):
    """Poll until every word carries the epoch, or the bound is over, or somebody has declared a rank lost."""
    epoch, box = own.epoch, own.box
    count = cutlass.const_expr(len(addresses))
    data = cute.make_rmem_tensor(count, Uint32)
    seen = cute.make_rmem_tensor(count, Int32)
    for i in cutlass.range_constexpr(count):
        data[i] = Uint32(NAN_PAIR)
        seen[i] = epoch
    if inside:
        start = cute.arch.globaltimer()
        missing = Int32(1)  # 1 + the first sender whose word is not there
        lost = Int32(0)
        while (missing != 0) & (lost == 0):
            missing = Int32(0)
            for i in cutlass.range_constexpr(count):
                load = "ld.relaxed.sys.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];"
                word = inline_ptx(load, write_only_types=[Uint32, Int32], read_only_args=[addresses[i]])
                data[i] = word[0]
                seen[i] = word[1]
            lost = inline_ptx("ld.relaxed.sys.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[box])
            for i in cutlass.range_constexpr(count - 1, -1, -1):
                if seen[i] != epoch:
                    missing = Int32(senders[i]) + 1
            if (missing != 0) & (lost == 0) & (cute.arch.globaltimer() - start > bound_ns):
                lost = missing
                for r in cutlass.range(own.world, unroll=1):
                    peer = Exchange.box_of(own, r)  # read here, so that a word that is there waits for nothing
                    inline_ptx("red.relaxed.sys.global.max.s32 [{$r0}], {$r1};", read_only_args=[peer, missing])
        if lost != 0:
            for i in cutlass.range_constexpr(count):
                data[i] = Uint32(NAN_PAIR)
    return data
