"""Requests that the guard ends, through vLLM's real engine: the client sees an error, the others see nothing.

The workers are separate processes, as a server's are; faults are injected there by a remote call.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

BLOCK = 128
MARKED = 77  # first token of the prompts whose logits go bad
COUNT = 12


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from vllm import LLM

    from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import write_tiny

    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the tests send functions to the workers
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        llm = LLM(
            str(folder),
            dtype="float32",  # tokens are compared across batches of other sizes, which round differently in BF16
            max_model_len=1024,
            max_num_seqs=8,
            num_gpu_blocks_override=64,
            enable_prefix_caching=True,
            additional_config={"kimi_k3_fast": {"events": {"path": str(folder / "events.jsonl")}}},
        )
        yield llm
        llm.llm_engine.engine_core.shutdown()


def poison(worker: Any, value: float, from_token: int) -> None:
    """From then on the logits rows of marked requests turn to `value` once they have `from_token` tokens."""
    runner = worker.model_runner
    model = runner.model
    if not hasattr(model, "k3_true_logits"):
        model.k3_true_logits = model.compute_logits

    def compute_logits(hidden: Any) -> Any:
        logits = model.k3_true_logits(hidden)
        for row, request in enumerate(runner.input_batch.req_ids):
            state = runner.requests[request]
            if state.prompt_token_ids[0] == 77 and len(state.output_token_ids) >= from_token:
                logits[row] = value
        return logits

    model.compute_logits = compute_logits


def heal(worker: Any) -> None:
    model = worker.model_runner.model
    if hasattr(model, "k3_true_logits"):
        model.compute_logits = model.k3_true_logits


def set_policy(worker: Any, **fields: Any) -> None:
    import dataclasses

    from vllm.model_executor.models.kimi_k3_fast import guard

    guard.current().policy = dataclasses.replace(guard.current().policy, **fields)


def retire(worker: Any, keys: list[str]) -> None:
    from vllm.model_executor.models.kimi_k3_fast import guard

    guard.current()._quarantine = set(keys)


def fill_disk(worker: Any, full: bool) -> None:
    """From then on the worker's files cannot grow, by the kernel's own word; or can again."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0 if full else hard, hard))


def report(llm: Any) -> dict[str, Any]:
    return json.loads(llm.collective_rpc("k3fast_report")[0])


def run(llm: Any, prompts: list[list[int]]) -> list[Any]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)


def prompts(*firsts: int, length: int = 2 * BLOCK + 20) -> list[list[int]]:
    return [[first, *((7 * first + 3 * i) % 200 + 20 for i in range(length - 1))] for first in firsts]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_ends_its_request_and_no_other(llm, value):
    batch = prompts(MARKED, 30, 31)
    llm.reset_prefix_cache()
    clean = [output.outputs[0].token_ids for output in run(llm, batch)]
    llm.reset_prefix_cache()
    before = report(llm)["violations"]["by_reason"].get("non_finite", 0)
    llm.collective_rpc(poison, args=(value, 4))
    bad, *others = run(llm, batch)
    llm.collective_rpc(heal)
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].stop_reason == "non_finite"
    assert list(bad.outputs[0].token_ids) == list(clean[0][:4]), "the token of the bad row is not handed out"
    assert [list(output.outputs[0].token_ids) for output in others] == [list(tokens) for tokens in clean[1:]]
    after = report(llm)
    assert after["violations"]["by_reason"]["non_finite"] == before + 1
    assert bad.request_id.split("-")[0] in after["violations"]["last"][-1]["where"]["request"]
    again, other = run(llm, batch[:2])
    assert again.num_cached_tokens == 0, "the blocks of the bad request are forgotten"
    assert other.num_cached_tokens >= BLOCK, "those of the others are not"
    assert list(again.outputs[0].token_ids) == list(clean[0])


def test_require_ends_the_requests_of_a_decode_step_that_fell_back(llm):
    batch = prompts(40, 41)
    run(llm, batch)
    keys = list(report(llm)["plan_keys"])
    assert keys, "the fast path ran"
    llm.collective_rpc(retire, args=(keys,))
    llm.collective_rpc(set_policy, kwargs={"mode": "require"})
    ended = run(llm, batch)
    llm.collective_rpc(set_policy, kwargs={"mode": "require", "allow": ("plan_quarantined",)})
    allowed = run(llm, batch)
    llm.collective_rpc(set_policy, kwargs={"mode": "auto", "allow": ()})
    llm.collective_rpc(retire, args=([],))
    assert {output.outputs[0].finish_reason for output in ended} == {"error"}
    assert {output.outputs[0].stop_reason for output in ended} == {"plan_quarantined"}
    assert {output.outputs[0].finish_reason for output in allowed} == {"length"}
    assert report(llm)["counters"]["require_failed_steps"] >= 1


def test_the_report_of_a_run_follows_from_its_event_file(llm):
    from vllm.model_executor.models.kimi_k3_fast.guard.totals import recompute

    run(llm, prompts(50, 51, 52))
    live = report(llm)
    events = live.pop("events")
    deadline = time.monotonic() + 10
    while (again := recompute([Path(events["path"])])) != live and time.monotonic() < deadline:
        time.sleep(0.1)
    assert again == live


def test_a_full_event_disk_slows_and_loses_no_request(llm):
    from vllm.model_executor.models.kimi_k3_fast.guard.totals import recompute

    batch = prompts(55, 56, length=40)
    clean = [output.outputs[0].token_ids for output in run(llm, batch)]
    began = time.monotonic()
    run(llm, batch)
    usual = time.monotonic() - began
    before = report(llm)
    llm.collective_rpc(fill_disk, args=(True,))
    try:
        began = time.monotonic()
        full = [output.outputs[0].token_ids for output in run(llm, batch)]
        took = time.monotonic() - began
        deadline = time.monotonic() + 10
        while (during := report(llm))["events"]["write_errors"] == before["events"][
            "write_errors"
        ] and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        llm.collective_rpc(fill_disk, args=(False,))
    assert full == clean
    assert took < 2 * usual + 1.0, "no step waits for the disk"
    assert during["events"]["write_errors"] > before["events"]["write_errors"]
    assert "File too large" in during["events"]["last_error"]
    assert during["violations"] == before["violations"]
    deadline = time.monotonic() + 10
    while (live := report(llm))["events"]["waiting"] and time.monotonic() < deadline:
        time.sleep(0.1)
    events = live.pop("events")
    assert (events["lost"], events["waiting"]) == (0, 0)
    assert recompute([Path(events["path"])]) == live, "what waited was written once there was room"


def test_every_patch_has_run_where_it_is_installed(llm):
    run(llm, prompts(60))
    patches = report(llm)["patches"]
    assert {name for name in patches} >= {"1", "2", "3", "engine core 2", "engine core 3"}
    for name, hook in (
        ("1", "batch_dispatched"),
        ("2", "step_received"),
        ("3", "logits_checked"),
        ("engine core 2", "scheduled"),
    ):
        assert patches[name]["ran"][hook], (name, hook)
    assert set(patches["engine core 2"]["targets"].values()) <= {"installed", "waiting"}


def test_no_step_went_unrecorded_and_slots_were_followed(llm):
    found = report(llm)
    assert set(found["violations"]["by_reason"]) <= {"non_finite"}
    assert found["counters"]["slots_allocated"] > 0
    assert found["counters"]["slots_freed"] > 0
    assert found["counters"]["slots_copied"] > 0, "a prefix hit starts from a copy of the state behind it"
