"""The guard on the API server: `GET /k3fast/report`, the page at `/k3fast`, and the series on `/metrics`.

One call to the workers serves everybody who asks within a second: a thousand requests cost the engine one. vLLM attaches an
endpoint plug-in only if `VLLM_PLUGINS` names it. Installing the fork is the operator's word that its routes are wanted, so
wherever the fork's general plug-in is loaded, `install` adds its routes to the plug-ins that vLLM found; other plug-ins stay
behind vLLM's own gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import metrics
from .summary import summarise

logger = logging.getLogger(__name__)

METHOD = "k3fast_report"  # of a worker: its rank's report as JSON text
TTL_SECONDS = 1.0
REFRESH_SECONDS = 5.0  # keeps the series fresh where nobody asks for a report
TIMEOUT_SECONDS = 10.0
PAGE = Path(__file__).with_name("page.html")


class ReportCache:
    """The newest report of all ranks, gathered at most once at a time and at most once in a second."""

    def __init__(
        self,
        gather: Callable[[], Awaitable[Sequence[str]]],
        process: Callable[[], Mapping[str, Any]] = dict,
        ttl: float = TTL_SECONDS,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        self._gather, self._process, self._ttl, self._timeout = gather, process, ttl, timeout
        self._task: asyncio.Task[None] | None = None
        self._gathered = float("-inf")
        self.newest: dict[str, Any] | None = None

    async def get(self) -> dict[str, Any]:
        """A report not older than the TTL. Raises what gathering raised, TimeoutError where the engine does not answer."""
        if time.monotonic() - self._gathered > self._ttl:
            if self._task is None or self._task.done():
                self._task = asyncio.ensure_future(self._refresh())
            await asyncio.shield(self._task)
        assert self.newest is not None
        return self.newest

    async def _refresh(self) -> None:
        ranks = [json.loads(text) for text in await asyncio.wait_for(self._gather(), self._timeout)]
        self.newest = summarise(ranks, self._process())
        self._gathered = time.monotonic()

    async def keep_fresh(self, every: float = REFRESH_SECONDS) -> None:
        """Gather now and then until cancelled. An engine that does not answer is left to whoever asks."""
        while True:
            await asyncio.sleep(every)
            with contextlib.suppress(Exception):
                await self.get()


class Endpoints:
    """The fork's endpoint plug-in, in the form that vLLM asks for."""

    name = "kimi_k3_fast"
    required_tasks = ("generate",)

    def __init__(self, process: Callable[[], Mapping[str, Any]] = dict) -> None:
        self._process = process
        self._collector: metrics.ReportCollector | None = None

    def attach_router(self, app: Any) -> None:
        """Add the routes; until `init_state` has run they answer 503."""
        from starlette.responses import HTMLResponse, JSONResponse

        async def report(request: Any) -> JSONResponse:
            cache = getattr(request.app.state, "k3fast_reports", None)
            if cache is None:
                return _unavailable("the engine is not ready yet: ask again when GET /health answers 200")
            try:
                return JSONResponse(await cache.get())
            except TimeoutError:
                return _unavailable(f"the engine gave no report within {TIMEOUT_SECONDS:.0f} s: it may be busy or dead")
            except Exception as error:
                return _unavailable(f"the engine gave no report: {type(error).__name__}: {error}")

        async def page(request: Any) -> HTMLResponse:
            return HTMLResponse(PAGE.read_text(encoding="utf-8"))

        def _unavailable(why: str) -> JSONResponse:
            body = {"error": {"code": "report_unavailable", "message": why}}
            return JSONResponse(body, status_code=503, headers={"Retry-After": "5"})

        app.add_route("/k3fast/report", report, methods=["GET"])
        app.add_route("/k3fast", page, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """The engine is there: connect the routes and the series to it."""
        if engine_client is None:
            return
        state.k3fast_reports = ReportCache(lambda: engine_client.collective_rpc(METHOD), self._process)
        state.k3fast_refresh = asyncio.ensure_future(state.k3fast_reports.keep_fresh())
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            logger.warning("Kimi K3 guard: no series on /metrics with several API servers; GET /k3fast/report has the numbers.")
        elif self._collector is None:
            self._collector = metrics.register(lambda: state.k3fast_reports.newest)


def install(worker_report: Callable[[], str], process: Callable[[], Mapping[str, Any]] = dict) -> None:
    """Give vLLM's workers the report method and its API server the routes. Safe to call twice.

    worker_report: the report of the process' rank as JSON text. process: what an API server says of itself.
    """
    import vllm.plugins
    from vllm.v1.worker.worker_base import WorkerBase

    if hasattr(WorkerBase, METHOD):
        return
    setattr(WorkerBase, METHOD, lambda worker: worker_report())
    found = vllm.plugins.load_endpoint_plugins

    def load_endpoint_plugins(supported_tasks: Any = None) -> list[Any]:
        wanted = bool(set(supported_tasks or ()) & set(Endpoints.required_tasks))
        return [*found(supported_tasks), *([Endpoints(process)] if wanted else [])]

    vllm.plugins.load_endpoint_plugins = load_endpoint_plugins
