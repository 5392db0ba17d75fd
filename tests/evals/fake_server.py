"""An OpenAI-compatible server of the standard library, with a guard's report: what the gate sees, made to order."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Behaviour:
    """answer: messages -> (text, finish reason). prompt_tokens: messages -> usage. fast_share: what the guard counts as fast.

    report: False answers 404, as stock vLLM does. status: other than 200 fails requests for which `fails` holds.
    """

    answer: Callable[[list[dict[str, Any]]], tuple[str | None, str | None]]
    prompt_tokens: Callable[[list[dict[str, Any]]], int]
    fast_share: float = 1.0
    report: bool = True
    fails: Callable[[list[dict[str, Any]]], bool] = lambda messages: False
    violations: dict[str, int] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=lambda: {"speculation": "None"})
    restarts: bool = False
    metrics: str = ""
    seen: list[dict[str, Any]] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    behaviour: Behaviour
    lock: threading.Lock
    decoded: list[int]

    def log_message(self, *args: Any) -> None:
        pass

    def _send(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        b = self.behaviour
        if self.path == "/v1/models":
            self._send(200, {"data": [{"id": "fake"}]})
        elif self.path == "/metrics":
            self._send(200, b.metrics)
        elif self.path == "/k3fast/report" and b.report:
            fast = round(self.decoded[0] * b.fast_share)
            standard = self.decoded[0] - fast
            steps = {
                "fast": {"decode_tokens": fast},
                "standard": {"decode_tokens": standard},
                "by_reason": {"step_too_many_tokens": standard} if standard else {},
            }
            violations = {"by_reason": b.violations if self.decoded[0] else {}}
            pid = 2 if b.restarts and self.decoded[0] else 1
            rank = {"pid": pid, "steps": steps, "violations": violations, "deployment": {"facts": b.facts}}
            self._send(200, {"ranks": [rank], "ranks_agree": True})
        else:
            self._send(404, {"error": "no such route"})

    def do_POST(self) -> None:
        b = self.behaviour
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        messages = request["messages"]
        with self.lock:
            b.seen.append(request)
        if b.fails(messages):
            self._send(500, {"error": {"message": "out of luck"}})
            return
        text, finish = b.answer(messages)
        tokens = len((text or "").split()) + 1
        with self.lock:
            self.decoded[0] += tokens - 1
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
        self._send(200, {"choices": [choice], "usage": {"prompt_tokens": b.prompt_tokens(messages), "completion_tokens": tokens}})


@contextmanager
def serve(behaviour: Behaviour) -> Iterator[str]:
    """The URL of a server that behaves so."""
    handler = type("Handler", (_Handler,), {"behaviour": behaviour, "lock": threading.Lock(), "decoded": [0]})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
