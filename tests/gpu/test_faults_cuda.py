"""Faults on GPUs: NaN in a state, a graph of another width, a rank that stands still, a lost peer, a rank that dies.

Each must end in an error that clients and the health route show, in a counted fallback, or in the right tokens late. Never in
wrong tokens, and never in silence.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from asking import get, report, wait_for
from slices import NAME, rpc, workers

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

STALL_SECONDS = 15.0
LONG = 3000  # tokens: some seconds of decoding
PROMPTS = [[11 + i, 700 - i, 5 * i + 20] for i in range(8)]


# -- inside an engine, on one GPU ------------------------------------------------------------------------------------------------
def start(llm: Any, prompts: list[list[int]], steps: int, tokens: int) -> dict[str, list[int]]:
    """Add requests fault-0, fault-1, ... of so many tokens and take some steps. Their tokens so far."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        llm.llm_engine.add_request(f"fault-{i}", {"prompt_token_ids": prompt}, params)
    seen, so_far = 0, {}
    while seen < steps:
        outputs = llm.llm_engine.step()
        seen += any(out.outputs[0].token_ids for out in outputs)
        so_far |= {out.request_id: list(out.outputs[0].token_ids) for out in outputs}
    return so_far


def finish(llm: Any) -> dict[str, tuple[str, list[int]]]:
    """Name -> (finish reason, tokens) of every request."""
    done = {}
    while llm.llm_engine.has_unfinished_requests():
        for out in llm.llm_engine.step():
            if out.finished:
                done[out.request_id] = (out.outputs[0].finish_reason, list(out.outputs[0].token_ids))
    return done


def take(llm: Any, path: str) -> None:
    import twin_graphs

    llm.collective_rpc(twin_graphs.take, args=(path,))


def reported(llm: Any) -> dict[str, Any]:
    return json.loads(llm.collective_rpc("k3fast_report")[0])


def poison_states(worker: Any, request: str) -> int:
    """NaN into every recurrent state of that request; the number of slots."""
    import torch
    import twin_graphs

    from vllm.model_executor.models.kimi_k3_fast import guard

    torch.cuda.synchronize()  # between two steps
    slots = [slot for slot, owner in guard.current().ledger.writer.items() if owner.startswith(request)]
    for state in twin_graphs.fast_of(worker).executor.caches.state.values():
        for slot in slots:
            state[slot] = float("nan")
    torch.cuda.synchronize()
    return len(slots)


def check_every_step(worker: Any, policy: str) -> None:
    """Put graphs in force that compare every step with stock's, as the setting `shadow` does at capture."""
    import twin_graphs

    from vllm.model_executor.models.kimi_k3_fast import guard
    from vllm.model_executor.models.kimi_k3_fast.fast.cuda_choices import Choices
    from vllm.model_executor.models.kimi_k3_fast.fast.cuda_shadow import Checked, Watch

    fast, runner, watching = twin_graphs.fast_of(worker), twin_graphs.runner_of(worker), guard.current()
    manager, ours = runner.cudagraph_manager, worker.k3_twins["fast"][0]
    if not hasattr(worker, "k3_checked"):
        choices = Choices(fast.executor.model, fast.executor.ids)
        worker.k3_checked = choices, twin_graphs.captured(worker, choices)  # before the policy asks for shadow at every capture
        choices.check_reached()
    choices, stock = worker.k3_checked
    watching.policy = replace(watching.policy, shadow_every=1, mode="auto", policy=policy)
    made = Watch(watching, fast.executor.caches, lambda: manager.hidden_states, runner.input_buffers.is_padding, choices)
    plans = {graph.padded_tokens: plan for graph, plan in watching.planned_graphs.items()}
    manager.graphs = {
        desc: Checked(made, desc.num_tokens, plans[desc.num_tokens], graph, stock[desc]) for desc, graph in ours.items()
    }


def swap_widths(worker: Any, one: int, other: int) -> None:
    """From now on a batch of `one` replays the fast graph of `other`."""
    import twin_graphs

    graphs = twin_graphs.runner_of(worker).cudagraph_manager.graphs
    by_width = {desc.num_tokens: graph for desc, graph in graphs.items()}
    by_width[one].fast = by_width[other].fast


def restore(worker: Any, policy: Any, plan: str) -> None:
    from vllm.model_executor.models.kimi_k3_fast import guard

    guard.current()._quarantine.discard(plan)
    guard.current().policy = policy


def test_nan_in_a_state_ends_its_request_alone(llm: Any) -> None:
    take(llm, "fast")
    start(llm, PROMPTS[:4], 10, 200)
    sound = finish(llm)
    assert {reason for reason, _ in sound.values()} == {"length"}
    before = reported(llm)
    so_far = start(llm, PROMPTS[:4], 10, 200)
    (slots,) = llm.collective_rpc(poison_states, args=("fault-2",))
    assert slots > 0
    done = finish(llm)
    assert done["fault-2"][0] == "error" and len(done["fault-2"][1]) < 200
    for name in ("fault-0", "fault-1", "fault-3"):
        reason, tokens = done[name]
        assert reason == "length" and len(tokens) == 200 and tokens[: len(so_far[name])] == so_far[name], name
    print("as without a fault:", [name for name in done if done[name] == sound[name]])
    after = reported(llm)
    assert after["violations"]["by_reason"]["non_finite"] > before["violations"]["by_reason"].get("non_finite", 0)
    start(llm, PROMPTS[:4], 10, 200)
    assert {reason for reason, _ in finish(llm).values()} == {"length"}, "the ended request's slots are clean for the next one"
    again = reported(llm)["violations"]["by_reason"]
    assert again["non_finite"] == after["violations"]["by_reason"]["non_finite"]


