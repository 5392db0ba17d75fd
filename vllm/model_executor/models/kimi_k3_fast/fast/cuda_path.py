"""The fast path of one model on GPUs, from load to replay: what the served class and the model state hand their calls to.

A replayed CUDA graph runs no Python, so everything is decided before: at load (do stock's weights lie as the kernels read
them?), at each binding of the caches (generation), and once for each captured graph. The runner's own warm-up comes right
before a capture with the same batch; the first one of a binding compiles and loads the kernels of all sizes, each runs its size
once. Verdicts that could differ between ranks (a weight, a cache, a compiler, memory) are agreed before they are acted upon: one
rank's refusal is everyone's, else some would wait for others in a collective.

Steps that run no FULL graph are recorded here, right before they run on stock's path: eager and PIECEWISE steps, with prompts,
too large, or turned away from their graph because its plan was retired.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import guard as guards
from ..comm import Box, Mailbox
from ..guard import GraphKey, Guard, Mutation, Path
from ..reasons import Reason, Refusal
from ..scope import Deployment, refusals
from ..settings import Settings, as_dict
from .cuda_executor import Caches, Executor, StepTensors
from .cuda_views import Kda, KeptExperts, LayoutError, Model, view_model
from .plan import Limits, Plan, StepKey, plan

if TYPE_CHECKING:
    from .cuda_exchange import Post

logger = logging.getLogger(__name__)

BACKEND = "cute"
HEALTH_EVERY = 16  # steps between two looks at the mailbox' health; each waits for a copy of four bytes
RECYCLE_STEPS = 1 << 20  # of at most 128 layers with four exchanges: under 2^29 epochs of 2^32
DISPATCH = Mutation(
    "CudaGraphManager.dispatch",
    "vLLM's",
    "asks the guard first",
    "a retired plan is baked into its graph: such a batch must run eagerly on the standard path",
)

AllGather = Callable[[list[int]], list[list[int]]]


class FastPathRequired(RuntimeError):
    """`mode: require` where the fast path cannot be taken: the server does not start."""


class CudaPath:
    """One rank's fast path. kept: the routed experts of each MoE layer, taken at load; expert_bytes: of them in stock's memory,
    and in copies. sizes: the padded decode batches that the runner captures. ranks: of the tensor-parallel group, of which this
    is `rank`; reduce: its all-reduce; all_gather: over its host side (None: one rank); post: makes this rank's mailbox, see
    `cuda_exchange` (None: `reduce` sums all).
    """

    def __init__(
        self,
        deployment: Deployment,
        settings: Settings,
        sizes: Sequence[int],
        kept: Callable[[], dict[int, KeptExperts]],
        expert_bytes: tuple[int, int],
        ranks: int = 1,
        reduce: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        all_gather: AllGather | None = None,
        post: Post | None = None,
        device: torch.device | str = "cuda",
        rank: int = 0,
    ) -> None:
        self.guard: Guard = guards.current()
        self.settings, self.arch, self.reduce, self.device = settings, deployment.device_arch, reduce, device
        self.ranks, self.rank = ranks, rank
        self.sizes = tuple(sorted(size for size in set(sizes) if size <= settings.max_tokens))
        self.refusals = (*refusals(deployment, settings), *guards.refused_patches.values())
        self.generation = 0
        self.model: Model | None = None
        self.executor: Executor | None = None
        self.staged: StepKey | None = None
        self._gather, self._post = all_gather, post
        if post is not None:
            self.guard.posted = self._after_a_post
        self._box: Box | None = None
        self._bound: Callable[[], Caches] | None = None
        self._turned_away: str | None = None
        self._captures = -1  # the generation whose graphs vLLM has begun to capture
        mutations: list[Mutation] = []
        if not self.refusals:
            self.kept = kept()
            mutations = [DISPATCH]
            shared, copied = expert_bytes
            if copied:
                size = f"{copied / 2**30:.2f} GiB"
                why = "stock repacks the routed experts and drops the layout that the kernels read: a copy is kept beside it"
                mutations.append(Mutation("memory for routed experts", size, f"twice {size}", why))
            logger.info(
                "Kimi K3 fast path: routed experts of %.2f GiB are read as stock packs them, %.2f GiB are copied",
                shared / 2**30,
                copied / 2**30,
            )
        self.guard.configure(settings)
        self._facts, self._mutations = deployment.facts() | {"backend": BACKEND}, mutations
        self._say_exchange()
        self.guard.deployment(self.refusals, self._facts, mutations)
        if deployment.runner != "v2":
            self.guard.watching = False  # the V1 runner's graphs say nothing that a record could be closed by
        self._keep_promise()

    def _keep_promise(self) -> None:
        if self.refusals and self.settings.mode == "require":
            reasons = "\n".join(f"  - {r}. {r.reason.action}" for r in self.refusals)
            raise FastPathRequired(f"mode is 'require' and this deployment cannot take the fast path:\n{reasons}")

    def _say_exchange(self) -> None:
        """Into the deployment's facts: how ranks sum on the fast path."""
        none = self.ranks == 1 or bool(self.refusals)
        self._facts["exchange"] = "none" if none else "stock" if self._post is None else "mailbox"

    def _failed(self, here: bool) -> list[int]:
        """The ranks that say so. A collective."""
        everyone = [[int(here)]] if self._gather is None else self._gather([int(here)])
        return [rank for rank, (there,) in enumerate(everyone) if there]

    def _agree(self, reason: Reason, refusal: Refusal | None) -> None:
        """Take over a rank-local verdict: this rank's refusal, or for `reason` the word that another has one. A collective."""
        bad = self._failed(refusal is not None)
        if bad:
            self._refuse(refusal or Refusal(reason, f"rank {bad[0]} refused; its own report says why"))

    def _refuse(self, refusal: Refusal) -> None:
        """On every rank: no fast step follows, and nobody answers in a mailbox."""
        self.refusals = (*self.refusals, refusal)
        self.executor = self._box = None
        self._say_exchange()
        self.guard.deployment(self.refusals, self._facts, self._mutations)
        self._keep_promise()

    # -- load and binding ----------------------------------------

    def loaded(self, stock: Any) -> None:
        """Weights are loaded and processed: take views of stock's text model. Raises FastPathRequired in mode `require`."""
        if self.refusals:
            return
        refusal = None
        try:
            self.model = view_model(stock, self.kept)
        except (LayoutError, AttributeError) as error:
            refusal = Refusal(Reason.WEIGHTS_LAYOUT, str(error))
        self._agree(Reason.WEIGHTS_LAYOUT, refusal)

    def bound(self, caches: Callable[[], Caches]) -> None:
        """vLLM bound caches: a new generation begins. Kernels are made at the first warm-up behind it. caches: finds them where
        vLLM has them; nothing is held here, since vLLM frees the caches of its memory profile."""
        self.generation += 1
        self._bound, self.executor, self.staged = caches, None, None

    def _prepare(self, step: StepTensors) -> None:
        """Kernels, buffers and mailbox of every size, once for each binding: in the first warm-up, which knows the block tables'
        width. What one rank can fail at alone comes first, and no rank meets the others before all have said that they can."""
        assert self.model is not None and self._bound is not None
        refusal, executor, join = None, None, None
        try:
            check_caches(self._bound())
            pages = {name: table.shape[1] for name, table in step.tables.items()}
            mailbox = self._post is not None
            executor = Executor(
                self.model,
                self._bound,
                pages,
                self.arch,
                self.ranks,
                self.reduce,
                mailbox,
                self.device,
                self.rank,
                self.settings.posted_tokens,
            )
            executor.prepare(self.sizes, lambda text: logger.info("Kimi K3 fast path: %s", text))
            join = self._room(executor)
        except ValueError as error:
            refusal = Refusal(Reason.CACHES_LAYOUT, str(error))
        except (RuntimeError, TypeError, OSError) as error:
            logger.exception("Kimi K3 fast path: not prepared")
            refusal = Refusal(Reason.NOT_PREPARED, f"{type(error).__name__}: {error}")
        self.executor = executor
        self._agree(Reason.NOT_PREPARED, refusal)
        if self.executor is None or executor is None:
            return
        if join is not None:
            self._connect(executor, join)
        if self.executor is None:  # refused, or to be made again for stock's all-reduce
            if not self.refusals:
                self._prepare(step)
            return
        self.guard.peak("startup_compile_seconds", executor.cost.compile_seconds)
        self.guard.peak("startup_prepare_seconds", executor.cost.prepare_seconds)
        self.guard.peak("startup_prepared_bytes", executor.cost.bytes)
        logger.info(
            "Kimi K3 fast path ready: generation %d, batches of %s, %s; settings %s",
            self.generation,
            ", ".join(map(str, self.sizes)),
            executor.cost,
            as_dict(self.settings),
        )

    def _room(self, executor: Executor) -> Callable[[], Box] | None:
        """What makes the mailbox for all ranks at once; one serves all bindings, while it is large enough."""
        if self._post is None:
            return None
        box, words = self._box, executor.words
        return self._post(words) if box is None or box.layout.words < words else lambda: box

    def _connect(self, executor: Executor, join: Callable[[], Box]) -> None:
        """Give the executor its mailbox. Where the ranks' memory cannot be joined it is dropped: with `auto` the next one sums by
        stock's all-reduce, else the fast path is refused. A collective."""
        error = None
        try:
            executor.box = self._box = join()
            executor.cost.bytes += self._box.layout.bytes
        except (ValueError, RuntimeError, OSError) as caught:
            logger.exception("Kimi K3 fast path: no mailbox")
            error = caught
        bad = self._failed(error is not None)
        if not bad:
            return
        detail = f"no mailbox: {error or f'rank {bad[0]} has none'}"
        if self.settings.exchange != "auto":
            self._refuse(Refusal(Reason.NOT_PREPARED, detail))
            return
        logger.warning("Kimi K3 fast path: ranks sum by stock's all-reduce: %s", detail)
        self._post = self.executor = self._box = None
        self._say_exchange()
        self.guard.deployment(self.refusals, self._facts, self._mutations)

    # -- a graph's life ----------------------------------------

    def stage(self, requests: int, tokens: int, uniform: bool) -> None:
        """The runner prepares a dummy batch to be captured as one FULL graph: its warm-up and capture follow."""
        self._captures = self.generation
        self.staged = StepKey(requests, tokens, tokens, 0, 1 if uniform and requests == tokens else 0, self.generation, "full")

    def forward(
        self, embed: Callable[[], torch.Tensor], step: Callable[[], StepTensors | Refusal], capturing: bool
    ) -> torch.Tensor | None:
        """The staged batch on the path that is planned for it: hidden states [T, D], or None for stock's path.

        embed: the batch's embeddings [T, D]. step: its index tensors. capturing: the stream is being captured; else it is the
        warm-up. What a capture decided is told to the guard, under the graph's key.
        """
        staged = self.staged
        assert staged is not None
        decided = self._decide(staged, step, capturing)
        if capturing:
            graph = GraphKey("full", staged.padded, staged.requests, staged.width == 1)
            self.guard.planned(graph, decided.key if isinstance(decided, Plan) else decided)
        if not isinstance(decided, Plan):
            return None
        tensors = step()
        assert self.executor is not None and isinstance(tensors, StepTensors)
        if capturing:
            return self.executor.run(staged.padded, embed(), tensors)
        return self._warm_up(staged, embed, tensors)

    def _warm_up(self, staged: StepKey, embed: Callable[[], torch.Tensor], tensors: StepTensors) -> torch.Tensor | None:
        """Run a size once: the first launch loads each kernel onto the device, which a capture forbids."""
        assert self.executor is not None
        refusal, hidden = None, None
        try:
            hidden = self.executor.run(staged.padded, embed(), tensors)
            if torch.device(self.device).type == "cuda":
                torch.cuda.synchronize()
        except (ValueError, RuntimeError, TypeError) as error:
            logger.exception("Kimi K3 fast path: the warm-up of %d rows failed", staged.padded)
            refusal = Refusal(Reason.NOT_PREPARED, f"warm-up of {staged.padded} rows: {type(error).__name__}: {error}")
        self._agree(Reason.NOT_PREPARED, refusal)
        return hidden if self.executor is not None else None

    def _decide(self, key: StepKey, step: Callable[[], StepTensors | Refusal], capturing: bool) -> Plan | tuple[Refusal, ...]:
        if self.refusals:
            return self.refusals
        if key.width == 1 and key.padded <= self.settings.max_tokens:
            tensors = step()
            if isinstance(tensors, Refusal):
                return (tensors,)
            if not capturing and self.executor is None:
                self._prepare(tensors)
        return self.refusals or self._plan(key)

    # -- steps ----------------------------------------

    def turn_away(self, tokens: int) -> bool:
        """Whether a batch of this many padded rows must not replay its graph, because its plan was retired. Ranks retire plans at
        the same step, so all answer alike."""
        key = f"decode/{tokens}/{BACKEND}"
        retired = self.guard.quarantined(key)
        self._turned_away = key if retired else None
        return retired

    def replayed(self) -> None:
        """A FULL graph is about to be replayed; its record was closed when it was dispatched."""
        self.staged, self._turned_away = None, None
        self._look_after_mailbox()

    def record(self, key: StepKey) -> None:
        """A real step that replays no FULL graph is about to run, on stock's path. Before a binding's graphs are captured it is
        of requests that vLLM makes up to warm its kernels."""
        retired = self._turned_away
        self.replayed()
        if self._captures != self.generation and not self.refusals:
            self.guard.count("warm_up_steps")
            self.guard.abandon_step()
            return
        refused = self.refusals or self.guard.late_refusals
        decided = refused or self._plan(key)
        found = () if isinstance(decided, Plan) else decided
        if retired:
            found = (Refusal(Reason.PLAN_QUARANTINED, f"plan {retired}"), *found)
        self.guard.close_step(Path.STANDARD, found, retired, key.requests, key.tokens, key.tokens - key.prompt_tokens, 0)

    def _look_after_mailbox(self) -> None:
        """Read the mailbox' health now and then, and clear its words long before an epoch could come round. The steps are the
        same on all ranks. Raises PeerLost, on every rank, where one did not answer."""
        if self._box is None:
            return
        if self.guard.step % HEALTH_EVERY == 0:
            self._check_peers(self._box)
        if isinstance(self._box, Mailbox) and self.guard.step and self.guard.step % RECYCLE_STEPS == 0:
            self._box.recycle()

    def _after_a_post(self, reason: Reason) -> None:
        """Logits were not finite, says the thread that hands out a step's result: of a lost peer, or of this one request? Raises
        PeerLost there, so that the engine ends with the first such step, even if no other ever came."""
        if reason is Reason.NON_FINITE and self._box is not None:
            self._check_peers(self._box)

    def _check_peers(self, box: Box) -> None:
        """Raises PeerLost, told to the guard before: a dead engine answers no report, its event file and log remain."""
        health = box.health()
        if health.well:
            return
        try:
            if self.guard.once("a peer is lost"):
                self.guard.violation(Reason.PEER_LOST, {"peer": health.lost}, f"rank {health.lost} did not answer")
                self.guard.flush()
                self.guard.events.drain(1.0)
        finally:  # the policy `stop` raises an error of its own
            health.check()

    def _plan(self, key: StepKey) -> Plan | tuple[Refusal, ...]:
        ready = tuple(self.executor.ready) if self.executor is not None else ()
        return plan(key, Limits(self.settings.max_tokens, self.generation, BACKEND, ready))


