"""The choice of path for each step of one model, and its record: what a served model class hands its forward calls to.

The served class owns weights and caches; this owns the views of them, remade whenever vLLM binds caches, and asks `plan` for
every step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from .. import guard as guards
from ..guard import Guard, Mutation, Path, StateView
from ..reasons import Reason, Refusal
from ..scope import Deployment, refusals
from ..settings import Settings, as_dict
from . import metadata, watch
from .backend import pick
from .executor import Executor, StepTensors
from .plan import Limits, Plan, StepKey, plan
from .views import Backbone

logger = logging.getLogger(__name__)

Layers = Sequence[tuple[str, Any]]  # name in vLLM's metadata, and the layer that owns `kv_cache`
# The whole step on the standard path. Two further arguments: relative size of the noise on its input, and the number of a draw of
# such noise at every place.
Standard = Callable[..., torch.Tensor]


class FastPathRequired(RuntimeError):
    """`mode: require` on a deployment that cannot take the fast path: the server does not start."""


class FastPath:
    """One model's fast path in one process.

    layers: every layer with a cache. mutations: what the fork changed in vLLM's settings before. views: makes a `Backbone` of
    the caches bound now, given its generation and each layer's group. logits: hidden states to logits, for the shadow check.
    origin: plain values that name the model, saved with a step that the shadow check finds wrong. impose: makes the standard path
    take the experts that the fast one chose, for the shadow check (see `model.moe.imposed`).
    """

    def __init__(
        self,
        deployment: Deployment,
        settings: Settings,
        layers: Layers,
        views: Callable[[int, dict[str, str]], Backbone],
        mutations: Sequence[Mutation] = (),
        logits: Callable[[torch.Tensor], torch.Tensor | None] = lambda hidden: None,
        origin: Mapping[str, Any] | None = None,
        impose: watch.Impose = lambda choices: nullcontext({}),
    ) -> None:
        self.guard: Guard = guards.current()
        self.settings = settings
        self.refusals = (*refusals(deployment, settings), *guards.refused_patches.values())
        self.layers, self.views, self.logits, self.impose = layers, views, logits, impose
        self.origin = dict(origin or {})
        self.generation = 0
        self._caches: list[Any] = [None] * len(layers)
        self._executor: Executor | None = None
        self._limits: Limits | None = None
        self._groups: list[str] = []
        self._state: list[StateView] = []
        self.backend = pick(settings.cpu_kernels if deployment.platform == "cpu" else "torch")
        self.guard.configure(settings)
        self.guard.deployment(self.refusals, deployment.facts() | {"backend": str(self.backend)}, mutations)
        if self.refusals and settings.mode == "require":
            reasons = "\n".join(f"  - {r}. {r.reason.action}" for r in self.refusals)
            raise FastPathRequired(f"mode is 'require' and this deployment cannot take the fast path:\n{reasons}")

    def forward(self, input_ids: torch.Tensor | None, standard: Standard) -> torch.Tensor:
        """One step on the path that is planned for it."""
        try:
            return self._forward(input_ids, standard)
        except BaseException:
            self.guard.abandon_step()
            raise

    def _forward(self, input_ids: torch.Tensor | None, standard: Standard) -> torch.Tensor:
        step = metadata.attention_metadata()
        if step is None or input_ids is None:
            return standard(0.0)
        self._follow_binding(step)
        rows = step[self.layers[0][0]].rows
        key = metadata.step_key(rows, input_ids.shape[0], self.generation)
        decided = self._decide(key)
        if isinstance(decided, Plan):
            hidden = self._run(decided, input_ids, key, metadata.step_tensors(step, self._groups), standard)
        else:
            written = None
            if self._state and rows is not None:  # the standard path's writes are declared and audited like the fast one's
                written = watch.write_set(metadata.step_tensors(step, self._groups), self._groups)
                self.guard.begin_writes(Path.STANDARD)
            hidden = standard(0.0)
            decoded = key.tokens - key.prompt_tokens
            self.guard.close_step(Path.STANDARD, decided, None, key.requests, key.tokens, decoded, 0, written)
        return hidden

    def _run(
        self, planned: Plan, input_ids: torch.Tensor, key: StepKey, tensors: StepTensors, standard: Standard
    ) -> torch.Tensor:
        """The fast step. Where the guard wants it compared: both paths, then the standard one for good, whichever was right.

        A step that is not sampled is recorded before it runs: a wrong slot is seen before it is written, and the guard finds the
        caches of the processor warm, which a step leaves without any of Python's code.
        """
        assert self._executor is not None
        writes = watch.write_set(tensors, self._groups)
        close = partial(self.guard.close_step, Path.FAST, (), planned.key, key.requests, key.tokens, key.tokens, 0, writes)
        compared = self.guard.begin_writes()
        if not compared and not self.guard.auditing:
            close()
            return self._executor.run(planned, input_ids, tensors)
        if not compared:
            hidden = self._executor.run(planned, input_ids, tensors)
        else:
            both = self._both(planned, input_ids, tensors, standard)
            inputs = lambda: watch.snapshot(self._state, self._groups, tensors, input_ids, both)  # noqa: E731
            draws = watch.draws(both, self._state, writes, standard, self.logits, self.impose)
            watch.shadowed(self.guard, planned.key, self._state, both, inputs, self.origin, draws)
            hidden = standard(0.0)
        close()
        return hidden

    def _both(self, planned: Plan, input_ids: torch.Tensor, tensors: StepTensors, standard: Standard) -> watch.Both:
        executor = self._executor
        assert executor is not None

        def fast(choices: list[torch.Tensor]) -> torch.Tensor:
            executor.choices = choices
            try:
                return executor.run(planned, input_ids, tensors)
            finally:
                executor.choices = None

        writes = watch.write_set(tensors, self._groups)
        return watch.run_both(self._state, writes, fast, standard, self.logits, self.impose)

    def compare(self, input_ids: torch.Tensor, step: Any, standard: Standard) -> watch.Both:
        """The step of this attention metadata on both paths, unrecorded. Raises ValueError with every reason where it is not
        planned fast."""
        self._follow_binding(step)
        decided = self._decide(metadata.step_key(step[self.layers[0][0]].rows, input_ids.shape[0], self.generation))
        if not isinstance(decided, Plan):
            raise ValueError(f"expected a step that the fast path takes, found {'; '.join(map(str, decided))}")
        return self._both(decided, input_ids, metadata.step_tensors(step, self._groups), standard)

    def drawn(self, both: watch.Both, step: Any, standard: Standard) -> dict[str, torch.Tensor]:
        """The furthest of all draws of noise for the step of this attention metadata, after `compare`."""
        writes = watch.write_set(metadata.step_tensors(step, self._groups), self._groups)
        *_, last = watch.draws(both, self._state, writes, standard, self.logits, self.impose)
        return last

    def outcome(self, step: Any, standard: Standard, choices: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the standard path makes of the step of this attention metadata with these experts chosen, unrecorded."""
        with self.impose(choices) as judged:
            hidden = standard(0.0)
        writes = watch.write_set(metadata.step_tensors(step, self._groups), self._groups)
        best = {name: scores.best for name, scores in judged.items()}
        return watch.outcome(hidden, self._state, writes, self.logits) | best

    def _decide(self, key: StepKey) -> Plan | tuple[Refusal, ...]:
        refused = self.refusals or self.guard.late_refusals
        if refused or self._limits is None:
            return refused
        decided = plan(key, self._limits)
        if isinstance(decided, Plan) and self.guard.quarantined(decided.key):
            return (Refusal(Reason.PLAN_QUARANTINED, f"plan {decided.key}"),)
        return decided

    def _follow_binding(self, step: Any) -> None:
        """Remake the views when vLLM has bound other caches than those they show."""
        caches = [layer.kv_cache for _, layer in self.layers]
        if all(new is old for new, old in zip(caches, self._caches, strict=True)):
            return
        self._caches = caches
        self.generation += 1
        if self.refusals:
            return
        group_of = metadata.groups(step, [name for name, _ in self.layers])
        self._groups = list(dict.fromkeys(group_of.values()))
        self.origin["groups"] = [self._groups.index(group_of[name]) for name, _ in self.layers]
        backbone = self.views(self.generation, group_of)
        self._executor = Executor(backbone, self.backend, self.settings.max_tokens)
        self._limits = Limits(self.settings.max_tokens, self.generation, self.backend.name)
        self._state = watch.state_views(backbone, self._groups)
        self.guard.bind_state(self.generation, self._state)
        logger.info(
            "Kimi K3 fast path bound: generation %d, %s, %d layers, %.1f MiB prepared, settings %s",
            self.generation,
            self.backend,
            len(backbone.layers),
            backbone.prepared_bytes / 2**20,
            as_dict(self.settings),
        )
