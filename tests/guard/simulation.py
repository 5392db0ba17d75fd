"""vLLM's real scheduler and KV manager over a pretended model: what a worker's guard would see, thousands of steps in seconds.

The pretended model keeps what a hybrid model keeps: for each request a recurrent state, a running hash of its tokens, and for
each token a latent row; both live in caches addressed by the scheduler's own block tables. A request's state is checked against
its tokens after every step, so that a slot of the wrong request, or of the wrong time, shows at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm.model_executor.models.kimi_k3_fast import guard as guards
from vllm.model_executor.models.kimi_k3_fast.guard import Path as StepPath
from vllm.model_executor.models.kimi_k3_fast.guard import Policy, StateView, WriteSet
from vllm.model_executor.models.kimi_k3_fast.patches import hooks
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason, Refusal

BLOCK = 16
MLA, KDA = 0, 1  # cache groups
WIDTH = 2
PREFILL = (Refusal(Reason.STEP_PREFILL),)


def make_config(model: Path) -> Any:
    """vLLM's configuration of the checkpoint, with blocks small enough for thousands of short requests."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(str(model), max_model_len=512, async_scheduling=False).create_engine_config()
    config.cache_config.block_size = config.cache_config.mamba_block_size = BLOCK
    config.cache_config.mamba_cache_mode = "align"
    config.cache_config.enable_prefix_caching = True
    return config


def make_scheduler(config: Any, blocks: int, max_requests: int = 8, budget: int = 48) -> Any:
    """A scheduler with one latent group and one recurrent-state group, prefix caching and chunked prefill on."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.num_gpu_blocks = blocks
    config.scheduler_config.max_num_seqs = max_requests
    config.scheduler_config.max_num_batched_tokens = budget
    init_none_hash(sha256)
    latent = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    state = MambaSpec(
        block_size=BLOCK,
        shapes=((WIDTH,),),
        dtypes=(torch.int64,),
        page_size_padded=latent.page_size_bytes,
        mamba_cache_mode="align",
    )
    caches = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["mla"], latent), KVCacheGroupSpec(["kda"], state)],
    )
    return Scheduler(config, caches, StructuredOutputManager(config), BLOCK)


def mixed(state: int, token: int) -> int:
    """One step of the pretended recurrence."""
    return (state * 1_000_003 + token + 1) % (1 << 61)


@dataclass
class Running:
    """A worker's view of one request."""

    tokens: list[int]
    computed: int
    tables: list[list[int]]
    state_block: int | None = None  # where its recurrent state stands
    expected: int = 0  # what that state must be
    checked: int = 0  # tokens that `expected` covers


