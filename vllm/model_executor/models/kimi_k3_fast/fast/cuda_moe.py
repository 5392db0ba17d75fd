"""The latent MoE of a decode step on GPUs: buffers, plans and launches of all MoE layers of one rank, over stock's weights.

    front   router logits, the latent z, the shared experts' activation        m [T, D]
    topk    the experts of each token, from all logits
    experts their weighted sum in the latent space
    tail    norm, up-projection and the shared experts' down-projection        -> delta [T, D], this layer's update of the prefix

Experts and shared experts are divided among the ranks by width, so the latent and delta are summed over the ranks. Router,
down-projection and up-projection are whole on every rank. Through mailboxes they are divided too: a rank reads the rows
[r E/n, (r + 1) E/n) of the router, as many of the down-projection, and as many columns of the up-projection, in place; `topk`
gathers logits and z, the sum of the latent norms it and keeps a rank's columns, and the tail sums in its own launch, or only
posts what AttnRes then adds up. Otherwise every rank reads all of them, and the up-projection's part of delta is scaled by
1/ranks through the norm's weight: for a power of two exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..comm import Box
from ..ops import all_reduce, experts, moe_front, moe_tail
from ..ops.build import KernelSpec
from ..ops.skinny import UNIT
from .cuda_views import Model, Moe


@dataclass(frozen=True)
class Plans:
    """All kernels of one batch size. latent, delta: the sums over ranks in front of the tail and behind it, None where there is
    none or stock's all-reduce does it. scratch: where the library multiplies."""

    tokens: int
    front: Any
    topk: Any
    experts: Any
    tail: Any
    latent: Any = None
    delta: Any = None
    scratch: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def exchanging(self) -> tuple[Any, ...]:
        """Those that may need words of a mailbox."""
        return self.topk, self.tail, self.latent, self.delta


@dataclass(frozen=True)
class Weights:
    """What this rank reads of one layer besides its experts: router [E/n, D], down [L/n, D] and up [D, L/n], views of stock's
    where they are divided; norm [L]."""

    router: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor
    norm: torch.Tensor


