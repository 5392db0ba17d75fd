"""Device half of `all_reduce` with the norm: a token for each block, which holds its row in registers."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from ..device.exchange import Post
from ..device.norm import inverse_rms, scaled
from ..device.ptx import load_word, opaque, store_word
from ..device.reduce import block_sum
from ..device.vectors import unpack_bf16
from ..order import Dynamic, Output, Static, dependency_wait, release_dependents
from ..skinny import ceil_div
from .cute import Group, launch


@cute.kernel
def _all_reduce_norm(norm: Static, x: Dynamic, out: Output, post: tuple[Any, ...], config: cutlass.Constexpr):
    """post: the fields of its `Post`."""
    release_dependents()
    thread, _, _ = cute.arch.thread_idx()
    t, _, _ = cute.arch.block_idx()
    row, count, warps, own = config.columns // 2, config.threads, config.threads // 32, Post(*post)
    sums = cute.make_tensor(SmemAllocator().allocate_array(Float32, warps), cute.make_layout(warps))
    sent, inside = _words_of(thread, count, row)
    if cutlass.const_expr(config.two_shot):  # this rank adds up its own columns
        places, held = _words_of(thread, count, config.chunk)
        places = [own.rank * config.chunk + place for place in places]
    else:
        places, held = sent, inside
    token = dependency_wait()
    group = Group(config, token, own)
    group.first_trip(x.after(token).iterator, [t * row + place for place in sent], inside)
    weights = [load_word(norm.early().iterator + 2 * place) for place in places]  # while words travel

    pairs = [t * row + place for place in places]
    totals = [group.total(pair, real) for pair, real in zip(pairs, held, strict=True)]
    squares = block_sum(_squares(totals, held), sums, warps)
    if cutlass.const_expr(config.two_shot):
        to = group.exchange.box_of(cutlass.min(thread, config.world - 1))  # a lane for each rank
        group.exchange.send(to, config.second(t), squares.bitcast(Uint32), thread < config.world)
        parts = group.exchange.receive(group.ranks, config.second(t), held[0], relayed=True)
        squares = sum((part.bitcast(Float32) for part in parts), Float32(0.0))
    factor = inverse_rms(squares, config.columns, config.eps)
    target = out.after(token).iterator
    for pair, total, weight, real in zip(pairs, totals, weights, held, strict=True):
        store_word(target + 2 * config.packed(pair), scaled(total, weight, factor), real & (config.owner(pair) == own.rank))
    group.exchange.arrive(config.blocks)  # the block has met for its sum of squares


def _words_of(thread: Any, threads: int, words: int) -> tuple[list[Any], list[Any]]:
    """A thread's of so many words, and which of them there are: past the end it has the last one once more, and neither sends nor
    stores it. That there is one is a predicate even where it could be known.
    """
    places = [opaque(thread + i * threads) for i in range(ceil_div(words, threads))]
    return [cutlass.min(place, words - 1) for place in places], [place < words for place in places]


def _squares(pairs: list[Uint32], held: list[Any]) -> Float32:
    """Sum of the squares of what is held."""
    squares = Float32(0.0)
    for word, real in zip(pairs, held, strict=True):
        even, odd = unpack_bf16(word)
        squares = squares + Float32(select_(real, even * even + odd * odd, Float32(0.0)))
    return squares


def bf16_all_reduce_norm(config: Any, norm: Static, x: Dynamic, out: Output, *args: Any) -> None:
    *post, stream = args
    launch(_all_reduce_norm(norm, x, out, tuple(post), config), config, stream)