@dataclass
class Simulation:
    """Drives a scheduler with random arrivals, aborts and repeated prompts; `run` returns the guard's report."""

    scheduler: Any
    blocks: int
    rng: random.Random
    audit_every: int = 1
    requests: dict[str, Running] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("hits", "preempted", "aborted", "finished", "chunks"), 0))

    def __post_init__(self) -> None:
        self.state = torch.zeros(self.blocks, WIDTH, dtype=torch.int64)
        self.latent = torch.zeros(self.blocks, BLOCK, dtype=torch.int64)
        self.guard = guards.Guard(Policy(audit_every=self.audit_every, policy="report"))
        self.guard.watching = True
        guards._guard = self.guard
        self.guard.bind_state(
            1,
            [
                StateView("kda", "kda_recurrent", 0, KDA, self.state),
                StateView("mla", "mla_latent", 1, MLA, self.latent, rows_per_slot=BLOCK),
            ],
        )
        self.prompts = [[self.rng.randrange(100) for _ in range(self.rng.randrange(1, 120))] for _ in range(6)]
        self.number = 0
        self.bad: set[str] = set()  # requests whose logits are not finite from now on
        self.outputs: list[Any] = []  # of the last step

    def run(self, steps: int) -> dict[str, Any]:
        for _ in range(steps):
            self._arrivals()
            self.step()
        return self.guard.report()

    def _arrivals(self) -> None:
        if len(self.scheduler.requests) < 12 and self.rng.random() < 0.35:
            self.add(self._prompt(), self.rng.randrange(1, 40))
        if self.scheduler.requests and self.rng.random() < 0.04:
            from vllm.v1.request import RequestStatus

            self.scheduler.finish_requests(self.rng.choice(list(self.scheduler.requests)), RequestStatus.FINISHED_ABORTED)
            self.seen["aborted"] += 1

    def _prompt(self) -> list[int]:
        """Often one that was seen before, whole or as a prefix."""
        prompt = list(self.rng.choice(self.prompts))
        if self.rng.random() < 0.5:
            prompt += [self.rng.randrange(100) for _ in range(self.rng.randrange(1, 60))]
        if self.rng.random() < 0.2:
            self.prompts[self.rng.randrange(len(self.prompts))] = prompt[:150]
        return prompt

    def add(self, prompt: list[int], count: int) -> str:
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        self.number += 1
        name = f"r{self.number}"
        sampling = SamplingParams(max_tokens=count, ignore_eos=True)
        sampling.update_from_generation_config({}, eos_token_id=None)
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=get_request_block_hasher(BLOCK, sha256)))
        return name

    def step(self) -> None:
        output = self.scheduler.schedule()
        hooks.step_received(output)
        self._follow(output)
        if output.total_num_scheduled_tokens:
            self._forward(output)
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

        ids = list(output.num_scheduled_tokens)
        if not ids:
            self.scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT)
            return
        sampled = [self._sample(name) for name in ids]
        result = ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, sampled)
        logits = torch.zeros(len(ids), 4)
        logits[[i for i, name in enumerate(ids) if name in self.bad]] = float("nan")
        result.num_nans_in_logits = hooks.end_check(hooks.begin_check(logits, ids, {}, False, None), ids, {})
        hooks.mark(result, False)
        self.outputs = [o for outputs in self.scheduler.update_from_output(output, result).values() for o in outputs.outputs]
        self.seen["finished"] += sum(o.finish_reason is not None for o in self.outputs)

    def _follow(self, output: Any) -> None:
        """The worker's tables, from what the scheduler tells it."""
        for name in output.finished_req_ids:
            self.requests.pop(name, None)
        for name in output.preempted_req_ids or ():
            self.seen["preempted"] += 1
            self.requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            tokens = list(self.scheduler.requests[new.req_id].all_token_ids)
            self._begin(new.req_id, tokens, new.num_computed_tokens, new.block_ids)
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            ids = cached.new_block_ids[i]
            if name not in self.requests:
                self._begin(name, list(self.scheduler.requests[name].all_token_ids), cached.num_computed_tokens[i], ids)
                continue
            running = self.requests[name]
            running.tokens = list(self.scheduler.requests[name].all_token_ids)
            for table, more in zip(running.tables, ids or ([], []), strict=True):
                table.extend(more)

    def _begin(self, name: str, tokens: list[int], computed: int, block_ids: Any) -> None:
        running = Running(tokens, computed, [list(table) for table in block_ids])
        if computed:
            self.seen["hits"] += 1
            running.state_block = running.tables[KDA][(computed - 1) // BLOCK]
        self.requests[name] = running

    def _forward(self, output: Any) -> None:
        """Every scheduled request reads its state where it stood, and writes it where its tokens end."""
        counts = output.num_scheduled_tokens
        decode = all(count == 1 and self.requests[name].computed > 0 for name, count in counts.items())
        ends = {
            name: self.requests[name].tables[KDA][(self.requests[name].computed + n - 1) // BLOCK] for name, n in counts.items()
        }
        for name, block in ends.items():  # vLLM's runner copies a state into its next block before the model runs
            running = self.requests[name]
            if running.state_block not in (None, block):
                self.state[block] = self.state[running.state_block]
        rows = [
            self.requests[name].tables[MLA][position // BLOCK] * BLOCK + position % BLOCK
            for name, n in counts.items()
            for position in range(self.requests[name].computed, self.requests[name].computed + n)
        ]
        total = output.total_num_scheduled_tokens
        hooks.batch_dispatched("NONE", (total, total), (len(counts), None), decode, list(counts))
        self.guard.begin_writes()
        for name, n in counts.items():
            self._compute(self.requests[name], n, ends[name])
        writes = WriteSet(slots={KDA: list(ends.values())}, rows={MLA: rows})
        if decode:
            self.guard.close_step(StepPath.FAST, (), f"decode/t{total}", len(counts), total, total, 0, writes)
        else:
            self.seen["chunks"] += any(n > 1 for n in counts.values())
            self.guard.close_step(StepPath.STANDARD, PREFILL, None, len(counts), total, 0, 0, writes)

    def _compute(self, running: Running, count: int, block: int) -> None:
        state = 0 if running.state_block is None else int(self.state[block, 0])
        for position in range(running.computed, running.computed + count):
            token = running.tokens[position]
            self.latent[running.tables[MLA][position // BLOCK], position % BLOCK] = token + 1
            state = mixed(state, token)
        self.state[block, 0] = state
        running.computed += count
        running.state_block = block
        self._verify(running)

    def _verify(self, running: Running) -> None:
        for token in running.tokens[running.checked : running.computed]:
            running.expected = mixed(running.expected, token)
        running.checked = running.computed
        assert int(self.state[running.state_block, 0]) == running.expected, "the recurrent state is another"
        if self.rng.random() < 0.1:
            rows = torch.tensor(running.tables[MLA])[: (running.computed - 1) // BLOCK + 1]
            kept = self.latent[rows].flatten()[: running.computed] - 1
            assert kept.tolist() == running.tokens[: running.computed], "the latent cache does not hold the request's tokens"

    def _sample(self, name: str) -> list[int]:
        running = self.requests[name]
        return [self.rng.randrange(100)] if running.computed >= len(running.tokens) else []
