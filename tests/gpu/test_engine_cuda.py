"""The fast path inside vLLM on one GPU: a rank slice of K3 in a real engine, stock's decode graphs and ours in turn.

One engine holds both sets of graphs over the same weights and caches (`benchmarks/twin_graphs.py`), so that only the decode path
differs. A few layers of the TP8 slice, random weights through stock's own loader. Takes a few minutes, most of them to compile.

    python -m pytest tests/gpu -q
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

ROOT = Path(__file__).parents[2]
LAYERS, SIZES, TOKENS, CONTEXT, TOP = 5, (1, 2, 4, 8), 24, 96, 20


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_ALLOW_INSECURE_SERIALIZATION="1", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import rank_slice
    import twin_graphs
    from vllm.model_executor.models import kimi_k3_fast

    rank_slice.register()
    kimi_k3_fast.register()
    folder = tmp_path_factory.mktemp("slice")
    (folder / "config.json").write_text(json.dumps(rank_slice.config(8, 1, LAYERS)))
    from vllm import LLM

    made = LLM(
        str(folder),
        load_format=rank_slice.LOAD_FORMAT,
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=max(SIZES),
        gpu_memory_utilization=0.6,
        compilation_config={"cudagraph_capture_sizes": list(SIZES), "cudagraph_mode": "FULL_AND_PIECEWISE"},
        additional_config={"kimi_k3_fast": {"mode": "require", "allow_unvalidated": True, "summary_seconds": 0}},
    )
    made.collective_rpc(twin_graphs.make)
    return made


def take(llm: Any, path: str) -> None:
    import twin_graphs

    llm.collective_rpc(twin_graphs.take, args=(path,))


def report() -> dict[str, Any]:
    from vllm.model_executor.models.kimi_k3_fast import guard

    return guard.current().report()


def prompts(count: int, length: int = CONTEXT) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(3, 20480) for _ in range(length + i)] for i in range(count)]


def complete(llm: Any, asked: list[list[int]], tokens: int = TOKENS) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Greedy tokens of each prompt, and the log-probabilities of the most likely tokens at each position."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=TOP)
    outputs = llm.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)
    return [
        (list(o.outputs[0].token_ids), [{t: v.logprob for t, v in row.items()} for row in o.outputs[0].logprobs]) for o in outputs
    ]


def text_model(llm: Any) -> Any:
    found: list[Any] = []
    llm.apply_model(found.append)
    return found[0]


def test_every_decode_graph_is_ours(llm):
    found = report()
    assert found["deployment"]["selected"], found["deployment"]["refusals"]
    fast = text_model(llm).fast
    assert sorted(fast.executor.ready) == list(SIZES)
    assert fast.executor.cost.kernels > 0 and found["deployment"]["mutations"][1]["name"] == "memory for routed experts"
    print(f"start-up: {fast.executor.cost}")


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_first_decode_step_has_stocks_logits(llm, batch):
    """Prefill is stock's in both; the log-probabilities of the next step differ by what BF16 rounds on the way."""
    asked, found = prompts(batch), {}
    for path in ("stock", "fast"):
        take(llm, path)
        found[path] = complete(llm, asked, tokens=2)
    for (ours, our_rows), (theirs, their_rows) in zip(found["fast"], found["stock"], strict=True):
        assert ours[0] == theirs[0], "the token after the prompt is stock's in both"
        both = our_rows[1].keys() & their_rows[1].keys()
        assert len(both) >= TOP // 2, "the most likely tokens are others"
        worst = max(abs(our_rows[1][t] - their_rows[1][t]) for t in both)
        assert worst < 0.25, f"log-probabilities differ by {worst:.3f}"


@pytest.mark.parametrize("batch", [1, 5, 8])
def test_greedy_tokens_are_stocks_but_for_ties(llm, batch):
    """Where the paths part, stock itself holds the two tokens for almost equally likely."""
    asked, found = prompts(batch), {}
    for path in ("stock", "fast"):
        take(llm, path)
        found[path] = complete(llm, asked)
    for row, ((ours, _), (theirs, likely)) in enumerate(zip(found["fast"], found["stock"], strict=True)):
        parted = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if parted is None:
            continue
        assert parted > 0
        margin = likely[parted][theirs[parted]] - likely[parted].get(ours[parted], float("-inf"))
        assert margin < 0.25, f"request {row} parts at token {parted}, where stock's margin is {margin:.3f}"


def test_decode_steps_are_counted_as_fast_and_nothing_is_violated(llm):
    take(llm, "fast")
    before = report()["steps"]
    complete(llm, prompts(8))
    after = report()
    steps = after["steps"]
    fast = steps["fast"]["decode_tokens"] - before["fast"]["decode_tokens"]
    standard = steps["standard"]["decode_tokens"] - before["standard"]["decode_tokens"]
    assert fast >= 8 * (TOKENS - 2) and fast / (fast + standard) > 0.9, steps["by_reason"]
    assert not after["violations"]["by_reason"], after["violations"]


def test_a_request_does_not_see_its_neighbours_or_the_padding(llm):
    """The same prompt alone and among others: equal but for the batch's own rounding, and the same twice to the bit."""
    take(llm, "fast")
    asked = prompts(3)
    alone, again = (complete(llm, asked[:1], tokens=2)[0] for _ in range(2))
    assert alone == again, "two runs of one step differ"
    among = complete(llm, asked, tokens=2)[0]
    both = alone[1][1].keys() & among[1][1].keys()
    assert len(both) >= TOP // 2 and max(abs(alone[1][1][t] - among[1][1][t]) for t in both) < 0.25


def test_padded_rows_write_no_state(llm):
    """Three requests in a graph of four rows: the null slot and the null block stay as they were."""
    import torch

    take(llm, "fast")
    complete(llm, prompts(3), tokens=2)
    caches = text_model(llm).fast.executor.bound()
    held = [*caches.conv.values(), *caches.state.values(), *caches.latent.values()]
    before = [cache[0].clone() for cache in held]
    complete(llm, prompts(3), tokens=8)
    assert all(torch.equal(old, cache[0]) for old, cache in zip(before, held, strict=True))


def test_a_retired_plan_runs_stocks_path(llm):
    """Last: the plan stays retired in this process."""
    from vllm.model_executor.models.kimi_k3_fast import guard
    from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

    take(llm, "fast")
    watching = guard.current()
    policy, watching.policy = watching.policy, type(watching.policy)()  # `require` would end the requests
    try:
        watching.quarantine("decode/2/cute", Reason.NON_FINITE)
        before = report()["steps"]["by_reason"].get("plan_quarantined", 0)
        complete(llm, prompts(2), tokens=6)
        after = report()
        assert after["steps"]["by_reason"]["plan_quarantined"] >= before + 4
        assert "quarantine_bypassed" not in after["violations"]["by_reason"]
    finally:
        watching.policy = policy
