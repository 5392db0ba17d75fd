"""`plan(StepKey, Limits)`: the choice of path for one step, a pure function of what every rank knows.

Nothing here looks at a tensor, a clock or an environment variable, so that all ranks of a tensor-parallel group choose alike
without talking to each other; the guard compares their choices afterwards.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..reasons import Reason, Refusal


@dataclass(frozen=True)
class StepKey:
    """What every rank knows of a step before it runs.

    requests: requests in the step. tokens: real tokens; padded: rows that the kernels see. prompt_tokens: tokens of requests
    that are still in their prompt. width: tokens of each request when all are equal (1 in plain decode, 1 + drafts when
    verifying), else 0. bound: generation of the caches that are bound now; 0 before any is (the memory profile runs then).
    mode: how the runner runs it: "none" (eager), "piecewise" or "full" (one CUDA graph).
    """

    requests: int
    tokens: int
    padded: int
    prompt_tokens: int
    width: int
    bound: int
    mode: str = "none"


@dataclass(frozen=True)
class Limits:
    """What the executor was built for. generation: the cache binding its views belong to. backend: which op halves it runs.
    sizes: the padded batches whose kernels are ready, where they are made for single sizes and run in FULL graphs only."""

    max_tokens: int
    generation: int
    backend: str
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Plan:
    """How a fast step runs; printable, and the same on every rank.

    `key` names the plan in reports and is what quarantine retires. `tokens` is the number of rows of the buffers' views.
    """

    key: str
    tokens: int
    width: int
    backend: str
    generation: int


@functools.lru_cache(maxsize=1024)
def plan(key: StepKey, limits: Limits) -> Plan | tuple[Refusal, ...]:
    """The plan of a step, or every reason against the fast path."""
    if key.bound == 0:
        return (Refusal(Reason.STEP_UNBOUND, "a profiling or dummy step, no caches bound"),)
    found = []
    if key.prompt_tokens:
        found.append(Refusal(Reason.STEP_PREFILL, f"{key.prompt_tokens} of {key.tokens} tokens are prompt tokens"))
    elif key.width != 1:
        width = f"{key.width} tokens a request" if key.width else "requests of unequal length"
        found.append(Refusal(Reason.STEP_WIDTH, f"expected 1 token a request, found {width}"))
    if key.padded > limits.max_tokens:
        found.append(Refusal(Reason.STEP_TOO_MANY_TOKENS, f"expected at most {limits.max_tokens} rows, found {key.padded}"))
    elif limits.sizes is not None and (key.mode != "full" or key.padded not in limits.sizes):
        how = "eagerly" if key.mode == "none" else f"in {key.mode} graphs"
        ready = ", ".join(map(str, limits.sizes)) or "none"
        found.append(Refusal(Reason.STEP_NOT_CAPTURED, f"{key.padded} rows run {how}; FULL graphs are ready for {ready}"))
    if key.bound != limits.generation:
        found.append(
            Refusal(Reason.STALE_BINDING, f"caches of generation {key.bound} are bound, views are of {limits.generation}")
        )
    if found:
        return tuple(found)
    return Plan(f"decode/{key.padded}/{limits.backend}", key.padded, key.width, limits.backend, limits.generation)