class LatentMoe:
    """Launches the MoE layers of `model`. rows: the largest batch. ranks exchange through mailboxes, or by `reduce`, stock's
    all-reduce. zeros: makes a buffer of a dtype and shape. Raises ValueError where the layers' shapes differ."""

    def __init__(
        self,
        layers: Sequence[Moe],
        model: Model,
        rows: int,
        ranks: int,
        rank: int,
        mailbox: bool,
        reduce: Callable[[torch.Tensor], torch.Tensor],
        zeros: Callable[..., torch.Tensor],
    ) -> None:
        shapes = {(w.router.shape, w.down.shape, w.gate_up.shape, w.experts.w13.shape, w.top_k) for w in layers}
        if len(shapes) > 1:
            raise ValueError(f"expected MoE layers of one shape, found {len(shapes)}")
        self.model, self.ranks, self.mailbox, self.reduce, self.zeros = model, ranks, mailbox, reduce, zeros
        self.like = like = layers[0]  # all others have its sizes
        self.experts, self.latent, self.shared = like.router.shape[0], like.down.shape[0], like.gate_up.shape[0] // 2
        divides = self.experts % ranks == 0 and self.latent % (UNIT * ranks) == 0
        self.parts = ranks if mailbox and divides else 1  # of the matrices that every rank holds whole
        self.weights = {id(w): self._own(w, rank) for w in layers}
        self.logits, self.z_own = zeros("f32", rows, self.experts // self.parts), zeros("bf16", rows, self.latent // self.parts)
        self.routed = zeros("bf16", rows, self.latent)
        self.z, self.normed = self.z_own, self.routed  # a rank that holds all of them gathers none
        if self.divided:
            self.z, self.normed = zeros("bf16", rows, self.latent), zeros("bf16", rows, self.latent // self.parts)
        self.hidden, self.inner = zeros("bf16", rows, self.shared), zeros("bf16", rows * like.top_k, like.experts.width)
        self.ids = {id(w): zeros("i32", rows, w.top_k) for w in layers}  # what a step chose is read when it is over
        self.shares = zeros("f32", rows, like.top_k)
        sizes = (self.experts + 1, rows * like.top_k, self.experts, 1, 1)
        self.groups = moe_front.Groups(*(zeros("i32", size) for size in sizes))

    @property
    def divided(self) -> bool:
        """No rank reads the whole router, down-projection or up-projection."""
        return self.parts > 1

    def _own(self, w: Moe, rank: int) -> Weights:
        if self.divided:
            router, down, up = (x.chunk(self.ranks, dim)[rank] for x, dim in ((w.router, 0), (w.down, 0), (w.up, 1)))
            return Weights(router, down, up, w.norm)
        scaled = w.norm if self.ranks == 1 else self.model.prepared(lambda: w.norm / self.ranks)
        return Weights(w.router, w.down, w.up, scaled)

    # -- before capture ----------------------------------------

    def plans(self, tokens: int, arch: str, load: bool, posts: bool) -> tuple[Plans, list[KernelSpec]]:
        """The plans of one batch size and the kernels that they need; `load=False` compiles nothing. posts: the launch behind the
        tail adds up over the ranks, where they divide. Raises ValueError where an operator refuses a shape."""
        model, like, n, held = self.model, self.like, self.parts, self.like.experts
        beta, linear = model.situ_beta, model.situ_linear_beta
        rows = (self.experts // n, self.latent // n, self.shared)
        front = moe_front.plan(moe_front.Config(tokens, model.hidden, *rows, beta=beta, linear_beta=linear), arch)
        sizes = (tokens, self.latent, held.width, self.experts, like.top_k, beta, linear, held.layout, held.pitch)
        routed = experts.plan(experts.Config(*sizes), arch, compiled=load)
        grouped = routed.tactic.grouped
        choice = moe_front.TopkConfig(tokens, self.experts, like.top_k, like.renormalise, like.scaling, grouped=grouped)
        last = moe_tail.Config(tokens, model.hidden, self.latent // n, self.shared, model.eps)
        latent, delta = None, None
        if self.divided:
            choice = replace(choice, world=n, latent=self.latent)
            last = replace(last, normed=True, pitch=self.latent, world=n, posts=posts)
            latent = all_reduce.norm_plan(all_reduce.NormConfig(tokens, self.latent, n, model.eps), arch)
        elif self.mailbox:
            columns = (self.latent, model.hidden)
            latent, delta = (all_reduce.plan(all_reduce.Config(tokens, c, self.ranks), arch) for c in columns)
        topk, tail = moe_front.topk_plan(choice, arch), moe_tail.plan(last, arch)
        specs = [front.spec, *routed.specs, topk.spec, tail.spec, *(plan.spec for plan in (latent, delta) if plan)]
        wanted = tail.scratch_shapes() if load else {}
        scratch = {name: self.zeros(dtype, *shape) for name, (shape, dtype) in wanted.items()}
        plans = Plans(tokens, front, topk, routed, tail, latent, delta, scratch)
        return plans, [spec for spec in specs if spec is not None]

    # -- a layer ----------------------------------------

    def run(
        self, plans: Plans, w: Moe, m: torch.Tensor, num_tokens: torch.Tensor, delta: torch.Tensor, box: Box | None
    ) -> torch.Tensor:
        """m [T, D] bf16 -> [T, D] bf16, summed over the ranks: `delta`, or where stock's all-reduce leaves it; not written where
        the tail posts. num_tokens: [1] int32, the real rows."""
        t, own = plans.tokens, self.weights[id(w)]
        logits, z_own, hidden, routed = (b[:t] for b in (self.logits, self.z_own, self.hidden, self.routed))
        moe_front.run(plans.front, m, own.router, own.down, w.gate_up, logits, z_own, hidden)
        z, routing = self._choose(plans, w, logits, z_own, num_tokens, box)
        experts.run(plans.experts, w.experts, z, routing, experts.Scratch(self.inner[: t * w.top_k]), routed)
        if self.divided:
            assert box is not None
            normed = self.normed[:t]
            all_reduce.run_norm(plans.latent, routed, own.norm, normed, box)
            moe_tail.run(plans.tail, normed, hidden, None, own.up, w.shared_down, delta, mailbox=box)
            return delta
        latent = self._sum(plans.latent, routed, box)
        moe_tail.run(plans.tail, latent, hidden, own.norm, own.up, w.shared_down, delta, plans.scratch)
        return self._sum(plans.delta, delta, box)

    def _choose(
        self, plans: Plans, w: Moe, logits: torch.Tensor, z: torch.Tensor, num_tokens: torch.Tensor, box: Box | None
    ) -> tuple[torch.Tensor, experts.Routing]:
        """The whole z [T, L], and who is to multiply it."""
        t, gather = plans.tokens, None
        ids, shares = self.ids[id(w)][:t], self.shares[:t]
        groups = replace(self.groups, pairs=self.groups.pairs[: t * w.top_k])
        if self.divided:
            assert box is not None
            gather = moe_front.Gather(z, self.z[:t], box)
            z = gather.z
        listed = groups if plans.topk.config.grouped else None
        moe_front.run_topk(plans.topk, logits, w.bias, num_tokens, ids, shares, listed, gather)
        return z, experts.Routing(ids, shares, num_tokens, groups.offsets, groups.pairs, groups.active, groups.num_active)

    def _sum(self, plan: Any, partial: torch.Tensor, box: Box | None) -> torch.Tensor:
        """Over the ranks: in place through the mailbox, or by stock's all-reduce."""
        if self.ranks == 1:
            return partial
        if box is None:
            return self.reduce(partial)
        all_reduce.run(plan, partial, partial, box)
        return partial
