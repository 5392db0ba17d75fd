"""The executor on GPUs: one decode step as a chain of our kernels over stock's weights and caches, made to be captured.

`prepare` compiles and loads every kernel of a padded batch size and makes its buffers; `run` only launches. Both belong to one
binding of the caches. AttnRes updates the residual prefix and closes blocks itself; o_proj adds to the prefix in its own launch.

Several ranks sum o_proj in its own launch, through mailboxes, or behind it, by `reduce`, stock's all-reduce. What they do in a
MoE layer is in `cuda_moe`. Up to `posted` tokens o_proj and the tail only post their parts, and AttnRes behind them adds up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..comm import Box
from ..ops import attn_res, build, kda, mla, oproj, posted, projection
from ..ops.pairs import trips
from . import cuda_moe
from .compile_kernels import compile_missing
from .cuda_views import Dense, Kda, Layer, Mix, Mla, Model, Moe

ROWS = 64  # of the residual's buffers: the largest batch of any kernel


@dataclass(frozen=True)
class StepTensors:
    """What a step's kernels read of vLLM's batch, at addresses that stay for every replay of a graph.

    slots: by KDA layer, [T, 1] int32 (<= 0: a padded row). rows, tables, lengths: by MLA layer, [T] int64 (negative: not
    written), [T, pages] int32, [T] int32 (0: a padded row). num_tokens: [1] int32, the real rows.
    """

    slots: Mapping[str, torch.Tensor]
    rows: Mapping[str, torch.Tensor]
    tables: Mapping[str, torch.Tensor]
    lengths: Mapping[str, torch.Tensor]
    num_tokens: torch.Tensor


@dataclass(frozen=True)
class Caches:
    """The caches of one binding. conv [slots, 3, 3 h d] bf16 and state [slots, h, d, d] fp32 by KDA layer; latent [pages, block,
    576] bf16 by MLA layer."""

    conv: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]
    latent: Mapping[str, torch.Tensor]


class Form(NamedTuple):
    """Of AttnRes: closed blocks, whether delta is pending, the block to close, the norm; over how many ranks delta was posted (1:
    it is a tensor), and whether it replaces the prefix."""

    prev: int
    has_delta: bool
    write: int = -1
    normalise: bool = True
    world: int = 1
    replaces: bool = False


@dataclass(frozen=True)
class Ready:
    """All kernels of one batch size. attn_res: in the order of a step, two for each layer and the last. posts: AttnRes adds up
    over the ranks."""

    tokens: int
    posts: bool
    attn_res: tuple[attn_res.Plan, ...]
    matmul: dict[tuple[str, int, int], Any]  # projections and o_proj, by what they do and their size
    kda: dict[str, Any]
    mla: dict[str, Any]
    mla_scratch: dict[str, torch.Tensor]
    moe: cuda_moe.Plans | None = None

    @property
    def exchanging(self) -> tuple[Any, ...]:
        """Plans that may need words of a mailbox."""
        return *self.attn_res, *self.matmul.values(), *(self.moe.exchanging if self.moe else ())


@dataclass
class StartUp:
    """What preparing cost, in seconds and counts."""

    kernels: int = 0
    compiled: int = 0
    compile_seconds: float = 0.0
    prepare_seconds: float = 0.0
    bytes: int = 0

    def __str__(self) -> str:
        return (
            f"{self.kernels} kernels in {self.prepare_seconds:.1f} s, of these {self.compiled} compiled in "
            f"{self.compile_seconds:.1f} s; {self.bytes / 2**20:.1f} MiB of buffers"
        )


@dataclass
class Executor:
    """Runs steps over `model` and the caches that `bound` finds. pages: width of each MLA layer's block table. ranks: of the
    tensor-parallel group, of which this is `rank`; reduce: its all-reduce; mailbox: ranks exchange through mailboxes instead, and
    `box` is set before a step runs; posted: largest batch whose sums AttnRes makes then. No cache is held here: vLLM frees those
    of its memory profile while this executor still stands.

    Raises ValueError in `prepare` where an operator has no kernel for a shape.
    """

    model: Model
    bound: Callable[[], Caches]
    pages: Mapping[str, int]
    arch: str
    ranks: int = 1
    reduce: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    mailbox: bool = False
    device: torch.device | str = "cuda"
    rank: int = 0
    posted: int = 0
    cost: StartUp = field(default_factory=StartUp)

    def __post_init__(self) -> None:
        self.ready: dict[int, Ready] = {}
        self.box: Box | None = None
        d, m = self.model.hidden, self.model
        self.prefix, self.blocks = self._zeros("bf16", ROWS, d), self._zeros("bf16", m.closed, ROWS, d)
        self.mixed, self.delta, self.hidden, self.out = (self._zeros("bf16", ROWS, d) for _ in range(4))
        attention = [layer.attention for layer in m.layers]
        widest = max((a.in_proj.shape[0] for a in attention), default=0)
        self.packed = self._zeros("bf16", ROWS * widest)
        self.y = self._zeros("bf16", ROWS * max((a.o_proj.shape[1] for a in attention), default=0))
        self.scales = torch.ones(2, device=self.device)
        moe = [layer.mlp for layer in m.layers if isinstance(layer.mlp, Moe)]
        self.moe: cuda_moe.LatentMoe | None = None
        if moe:
            self.moe = cuda_moe.LatentMoe(moe, m, ROWS, self.ranks, self.rank, self.mailbox, self.reduce, self._zeros)
        self.cost.bytes += m.prepared.bytes

    def _zeros(self, dtype: str, *shape: int) -> torch.Tensor:
        made = torch.zeros(*shape, dtype=build.DTYPES[dtype][1], device=self.device)
        self.cost.bytes += made.numel() * made.element_size()
        return made

    @property
    def ids(self) -> Mapping[int, torch.Tensor]:
        """[ROWS, k] int32 by MoE layer: the experts that the last step chose."""
        return self.moe.ids if self.moe else {}

    @property
    def caches(self) -> Caches:
        """The caches that are bound now."""
        return self.bound()

    # -- before capture ----------------------------------------

    def prepare(self, sizes: Iterable[int], say: Callable[[str], None] = lambda text: None) -> None:
        """Compile, load and allocate for these padded batch sizes. Raises ValueError where an operator refuses a shape."""
        wanted = [tokens for tokens in sizes if tokens not in self.ready]
        if not wanted:
            return
        started = time.monotonic()
        specs = self.specs(wanted)
        before = time.monotonic()
        self.cost.compiled += compile_missing(specs, self.arch, say)
        self.cost.compile_seconds += time.monotonic() - before
        for tokens in wanted:
            self.ready[tokens] = self._plans(tokens, load=True)[0]
        for spec in specs:
            build.get(spec, self.arch)
            self.cost.kernels += 1
        self.cost.prepare_seconds += time.monotonic() - started

    @property
    def words(self) -> int:
        """Words of a mailbox that serves every prepared size."""
        plans = (plan for ready in self.ready.values() for plan in ready.exchanging)
        return max((plan.words for plan in plans if isinstance(plan, posted.Posting)), default=0)

    def specs(self, sizes: Iterable[int]) -> list[build.KernelSpec]:
        """The kernels of these padded batch sizes, once; compiles nothing."""
        return list(dict.fromkeys(spec for tokens in sizes for spec in self._plans(tokens, load=False)[1]))

    def _posts(self, tokens: int) -> bool:
        """Whether o_proj and the tail only post: where one trip over the link is best anyway."""
        return self.mailbox and tokens <= self.posted and trips(self.ranks, tokens) == 1

    def _forms(self, posts: bool) -> list[Form]:
        """Of AttnRes, in the order of a step."""
        divided = self.moe is not None and self.moe.divided
        found, pending, world = [], False, 1
        for layer in self.model.layers:
            closes = layer.write >= 0
            found.append(Form(layer.prev, pending, layer.write, world=world))
            update = self._update(layer, posts)
            if update == "post":
                found.append(Form(layer.prev + closes, True, world=self.ranks, replaces=closes))
            else:  # where o_proj has not updated the prefix itself, its reduced sum is still to be added
                found.append(Form(layer.prev + closes, update == "out" and not closes))
            pending, world = True, self.ranks if posts and divided and isinstance(layer.mlp, Moe) else 1
        return [*found, Form(self.model.closed, pending, normalise=False, world=world)]

    def _plans(self, tokens: int, load: bool) -> tuple[Ready, list[build.KernelSpec]]:
        """The plans of one batch size and the kernels that they need; `load=False` compiles nothing."""
        m, arch, specs = self.model, self.arch, []

        def plain(op: Any, config: Any) -> Any:
            planned = op.plan(config, arch)
            if planned.spec is not None:  # the library's product
                specs.append(planned.spec)
            return planned

        posts = self._posts(tokens)
        forms, mixes = self._forms(posts), {}
        for form in dict.fromkeys(forms):
            mix = attn_res.Config(tokens, m.hidden, **form._asdict(), eps=m.eps, closed=m.closed, rows=ROWS)
            mixes[form] = plain(attn_res, mix)
        caches = self.bound()
        matmul: dict[tuple[str, int, int], Any] = {}
        recurrent: dict[str, Any] = {}
        attending: dict[str, Any] = {}
        scratch: dict[str, torch.Tensor] = {}
        for layer in m.layers:
            a = layer.attention
            rows, inner = a.in_proj.shape[0], a.o_proj.shape[1]
            if ("in", rows, m.hidden) not in matmul:
                matmul["in", rows, m.hidden] = plain(projection, projection.Config(tokens, rows, m.hidden))
            update = self._update(layer, posts)
            if (update, m.hidden, inner) not in matmul:
                if update == "out":
                    planned = plain(projection, projection.Config(tokens, m.hidden, inner))
                else:
                    planned = plain(oproj, oproj.Config(tokens, m.hidden, inner, world=self.ranks, update=update))
                matmul[update, m.hidden, inner] = planned
            if isinstance(a, Kda):
                made = kda.plan(
                    kda.Config(a.heads, tokens, rows, lower_bound=a.lower_bound, norm_eps=a.norm_eps), arch, load=load
                )
                recurrent[a.name] = made
                specs.append(made.spec)
            else:
                shape = mla.Config(
                    a.heads,
                    tokens,
                    rows,
                    block_size=caches.latent[a.name].shape[1],
                    pages=self.pages[a.name],
                    q_rank=a.q_b.shape[1],
                    norm_eps=a.norm_eps,
                    scale=a.scale,
                )
                attending[a.name] = found = mla.plan(shape, arch, load=load)
                specs.extend(found.specs.values())
                if load and not scratch:
                    scratch = {name: self._zeros(dtype, *size) for name, (size, dtype) in found.scratch_shapes().items()}
        shapes = {tuple(sorted(plan.scratch_shapes().items())) for plan in attending.values()}
        if len(shapes) > 1:
            raise ValueError(f"expected MLA layers of one shape, found {len(shapes)}")
        moe = None
        if self.moe is not None:
            moe, more = self.moe.plans(tokens, arch, load, posts)
            specs += more
        return Ready(tokens, posts, tuple(mixes[form] for form in forms), matmul, recurrent, attending, scratch, moe), specs

    def _update(self, layer: Layer, posts: bool) -> str:
        """How o_proj's sum meets the prefix: in its own launch, in AttnRes ("post"), or ("out") after stock's all-reduce."""
        if self.ranks > 1 and not self.mailbox:
            return "out"
        if posts:
            return "post"
        return "write" if layer.write >= 0 else "add"

    # -- a step ----------------------------------------

    def run(self, tokens: int, embedded: torch.Tensor, step: StepTensors) -> torch.Tensor:
        """embedded [T, D] bf16 -> hidden [T, D] bf16 before the final norm, in a buffer of this executor. Writes the caches."""
        ready = self.ready.get(tokens)
        if ready is None:
            raise ValueError(f"expected a batch of one of {sorted(self.ready)} rows, for which kernels are ready, found {tokens}")
        self.prefix[:tokens].copy_(embedded)
        delta, caches, plans = self.delta[:tokens], self.bound(), iter(ready.attn_res)
        for layer in self.model.layers:
            self._mix(next(plans), layer.attention_mix, delta, self.mixed)
            after = self._attention(ready, layer, step, caches)
            self._mix(next(plans), layer.mlp_mix, delta if after is None else after, self.mixed)
            mixed, mlp = self.mixed[:tokens], layer.mlp
            delta = mlp.forward(mixed) if isinstance(mlp, Dense) else self._experts(ready, mlp, step, mixed)
        self._mix(next(plans), self.model.final_mix, delta, self.hidden)
        return self.hidden[:tokens]

    def _mix(self, plan: attn_res.Plan, mix: Mix, delta: torch.Tensor, out: torch.Tensor) -> None:
        attn_res.run(plan, mix.score, mix.norm, delta, self.blocks, self.prefix, out[: plan.config.tokens], self.box)

    def _attention(self, ready: Ready, layer: Layer, step: StepTensors, caches: Caches) -> torch.Tensor | None:
        """Up to the prefix. Returns what AttnRes has still to add to it, if anything."""
        a, t, hidden = layer.attention, ready.tokens, self.model.hidden
        rows, inner = a.in_proj.shape[0], a.o_proj.shape[1]
        packed, y = self.packed[: t * rows].view(t, rows), self.y[: t * inner].view(t, inner)
        projection.run(ready.matmul["in", rows, hidden], self.mixed[:t], a.in_proj, packed)
        if isinstance(a, Kda):
            slots, conv, state = step.slots[a.name], caches.conv[a.name], caches.state[a.name]
            weights = (a.conv, a.f_b, a.a_log, a.dt_bias, a.out_norm)
            kda.run(ready.kda[a.name], packed, *weights, slots, conv, state, y)
        else:
            self._mla(ready, a, step, caches.latent[a.name], packed, y)
        update = self._update(layer, ready.posts)
        if update != "out":
            oproj.run(ready.matmul[update, hidden, inner], y, a.o_proj, self.prefix[:t], self.box)
            return None
        out = self.out[:t]
        projection.run(ready.matmul[update, hidden, inner], y, a.o_proj, out)
        summed = self.reduce(out)
        if layer.write >= 0:
            self.prefix[:t].copy_(summed)
            return None
        return summed

    def _mla(self, ready: Ready, a: Mla, step: StepTensors, cache: torch.Tensor, packed: torch.Tensor, y: torch.Tensor) -> None:
        context = mla.Context(step.rows[a.name], cache, step.tables[a.name], step.lengths[a.name])
        weights = mla.Weights(a.q_norm, a.kv_norm, a.q_b, a.w_uk, a.w_uv, self.scales)
        mla.run(ready.mla[a.name], packed, weights, context, y, ready.mla_scratch)

    def _experts(self, ready: Ready, w: Moe, step: StepTensors, mixed: torch.Tensor) -> torch.Tensor:
        """This layer's update of the prefix, summed over the ranks; where its parts were posted, what the result holds is old."""
        assert self.moe is not None and ready.moe is not None
        return self.moe.run(ready.moe, w, mixed, step.num_tokens, self.delta[: ready.tokens], self.box)
