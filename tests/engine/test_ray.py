"""`--distributed-executor-backend ray`: two ranks on CPUs as Ray workers, of a Ray cluster that listens on the loopback only.

vLLM places its Ray workers by the device key of its platform, and the CPU platform has none: vLLM refuses. So these tests bring a
platform plug-in of their own, the CPU platform with the key "GPU", and a cluster that claims two GPUs which nothing touches.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, CONFIGS, GENERATED, Engine, check_one_decides_alone, tokens

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install ray)"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores"),
]

PROMPTS = {"step_prefill", "step_too_many_tokens"}  # reasons of steps that hold a prompt
PLATFORM = """
from vllm.platforms.cpu import CpuPlatform

class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"

def activate():
    return f"{__name__}.RayCpuPlatform"
"""
CLUSTER = """
import sys, ray
ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=100 << 20,
         log_to_driver=False, _node_ip_address="127.0.0.1", _temp_dir=sys.argv[1])
print("ADDRESS", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """The process that started Ray's; engines and servers started meanwhile find the cluster and the platform plug-in."""
    plugin = tmp_path_factory.mktemp("platform")
    (plugin / "ray_cpu_platform.py").write_text(PLATFORM)
    info = plugin / "ray_cpu_platform-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-cpu-platform\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\nray_cpu = ray_cpu_platform:activate\n")
    first, second = sorted(os.sched_getaffinity(0))[:2]
    here = [str(plugin), str(Path(__file__).parent), str(Path(__file__).parents[1] / "model")]
    environment = {
        "PYTHONPATH": os.pathsep.join([*here, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # of this cluster alone: Ray would keep one in the user's home
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"{first}|{second}",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the engine's process reads the platform plug-ins afresh
    }
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="k3") as folder:  # sockets need a short path
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.syspath_prepend(str(plugin))  # which a spawned process has from this one
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            address = next((line.split()[1] for line in process.stdout if line.startswith("ADDRESS")), "")
            assert address.startswith("127.0.0.1:"), "the cluster did not start"
            patch.setenv("RAY_ADDRESS", address)
            yield process
        finally:
            process.stdin.close()
            process.wait(60)


def test_ranks_in_ray_workers_give_the_tokens_of_the_reference_and_agree(cluster: object, tmp_path: Path) -> None:
    """A rank that once decides alone is found, with the step. The engine's environment, as it was after the cluster's start,
    is the workers' too: the fork's own variables need no listing."""
    settings = {"mode": "require", "agree_every": 8}
    with pytest.MonkeyPatch.context() as late:
        late.setenv("K3FAST_JOBS", "3")
        engine = Engine.start(tmp_path, CONFIGS["k3"], settings, tensor_parallel_size=2, distributed_executor_backend="ray")
    try:
        engine.run([tokens(n, 60 + n) for n in (1, 3, BLOCK, 300)])
        names, variables = zip(*engine.call(actor), strict=True)
        assert [name.rsplit("_", 1)[1] for name in names] == ["TP0", "TP1"]
        assert variables == ("3", "3")
        for report in engine.reports():
            assert report["steps"]["fast"]["steps"] >= GENERATED - 1
            assert set(report["steps"]["by_reason"]) <= PROMPTS
        check_one_decides_alone(engine)
    finally:
        engine.stop()


def actor(worker: Any) -> tuple[str, str | None]:
    """The name that vLLM gave this Ray actor, and a variable of its environment."""
    import ray

    return ray.get_runtime_context().get_actor_name(), os.environ.get("K3FAST_JOBS")


def test_a_server_reports_every_rank_and_ends_with_a_killed_worker(cluster: object, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from vllm.model_executor.models.kimi_k3_fast.cli.app import app
    from vllm.model_executor.models.kimi_k3_fast.cli.demo import SMALL_CACHE
    from vllm.model_executor.models.kimi_k3_fast.cli.server import Server
    from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import write_tiny

    write_tiny(tmp_path / "tiny")
    settings = {"kimi_k3_fast": {"mode": "require", "events": {"path": str(tmp_path / "events.jsonl")}}}
    args = ["--served-model-name", "tiny", "--max-model-len", "512", "--max-num-seqs", "8", *SMALL_CACHE]
    args += ["--tensor-parallel-size", "2", "--distributed-executor-backend", "ray", "--additional-config", json.dumps(settings)]
    with Server(tmp_path / "tiny", args, log=tmp_path / "server.log") as server, concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert [status for status, _ in pool.map(lambda n: complete(server.url, n, 24), range(1, 5))] == [200] * 4

        status, text = ask(f"{server.url}/k3fast/report")
        assert status == 200, text
        report = json.loads(text)
        assert (report["status"], report["ranks_agree"]) == ("healthy", True)
        assert [rank["rank"] for rank in report["ranks"]] == ["rank0", "rank1"]
        assert not any(patch["refusal"] for patch in report["api_server"]["patches"].values())
        for rank in report["ranks"]:
            assert rank["deployment"]["selected"] is True
            assert rank["steps"]["fast"]["steps"] > 0 and set(rank["steps"]["by_reason"]) <= PROMPTS
            patches = rank["patches"]
            assert {state for patch in patches.values() for state in patch["targets"].values()} <= {"installed", "waiting"}
            hooks = {"1": "batch_dispatched", "2": "step_received", "3": "logits_checked", "engine core 2": "scheduled"}
            assert all(patches[name]["ran"][hook] for name, hook in hooks.items())
        shown = CliRunner().invoke(app, ["report", server.url])
        assert shown.exit_code == 0 and all(f"rank{n}: fast path selected" in shown.output for n in (0, 1)), shown.output

        events = [(tmp_path / f"events.rank{n}.jsonl").read_text().splitlines() for n in (0, 1)]
        pids = [json.loads(first)["totals"]["start"]["pid"] for first, *_ in events]
        replies = [pool.submit(complete, server.url, n, 480) for n in (1, 2)]
        wait_for("the requests to decode", 60, lambda: running(server.url) == 2)
        os.kill(pids[1], signal.SIGKILL)
        assert all(reply.result()[0] != 200 for reply in replies)
        wait_for("the health route to say it", 60, lambda: ask(f"{server.url}/health")[0] != 200)
        wait_for("the other rank to end", 60, lambda: not alive(pids[0]))
        assert "rank=[1] died" in server.log.read_text(errors="replace")


def ask(url: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and text of an answer; 0 where there is none."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=180) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)


def complete(url: str, seed: int, count: int) -> tuple[int, str]:
    body = {"model": "tiny", "prompt": tokens(6 + seed, seed), "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return ask(f"{url}/v1/completions", body)


def running(url: str) -> float:
    """The requests in the engine's batch, by vLLM's own series."""
    lines = ask(f"{url}/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


def wait_for(what: str, seconds: float, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.2)


def alive(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
