"""The child process behind the demo and the server tests: its failures are told, and nothing of it outlives it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from vllm.model_executor.models.kimi_k3_fast.cli import server


def started(monkeypatch, tmp_path: Path, program: str) -> server.Server:
    """A `Server` whose `vllm` is a small Python program, which gets the port as the value of --port."""
    monkeypatch.setattr(server, "vllm_command", lambda: [sys.executable, "-c", program])
    return server.Server("model", log=tmp_path / "server.log")


ANSWERS = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""

STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"])
"""


def test_a_server_that_answers_is_entered_and_ended(monkeypatch, tmp_path) -> None:
    with started(monkeypatch, tmp_path, ANSWERS) as running:
        pid = running.process.pid
        assert running.memory_bytes() > 2**20
    assert not psutil.pid_exists(pid)
    assert running.process is None


def test_a_server_that_dies_says_why(monkeypatch, tmp_path) -> None:
    with (
        pytest.raises(server.ServerFailed, match=r"exit code 3(.|\n)*no such weights"),
        started(monkeypatch, tmp_path, "print('no such weights'); raise SystemExit(3)"),
    ):
        pass


def test_a_server_that_never_answers_is_given_up(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(server, "START_SECONDS", 1.0)
    with (
        pytest.raises(server.ServerFailed, match="no answer within 1 s"),
        started(monkeypatch, tmp_path, "import time; time.sleep(600)"),
    ):
        pass


def test_a_stubborn_server_and_its_children_are_ended(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(server, "STOP_SECONDS", 1.0)
    with started(monkeypatch, tmp_path, STUBBORN + ANSWERS) as running:
        family = [psutil.Process(running.process.pid), *psutil.Process(running.process.pid).children(recursive=True)]
        assert len(family) == 2
        time.sleep(0.5)  # the child has set its handler
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
