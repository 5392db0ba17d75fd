"""The calls of the C++ kernels: the signatures and meaning of the PyTorch forms, with every tensor checked before its address is
taken.

They differ from the PyTorch forms in rounding less: sums and what passes from one part of an operator to the next stay in fp32.
Padded rows (KDA slots <= 0, negative cache slots or expert ids) write no state. A wrong tensor, size or index is a ValueError
that says what was expected and found; nothing was written then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...reasons import Refusal
from ..experts.torch_form import GROUP
from ..experts.torch_form import Weights as ExpertWeights
from ..kda.torch_form import Weights as KdaWeights
from . import library

TYPES = {torch.float32: 0, torch.bfloat16: 1}
ENTRY_BYTES = {torch.int32: 4, torch.int64: 8}


def _wrong(op: str, name: str, expected: str, x: Tensor) -> NoReturn:
    found = f"{tuple(x.shape)} {x.dtype} on {x.device}, strides {x.stride()}"
    raise ValueError(f"{op}: expected {name} {expected}, found {found}")


def _plain(op: str, name: str, x: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """The address of a contiguous tensor of this shape."""
    if x.shape != shape or x.dtype is not dtype or not x.is_cpu or not x.is_contiguous():
        _wrong(op, name, f"{shape} {dtype}, contiguous", x)
    return x.data_ptr()


def _rows(op: str, name: str, x: Tensor, dtype: torch.dtype, columns: int, rows: int | None = None) -> tuple[int, int]:
    """The address and the distance of rows, each of them contiguous."""
    if x.dim() != 2 or x.shape[1] != columns or x.dtype is not dtype or not x.is_cpu or (x.stride(1) != 1 and columns > 1):
        _wrong(op, name, f"[T, {columns}] {dtype} with contiguous rows", x)
    if rows is not None and x.shape[0] != rows:
        _wrong(op, name, f"[{rows}, {columns}]", x)
    return x.data_ptr(), x.stride(0) if x.shape[0] > 1 else columns


def _index(op: str, name: str, x: Tensor, count: int) -> tuple[int, int, int]:
    """Address, bytes of an entry and distance of entries of an index vector, which may be a column of a table."""
    if x.shape != (count,) or x.dtype not in ENTRY_BYTES or not x.is_cpu:
        _wrong(op, name, f"({count},) int32 or int64", x)
    return x.data_ptr(), ENTRY_BYTES[x.dtype], x.stride(0)


def _type(op: str, name: str, x: Tensor) -> int:
    if x.dtype not in TYPES:
        _wrong(op, name, "float32 or bfloat16", x)
    return TYPES[x.dtype]


@dataclass
class Buffers:
    """Memory between the calls of a recorded step, for up to `rows` tokens: made once, shared by the recordings of every size.

    What an operator returns in one layer is read in that layer or in the next, so that two sets serve all layers in turn.
    """

    rows: int
    made: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    layer: int = 0
    place: int = 0

    def take(self, tokens: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        key = (self.layer % 2, self.place, shape, dtype)
        self.place += 1
        if key not in self.made:
            self.made[key] = torch.empty(self.rows, *shape, dtype=dtype)
        return self.made[key][:tokens]


@dataclass
class Tape:
    """A step as it was run once: its calls in order, each with the arguments it had. `play` makes the same calls again: nothing
    is checked, looked up or allocated for them in Python, and what they read and write lies where it lay.
    """

    library: ctypes.CDLL
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)

    def play(self) -> None:
        """Raises ValueError where an index does not fit, as the call did that was recorded."""
        for function, arguments in self.calls:
            if function(*arguments):
                library.check(self.library, 1)


class CpuForms:
    """The operators on one instruction set ("auto": the best that the machine has). Raises RuntimeError without a library.

    The level belongs to the process, as the machine does: a later object with another level changes it for all. The number of
    threads is torch's at each call, so that the threads that vLLM bound are those that work.
    """

    _tape: Tape | None = None
    _buffers: Buffers | None = None

    def __init__(self, level: str = "auto") -> None:
        loaded = library.load()
        if isinstance(loaded, Refusal):
            raise RuntimeError(str(loaded))
        self.level = library.set_level(level)
        self.name = f"cpp-{self.level}"
        self._library: ctypes.CDLL = loaded

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, f"k3_{name}")
        library.check(self._library, function(*arguments))
        if self._tape is not None:
            self._tape.calls.append((function, arguments))

    def _new(self, like: Tensor, tokens: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An output of `tokens` rows."""
        if self._buffers is None:
            return like.new_empty(tokens, *shape, dtype=dtype)
        return self._buffers.take(tokens, shape, dtype or like.dtype)

    @contextmanager
    def recording(self, buffers: Buffers) -> Iterator[Tape]:
        """Every call and `do` until the end goes on the tape; results stand in `buffers`, which the next step overwrites."""
        self._tape, self._buffers = Tape(self._library), buffers
        buffers.layer = buffers.place = 0
        try:
            yield self._tape
        finally:
            self._tape = self._buffers = None

    def turn(self) -> None:
        """A layer begins."""
        if self._buffers is not None:
            self._buffers.layer += 1
            self._buffers.place = 0

    def do(self, action: Callable[[], object]) -> None:
        """Run `action`, now and whenever the step that is being recorded is played. It works in place."""
        action()
        if self._tape is not None:
            self._tape.calls.append((_silent, (action,)))

    def reserve(self, tokens: int, heads: int, latent: int, experts: int, top_k: int, expert_in: int, width: int) -> None:
        """Memory for steps of up to so many tokens, so that none of them allocates: MLA of `heads` over a latent, and a router of
        `experts`, `top_k` chosen, of `width` on `expert_in` columns. Of this thread.
        """
        self._call("reserve", tokens, heads, latent, experts, top_k, expert_in, width)

    def allocations(self) -> int:
        """How often the library asked for memory, in all threads."""
        return self._library.k3_allocations()

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, K], weight [N, K] of x's dtype -> [T, N]: x weight^T, fp32 sums, rounded once."""
        tokens, k = x.shape[0], x.shape[-1]
        rows = weight.shape[0]
        kind, (xp, ldx) = _type("linear", "x", x), _rows("linear", "x", x, x.dtype, k)
        wp, ldw = _rows("linear", "weight", weight, x.dtype, k)
        out = self._new(x, tokens, rows)
        self._call("linear", xp, ldx, wp, ldw, out.data_ptr(), kind, tokens, rows, k, torch.get_num_threads())
        return out

    def gate_up(self, x: Tensor, weight: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        """x [T, K], weight [2*I, K], gate rows first -> [T, I]: SiTU of the two products."""
        tokens, k = x.shape[0], x.shape[-1]
        width, odd = divmod(weight.shape[0], 2)
        kind, (xp, ldx) = _type("gate_up", "x", x), _rows("gate_up", "x", x, x.dtype, k)
        wp, ldw = _rows("gate_up", "weight", weight, x.dtype, k)
        if odd:
            _wrong("gate_up", "weight", "an even number of rows", weight)
        out = self._new(x, tokens, width)
        bounds = (beta, linear_beta or 0.0, linear_beta is not None)
        self._call("gate_up", xp, ldx, wp, ldw, out.data_ptr(), kind, tokens, width, k, *bounds, torch.get_num_threads())
        return out

    def mix(
        self, sources: Tensor, delta: Tensor | None, score: Tensor, norm: Tensor | None, eps: float, dtype: torch.dtype
    ) -> Tensor:
        """AttnRes: adds delta [T, D] to the last source in place, rounded to `dtype`; then the mixture of sources [n, T, D] fp32
        by score [D] fp32, through an RMSNorm with norm [D] fp32 if there is one. Returns [T, D] in `dtype`.
        """
        if sources.dim() != 3 or sources.dtype is not torch.float32 or not sources.is_cpu or not sources[0].is_contiguous():
            _wrong("attn_res", "sources", "[n, T, D] float32, each source contiguous", sources)
        if dtype not in TYPES:
            raise ValueError(f"attn_res: expected a result of float32 or bfloat16, found {dtype}")
        n, tokens, d = sources.shape
        added = None if delta is None else _plain("attn_res", "delta", delta, dtype, tokens, d)
        weights = _plain("attn_res", "score", score, torch.float32, d)
        norms = None if norm is None else _plain("attn_res", "norm", norm, torch.float32, d)
        out = self._new(sources, tokens, d, dtype=dtype)
        where = (sources.data_ptr(), sources.stride(0), added, weights, norms, out.data_ptr())
        self._call("mix", *where, TYPES[dtype], n, tokens, d, eps, torch.get_num_threads())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """x [T, D] in `dtype`, weight [D] fp32 -> [T, D] in `dtype`."""
        kind, (xp, ldx) = _type("rms_norm", "x", x), _rows("rms_norm", "x", x, dtype, x.shape[-1])
        tokens, d = x.shape
        out = self._new(x, tokens, d)
        self._call(
            "rms_norm", xp, ldx, _plain("rms_norm", "weight", weight, torch.float32, d), out.data_ptr(), kind, tokens, d, eps
        )
        return out

    def situ(self, gate_up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        """gate_up [T, 2*I], gate first -> [T, I]."""
        kind, (xp, ldx) = _type("situ", "gate_up", gate_up), _rows("situ", "gate_up", gate_up, gate_up.dtype, gate_up.shape[-1])
        tokens, (width, odd) = gate_up.shape[0], divmod(gate_up.shape[1], 2)
        if odd:
            _wrong("situ", "gate_up", "an even number of columns", gate_up)
        out = self._new(gate_up, tokens, width)
        bounds = (beta, linear_beta or 0.0, linear_beta is not None)
        self._call("situ", xp, ldx, out.data_ptr(), kind, tokens, width, *bounds, torch.get_num_threads())
        return out

    def kda_step(
        self, packed: Tensor, conv_state: Tensor, state: Tensor, slots: Tensor, w: KdaWeights, dtype: torch.dtype
    ) -> Tensor:
        """One KDA decode step, as `kda.torch_form.step`. Heads are a multiple of 16 wide, at most 256; the state is fp32."""
        return self._kda(packed, conv_state, state, slots, packed.shape[0], w, dtype, (-1, None, None))

    def kda_prompt(
        self,
        packed: Tensor,
        conv_state: Tensor,
        state: Tensor,
        slots: Tensor,
        starts: Tensor,
        resumed: Tensor,
        w: KdaWeights,
        dtype: torch.dtype,
    ) -> Tensor:
        """KDA over prompts, as `kda.torch_form.prompt`: request r has the tokens [starts[r], starts[r + 1]) of `packed`.

        slots [R] int32 or int64, starts [R + 1] int64, resumed [R] bool; a decay bound from -10 to 0.
        """
        op, requests = "kda", slots.numel()
        where = (
            requests,
            _plain(op, "starts", starts, torch.int64, requests + 1),
            _plain(op, "resumed", resumed, torch.bool, requests),
        )
        return self._kda(packed, conv_state, state, slots, requests, w, dtype, where)

    def _kda(
        self,
        packed: Tensor,
        conv_state: Tensor,
        state: Tensor,
        slots: Tensor,
        rows: int,
        w: KdaWeights,
        dtype: torch.dtype,
        requests: tuple[int, int | None, int | None],
    ) -> Tensor:
        op, f32 = "kda", torch.float32
        kind, conv_kind, tokens = _type(op, "packed", packed), _type(op, "conv_state", conv_state), packed.shape[0]
        heads, dim = w.dt_bias.shape
        width, rank, count = heads * dim, w.f_b.shape[-1], state.shape[0]
        xp, ldx = _rows(op, "packed", packed, dtype, packed.shape[-1])
        if packed.shape[1] < 4 * width + rank + heads:
            _wrong(op, "packed", f"at least {4 * width + rank + heads} columns", packed)
        if conv_state.shape != (count, 3, 3 * width) or not conv_state.is_cpu:
            _wrong(op, "conv_state", f"({count}, 3, {3 * width})", conv_state)
        if state.shape[1:] != (heads, dim, dim) or state.dtype is not f32 or not state.is_cpu or not _inner(state):
            _wrong(op, "state", f"[slots, {heads}, {dim}, {dim}] float32, each slot contiguous", state)
        strides = (ctypes.c_int64 * 3)(*conv_state.stride())
        out = self._new(packed, tokens, width)
        parameters = (
            _plain(op, "conv", w.conv, f32, 3 * width, 4),
            _plain(op, "f_b", w.f_b, dtype, width, rank),
            _plain(op, "decay", w.decay, f32, heads, 1),
            _plain(op, "dt_bias", w.dt_bias, f32, heads, dim),
            _plain(op, "out_norm", w.out_norm, f32, dim),
        )
        stored = (conv_state.data_ptr(), strides, conv_kind, state.data_ptr(), state.stride(0) if count > 1 else width * dim)
        sizes = (kind, tokens, heads, dim, rank, count, w.lower_bound, *requests, torch.get_num_threads())
        self._call("kda", xp, ldx, *stored, *_index(op, "slots", slots, rows), *parameters, out.data_ptr(), *sizes)
        return out

    def mla_rows(
        self, packed: Tensor, q_norm: Tensor, kv_norm: Tensor, eps: float, cache: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        """Write this step's cache rows [norm(kv_a) | k_pe] of packed [T, q_a | kv_a | k_pe | ...] at flat token slots; a negative
        slot is padding. cache: [blocks, block, latent + shared]. Returns norm(q_a) [T, q_rank].
        """
        op = "mla_rows"
        kind, tokens, (q_rank, latent) = _type(op, "packed", packed), packed.shape[0], (q_norm.numel(), kv_norm.numel())
        shared = cache.shape[-1] - latent
        xp, ldx = _rows(op, "packed", packed, packed.dtype, packed.shape[-1])
        if shared < 0 or packed.shape[1] < q_rank + latent + shared:
            _wrong(op, "packed", f"at least {q_rank + latent + shared} columns, the cache {latent} or more", packed)
        f32, out = torch.float32, self._new(packed, tokens, q_rank)
        norms = _plain(op, "q_norm", q_norm, f32, q_rank), _plain(op, "kv_norm", kv_norm, f32, latent)
        stored = _cache(op, cache, latent + shared)
        slots = _index(op, "slot_mapping", slot_mapping, tokens)
        self._call(op, xp, ldx, *norms, out.data_ptr(), *stored, *slots, kind, tokens, q_rank, latent, shared, eps)
        return out

    def absorb(self, q: Tensor, w_uk: Tensor) -> Tensor:
        """q [T, h, nope + shared], w_uk [h, nope, latent] -> [T, h, latent + shared]: [q_nope w_uk | q_pe]."""
        op, (heads, nope, latent) = "mla_absorb", w_uk.shape
        tokens, shared = q.shape[0], q.shape[-1] - nope
        if shared < 0:
            _wrong(op, "q", f"at least {nope} columns a head", q)
        kind, qp = _type(op, "q", q), _plain(op, "q", q, q.dtype, tokens, heads, nope + shared)
        wp, strides = _head_rows(op, "w_uk", w_uk, q.dtype)
        out = self._new(q, tokens, heads, latent + shared)
        self._call(op, qp, wp, *strides, out.data_ptr(), kind, tokens, heads, nope, latent, shared, torch.get_num_threads())
        return out

    def attend(
        self, query: Tensor, cache: Tensor, block_table: Tensor, lengths: Tensor, latent: int, scale: float, longest: int
    ) -> Tensor:
        """Attention over the paged cache, as `mla.torch_form.attend`: -> [T, h, latent] fp32. `longest` is not needed here."""
        op, (tokens, heads, width) = "mla_attend", query.shape
        kind, qp = _type(op, "query", query), _plain(op, "query", query, query.dtype, tokens, heads, width)
        stored = _cache(op, cache, width)
        table = block_table
        if table.dim() != 2 or table.shape[0] != tokens or table.dtype not in ENTRY_BYTES or not table.is_cpu:
            _wrong(op, "block_table", f"[{tokens}, blocks of a request] int32 or int64", table)
        if table.stride(1) != 1 and table.shape[1] > 1:
            _wrong(op, "block_table", "with contiguous rows", table)
        out = self._new(query, tokens, heads, latent, dtype=torch.float32)
        where = (table.data_ptr(), ENTRY_BYTES[table.dtype], table.stride(0), table.shape[1])
        ends = _index(op, "lengths", lengths, tokens)
        sizes = (kind, tokens, heads, width, latent, scale, torch.get_num_threads())
        self._call(op, qp, *stored, *where, *ends, out.data_ptr(), *sizes)
        return out

    def values(self, lat: Tensor, w_uv: Tensor, gate: Tensor) -> Tensor:
        """lat [T, h, latent] fp32, w_uv [h, v, latent], gate [T, h*v] -> [T, h*v] in gate's dtype: (lat w_uv^T) sigmoid(gate)."""
        op, (heads, v, latent) = "mla_value", w_uv.shape
        kind, tokens = _type(op, "gate", gate), lat.shape[0]
        lp = _plain(op, "lat", lat, torch.float32, tokens, heads, latent)
        wp, strides = _head_rows(op, "w_uv", w_uv, gate.dtype)
        gp, ldg = _rows(op, "gate", gate, gate.dtype, heads * v, tokens)
        out = self._new(gate, tokens, heads * v)
        self._call(op, lp, wp, *strides, gp, ldg, out.data_ptr(), kind, tokens, heads, v, latent, torch.get_num_threads())
        return out

    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor, top_k: int, renormalise: bool, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """x [T, D], gate [E, D] fp32, bias [E] fp32 -> ids [T, k] int64, weights [T, k] fp32: `moe_front.torch_form.route` of
        the logits x gate^T, which stay in fp32.
        """
        op, (tokens, d), experts = "route", x.shape, gate.shape[0]
        kind, (xp, ldx) = _type(op, "x", x), _rows(op, "x", x, x.dtype, d)
        gp, bp = _plain(op, "gate", gate, torch.float32, experts, d), _plain(op, "bias", bias, torch.float32, experts)
        ids = self._new(x, tokens, top_k, dtype=torch.int64)
        weights = self._new(x, tokens, top_k, dtype=torch.float32)
        sizes = (kind, tokens, experts, d, top_k, renormalise, scaling, torch.get_num_threads())
        self._call(op, xp, ldx, gp, bp, ids.data_ptr(), weights.data_ptr(), *sizes)
        return ids, weights

    def experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights, beta: float, linear_beta: float | None
    ) -> Tensor:
        """Routed MXFP4 experts with SiTU, as `experts.torch_form.run`, x [T, L] -> [T, L]."""
        op, (tokens, latent), top_k = "experts", x.shape, ids.shape[-1]
        count, width = w.w13.shape[0], w.w13.shape[1] // 2
        kind, (xp, ldx), byte = _type(op, "x", x), _rows(op, "x", x, x.dtype, latent), torch.uint8
        routing = _plain(op, "ids", ids, torch.int64, tokens, top_k), _plain(op, "weights", weights, torch.float32, tokens, top_k)
        matrices = (
            _plain(op, "w13", w.w13, byte, count, 2 * width, latent // 2),
            _plain(op, "s13", w.s13, byte, count, 2 * width, latent // GROUP),
            _plain(op, "w2", w.w2, byte, count, latent, width // 2),
            _plain(op, "s2", w.s2, byte, count, latent, width // GROUP),
        )
        out = self._new(x, tokens, latent)
        bounds = (beta, linear_beta or 0.0, linear_beta is not None, torch.get_num_threads())
        self._call(op, xp, ldx, *routing, *matrices, out.data_ptr(), kind, tokens, top_k, count, latent, width, *bounds)
        return out


def _silent(action: Callable[[], object]) -> None:
    """Runs it; what it returns is no error."""
    action()


def _inner(x: Tensor) -> bool:
    """Whether each x[i] is contiguous."""
    return x.shape[0] == 0 or x[0].is_contiguous()


def _cache(op: str, cache: Tensor, width: int) -> tuple[int, int, int, int, int, int]:
    """Address, type, blocks, rows of a block, and the distances of blocks and of rows."""
    if cache.dim() != 3 or cache.shape[2] != width or not cache.is_cpu or cache.stride(2) != 1:
        _wrong(op, "cache", f"[blocks, block, {width}] with contiguous rows", cache)
    return cache.data_ptr(), _type(op, "cache", cache), cache.shape[0], cache.shape[1], cache.stride(0), cache.stride(1)


def _head_rows(op: str, name: str, w: Tensor, dtype: torch.dtype) -> tuple[int, tuple[int, int]]:
    """Address of a [h, rows, columns] view with contiguous rows, and the distances of heads and of rows."""
    if w.dtype is not dtype or not w.is_cpu or w.stride(2) != 1:
        _wrong(op, name, f"[h, rows, columns] {dtype} with contiguous rows", w)
    return w.data_ptr(), (w.stride(0), w.stride(1))