def test_a_graph_of_another_width_is_found_and_retired(llm: Any) -> None:
    from vllm.model_executor.models.kimi_k3_fast import guard

    take(llm, "fast")
    policy = guard.current().policy
    kinds = ("shadow_logits", "shadow_state", "shadow_choice")

    def found() -> int:
        return sum(reported(llm)["violations"]["by_reason"].get(kind, 0) for kind in kinds)

    try:
        llm.collective_rpc(check_every_step, args=("report",))
        before = found()
        start(llm, PROMPTS[:4], 6, 60)
        finish(llm)
        sound = found() - before
        print(f"{sound} findings in some 60 sound steps; worst ratio {reported(llm)['gauges'].get('shadow_worst_ratio')}")
        llm.collective_rpc(check_every_step, args=("quarantine",))
        llm.collective_rpc(swap_widths, args=(4, 2))
        retired = reported(llm)["steps"]["by_reason"].get("plan_quarantined", 0)
        before = found()
        start(llm, PROMPTS[:4], 6, 60)
        done = finish(llm)
        after = reported(llm)
        assert found() > before, after["violations"]
        assert any("decode/4/cute" in str(entry) for entry in after["quarantined"]), after["quarantined"]
        assert after["steps"]["by_reason"]["plan_quarantined"] > retired + 10, "what follows is counted as standard"
        assert {reason for reason, _ in done.values()} == {"length"}
        assert sound == 0, "the check cries wolf: behind one choice of experts a sound step differs by rounding alone"
    finally:
        llm.collective_rpc(restore, args=(policy, "decode/4/cute"))
        take(llm, "fast")


# -- servers on all GPUs ---------------------------------------------------------------------------------------------------------
def complete(url: str, prompt: list[int], tokens: int, timeout: float = 120.0) -> tuple[int, str]:
    """Status and text of a greedy completion; status 0 where the connection broke."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=timeout) as answer:
            return answer.status, json.load(answer)["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        return 0, f"{type(error).__name__}: {error}"


def all_at_once(url: str, tokens: int, during: Any = None, after: float = 1.0) -> list[tuple[int, str]]:
    """All prompts together; `during` is called when they have decoded for `after` seconds."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = [pool.submit(complete, url, prompt, tokens) for prompt in PROMPTS]
        if during is not None:
            time.sleep(after)
            during()
        return [future.result() for future in asked]


def alive(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stall(server: Any) -> None:
    """A rank is stopped while a request decodes: its GPU ends what it has, and the others wait for it."""
    wanted = complete(server.url, PROMPTS[0], LONG)
    assert wanted[0] == 200, wanted
    stopped, began = workers(server.url)[-1], time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(complete, server.url, PROMPTS[0], LONG)
        time.sleep(1.0)
        assert not asked.done(), "it was done before: the test tests nothing"
        os.kill(stopped, signal.SIGSTOP)
        threading.Timer(STALL_SECONDS, os.kill, (stopped, signal.SIGCONT)).start()
        found = asked.result()
    assert time.monotonic() - began > STALL_SECONDS, "it was done before: the test tests nothing"
    if found[0] == 200:
        assert found == wanted, "the tokens of a late rank are those of a punctual one"
        assert get(f"{server.url}/health")[0] == 200
        assert all(rank["violations"]["by_reason"] == {} for rank in report(server.url)["ranks"])
    else:
        wait_for("the health route to say it", 60, lambda: get(f"{server.url}/health")[0] != 200)
        pytest.fail(f"waited for by none, and given up by all: {found}")


def test_a_rank_that_stands_still_is_waited_for(stock_server: Any) -> None:
    stall(stock_server)


def test_a_rank_that_stands_still_is_waited_for_with_mailboxes(mailbox_server: Any) -> None:
    """Ranks first meet in stock's all-reduce of the embeddings, which waits for ever; a mailbox waits ten seconds behind it."""
    stall(mailbox_server)


def test_a_rank_that_dies_ends_every_request_and_the_server_says_so(stock_server: Any) -> None:
    """Last of its server."""
    assert {status for status, _ in all_at_once(stock_server.url, 8)} == {200}
    *others, last = workers(stock_server.url)
    replies = all_at_once(stock_server.url, LONG, lambda: os.kill(last, signal.SIGKILL))
    assert all(status != 200 for status, _ in replies), [status for status, _ in replies]
    wait_for("the health route to say it", 60, lambda: get(f"{stock_server.url}/health")[0] != 200)
    wait_for("the other ranks to end", 120, lambda: not any(map(alive, others)))


def test_a_lost_peer_ends_every_request_and_the_server_and_the_guard_say_so(mailbox_server: Any, early: Any) -> None:
    """Last of its server. What a kernel does whose wait runs out, a worker does here: the health word says which rank is lost."""
    assert {status for status, _ in all_at_once(mailbox_server.url, 8)} == {200}
    pids = workers(mailbox_server.url)
    lost = str(len(pids) - 1)
    began = time.monotonic()

    def lose() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # the engine may end before it answers
            rpc(mailbox_server.url, "k3_lose_peer", lost)

    replies = all_at_once(mailbox_server.url, LONG, lose)
    assert all(status != 200 for status, _ in replies), [status for status, _ in replies]
    wait_for("the health route to say it", 60, lambda: get(f"{mailbox_server.url}/health")[0] != 200)
    print(f"every request ended and the server said so after {time.monotonic() - began:.0f} s")
    wait_for("the ranks to end", 120, lambda: not any(map(alive, pids)))
    assert f"Rank {lost} of the tensor-parallel group did not answer" in mailbox_server.log.read_text(errors="replace")
    events = [json.loads(line) for file in early.events.iterdir() for line in file.read_text().splitlines()]
    peers = {str(event["where"]["peer"]) for event in events if event.get("reason") == "peer_lost"}
    assert peers == {lost}, peers