def check_caches(caches: Caches) -> None:
    """Raises ValueError where a cache has another type or order than the kernels read."""
    for name, conv in caches.conv.items():
        state = caches.state[name]
        if conv.dtype != torch.bfloat16 or conv.dim() != 3 or conv.shape[1] != 3 or conv.stride()[1:] != (conv.shape[2], 1):
            raise ValueError(f"{name}: expected convolution state [slots, 3, 3 h d] bf16, found {_seen(conv)}")
        if (
            state.dtype != torch.float32
            or state.dim() != 4
            or state.stride()[1:] != (state.shape[2] * state.shape[3], state.shape[3], 1)
        ):
            raise ValueError(f"{name}: expected recurrent state [slots, h, d, d] fp32, found {_seen(state)}")
    for name, latent in caches.latent.items():
        if latent.dtype != torch.bfloat16 or latent.dim() != 3 or latent.stride()[1:] != (latent.shape[2], 1):
            raise ValueError(f"{name}: expected latent rows [pages, block, 576] bf16, found {_seen(latent)}")


def _seen(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"


def caches_of(model: Model, bound: Callable[[str], Any]) -> Caches:
    """The caches that vLLM has bound. bound: a layer's `kv_cache`, by its name."""
    conv, state, latent = {}, {}, {}
    for layer in model.layers:
        name = layer.attention.name
        if isinstance(layer.attention, Kda):
            conv[name], state[name] = bound(name)[:2]
        else:
            latent[name] = bound(name)
    return Caches(conv, state, latent)
