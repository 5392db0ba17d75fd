"""Tests of the served model on GPUs: whole servers and engines of rank slices. All are marked `gpu`, and skipped without one.

Starting an engine takes most of the time, so one serves many tests, and all that the selected tests ask for start at once, in the
background, when the first test begins; before that their kernels are compiled, once for all. A test that ends its server is the
last of those that use it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
# for `slices`, for `asking` and `load_clients`, for `rank_slice`
sys.path[:0] = [str(TESTS / "gpu"), str(TESTS / "server"), str(TESTS.parent / "benchmarks")]

SIZES = (1, 2, 4, 8)
ENGINE, SERVERS = "llm", ("stock_server", "mailbox_server", "load_server")
took: dict[str, float] = {}


class Early:
    """Servers by the name of their fixture, started in the background."""

    def __init__(self, folder: Path, names: set[str]) -> None:
        import slices

        self._pool = ThreadPoolExecutor(len(SERVERS))
        self._servers: dict[str, Any] = {}
        self._started: dict[str, Future[Any]] = {}
        self.events = folder / "events"
        self.events.mkdir()
        ranks = max((count for count in (1, 2, 4, 8) if count <= slices.gpus()), default=0)
        if ranks < 2:
            names = names - {"stock_server", "mailbox_server"}
        if not ranks or not names:
            return
        began = time.monotonic()
        slices.compile_kernels(
            [
                *([(1, SIZES, False)] if ENGINE in names else []),
                *([(ranks, SIZES, False)] if "stock_server" in names else []),
                *([(ranks, SIZES, True)] if "mailbox_server" in names else []),
                *([(ranks, slices.sizes(64), ranks > 1)] if "load_server" in names else []),
            ]
        )
        took["kernels"] = time.monotonic() - began
        mailbox = {"exchange": "mailbox"} if ranks > 1 else {}
        checked = slices.fork(policy="report", audit={"every": 8}, shadow={"every": 16}, agree_every=64, **mailbox)
        event_file = {"events": {"path": str(self.events / "mailbox.jsonl")}}
        made = {
            "stock_server": lambda: slices.serve(folder / "stock", ranks, slices.fork(exchange="stock"), "gpu-stock.log", 8),
            "mailbox_server": lambda: slices.serve(
                folder / "mailbox", ranks, slices.fork(exchange="mailbox", **event_file), "gpu-mailbox.log", 8
            ),
            "load_server": lambda: slices.serve(
                folder / "load", ranks, checked, "gpu-load.log", 64, enable_prefix_caching=True, num_gpu_blocks_override=BLOCKS
            ),
        }
        for name in SERVERS:
            if name in names:
                self._servers[name] = made[name]()
                self._started[name] = self._pool.submit(self._start, name)

    def _start(self, name: str) -> Any:
        began = time.monotonic()
        self._servers[name].__enter__()
        took[name] = time.monotonic() - began
        return self._servers[name]

    def get(self, name: str) -> Any:
        if name not in self._started:
            pytest.skip("ranks need two GPUs")
        return self._started[name].result()

    def stop(self) -> None:
        """Those that are still starting, too."""
        with ThreadPoolExecutor(len(SERVERS)) as pool:
            list(pool.map(lambda server: server.stop(), self._servers.values()))
        self._pool.shutdown()


BLOCKS = int(os.environ.get("K3FAST_LOAD_BLOCKS", "260"))  # of the load's cache: 64 requests need more


@pytest.fixture(scope="session", autouse=True)
def early(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Early]:
    own = [item for item in request.session.items if Path(__file__).parent in item.path.parents]
    names = {name for item in own for name in getattr(item, "fixturenames", ())} & {ENGINE, *SERVERS}
    made = Early(tmp_path_factory.mktemp("early"), names)
    yield made
    made.stop()


@pytest.fixture
def stock_server(early: Early) -> Any:
    """The slice on all GPUs, ranks sum by stock's all-reduce."""
    return early.get("stock_server")


@pytest.fixture
def mailbox_server(early: Early) -> Any:
    """The slice on all GPUs, ranks sum through mailboxes."""
    return early.get("mailbox_server")


@pytest.fixture
def load_server(early: Early) -> Any:
    """The slice on all GPUs with audit, shadow, and less cache than 64 requests need."""
    return early.get("load_server")


@pytest.fixture(scope="session")
def llm(early: Early, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine on one GPU in this process, with stock's decode graphs beside the fast ones: which are in force is a word."""
    import slices

    folder = tmp_path_factory.mktemp("slice")
    for name, value in slices.environment(folder / "entry").items():
        os.environ[name] = value
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    import rank_slice
    import twin_graphs
    from vllm.model_executor.models import kimi_k3_fast

    rank_slice.register()
    kimi_k3_fast.register()
    slices.remember_steps()
    (folder / "config.json").write_text(json.dumps(slices.config(1)))
    from vllm import LLM

    began = time.monotonic()
    settings = slices.fork(summary_seconds=0)
    made = LLM(str(folder), skip_tokenizer_init=True, additional_config=settings, **slices.options(1, max(SIZES)))
    made.collective_rpc(twin_graphs.make)
    took["llm"] = time.monotonic() - began
    return made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if took:
        terminalreporter.section("starts on the GPUs")
        terminalreporter.write_line(", ".join(f"{name} {seconds:.0f} s" for name, seconds in took.items()))
