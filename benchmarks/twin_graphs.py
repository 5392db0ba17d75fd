"""Stock's decode graphs beside the fast ones in one running engine: which of the two a step replays is then a word.

`make` captures all FULL graphs a second time with the fast path looking away, so that vLLM's own model is in them, over the same
weights, caches and input buffers. `take` puts one of the two sets in force. The guard is told the truth: while stock's graphs
are in force a replay counts as a standard step, for the reason `mode_off`, and mode `require` is not applied to it.

An engine without graphs (on CPUs) is switched step by step instead. All functions here run in a worker.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

WHY = "stock's graph is in force: a benchmark or a test put it there"


def runner_of(worker: Any) -> Any:
    return getattr(worker, "worker", worker).model_runner


def fast_of(worker: Any) -> Any:
    """The fast path of the served model. Raises RuntimeError where there is none."""
    model = runner_of(worker).model
    found = getattr(getattr(model, "language_model", model), "fast", None)
    if found is None or found.refusals:
        raise RuntimeError(
            f"expected an engine that serves the fast path, found {getattr(found, 'refusals', 'none of the fork')}"
        )
    return found


def make(worker: Any) -> int:
    """Capture stock's graphs; the fast ones stay in force. The number of graphs of each set. A collective of all ranks."""
    from vllm.model_executor.models.kimi_k3_fast import guard
    from vllm.model_executor.models.kimi_k3_fast.reasons import Reason, Refusal

    fast_of(worker)
    manager = getattr(runner_of(worker), "cudagraph_manager", None)
    worker.k3_mode = guard.current().policy.mode
    if manager is None or not manager.graphs:
        worker.k3_twins = None
        return 0
    theirs = (None, (Refusal(Reason.MODE_OFF, WHY),))
    plans = dict(guard.current()._plans)
    stock = captured(worker)
    twins = {"fast": (manager.graphs, plans), "stock": (stock, dict.fromkeys(plans, theirs))}
    worker.k3_twins = twins
    return len(stock)


def captured(worker: Any, choices: Any = None) -> dict[Any, Any]:
    """Stock's graphs, captured now; behind the fast side's experts where `choices` are given (`cuda_choices.Choices`)."""
    from vllm.v1.worker.workspace import current_workspace_manager

    from vllm.model_executor.models.kimi_k3_fast.fast import cuda_shadow

    runner, workspace = runner_of(worker), current_workspace_manager()
    held = list(workspace._current_workspaces)
    workspace.unlock()  # stock's decode steps may want a buffer that none before them has made; `capture_model` locks again
    stock = cuda_shadow.stock_graphs(runner.cudagraph_manager, fast_of(worker), runner.capture_model, choices)
    if any(new is not old for new, old in zip(workspace._current_workspaces, held, strict=True)):
        raise RuntimeError("expected stock's scratch to stay where captured graphs read it, found it moved: profile more tokens")
    return stock


def take(worker: Any, path: str) -> None:
    """From the next step on decode replays the graphs of `path`, "fast" or "stock"."""
    from vllm.model_executor.models.kimi_k3_fast import guard
    from vllm.model_executor.models.kimi_k3_fast.reasons import Reason, Refusal

    watching = guard.current()
    watching.policy = replace(watching.policy, mode=worker.k3_mode if path == "fast" else "auto")
    if worker.k3_twins is None:
        served = runner_of(worker).model.fast
        served.refusals = () if path == "fast" else (Refusal(Reason.MODE_OFF, WHY),)
        return
    graphs, plans = worker.k3_twins[path]
    runner_of(worker).cudagraph_manager.graphs = graphs
    watching._plans = plans
