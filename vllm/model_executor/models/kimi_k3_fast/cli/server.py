"""A vLLM server as a child process: started, waited for, always ended. The demo and the server tests stand on it."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

START_SECONDS = 600.0
STOP_SECONDS = 30.0

# One GiB of cache serves the tiny checkpoint many times over; vLLM's own default would take a share of the machine.
SMALL_MACHINE = {"VLLM_CPU_KVCACHE_SPACE": "1"}


class ServerFailed(RuntimeError):
    """The server ended, or did not answer in time; the message carries the end of its log."""


def vllm_command() -> list[str]:
    """`vllm` of the running interpreter's environment, as the start of a command line; its module where vLLM is on the path but
    not installed. Raises ServerFailed without either."""
    script = Path(sys.executable).with_name("vllm")
    if script.is_file():
        return [str(script)]
    if importlib.util.find_spec("vllm.entrypoints") is None:
        raise ServerFailed(f"expected the command `vllm` at {script}, found none: install vLLM into this environment")
    return [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`vllm serve MODEL ARGS` on a loopback port, in a process group of its own.

    Entering waits until it answers and raises ServerFailed if it does not; leaving ends the whole group, the hard way in the end.
    `waiting` is called about once a second with the seconds passed and the last line of the log.
    """

    def __init__(
        self,
        model: Path | str,
        args: Sequence[str] = (),
        *,
        log: Path,
        port: int | None = None,
        environ: Mapping[str, str] | None = None,
        waiting: Callable[[float, str], None] | None = None,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.command = [*vllm_command(), "serve", str(model), "--host", "127.0.0.1", "--port", str(self.port), *args]
        self._environ = {**SMALL_MACHINE, **os.environ, **(environ or {})}
        self._waiting = waiting or (lambda seconds, line: None)
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=subprocess.STDOUT, env=self._environ, start_new_session=True
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        assert self.process is not None
        begun = time.monotonic()
        while not self._answers():
            passed = time.monotonic() - begun
            if (code := self.process.poll()) is not None:
                raise ServerFailed(
                    f"the server ended with exit code {code} before it answered; its log {self.log} ends:\n{self.tail()}"
                )
            if passed > START_SECONDS:
                raise ServerFailed(f"no answer within {START_SECONDS:.0f} s; the log {self.log} ends:\n{self.tail()}")
            self._waiting(passed, self.tail(1))
            time.sleep(1.0)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def tail(self, lines: int = 40) -> str:
        """The last lines of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def memory_bytes(self) -> int:
        """What the server and all its children hold now; pages that several of them share count once. Linux only."""
        import psutil

        assert self.process is not None
        parent = psutil.Process(self.process.pid)
        return sum(process.memory_full_info().pss for process in (parent, *parent.children(recursive=True)))

    def stop(self) -> None:
        """End the server and whatever it started. Safe to call twice."""
        if self.process is None:
            return
        for signum in (signal.SIGINT, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, signum)
            except ProcessLookupError:
                break
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()
        self.process = None
