"""The gate on a machine that lm-eval is not on: the questions go there in a file, and the answers come back in one.

    python evals/offline.py ask QUESTIONS                          # here: lm-eval writes down what it would ask, wave by wave
    python evals/offline.py answer CHECKPOINT QUESTIONS ANSWERS    # there: both servers; the standard library and vLLM
    python evals/offline.py judge ANSWERS                          # here: the same gate, on the recorded answers

`ask` and `judge` run the gate itself against a local server: one that only takes notes, and one that plays a record back. So
tasks, scores and verdict are those of `make eval`, and so is the guard's report, taken before and after on the far machine.

On a GPU both servers start together, since starting is most of the time, and are asked one after the other. Options of `vllm
serve` go behind `--` and win over those below: `answer CHECKPOINT QUESTIONS ANSWERS -- --kv-cache-memory-bytes 2000000000`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MODEL = "k3-tiny"
CHAT = "/v1/chat/completions"
GPU = Path("/dev/nvidiactl")
# Room for two servers of a small model on one card; a cache of given size is not measured for, and the share is only checked.
ON_GPU = (
    "--dtype",
    "bfloat16",
    "--kv-cache-memory-bytes",
    str(4 << 30),
    "--gpu-memory-utilization",
    "0.05",
    "--compilation-config",
    '{"cudagraph_capture_sizes": [1, 2, 4, 8], "cudagraph_mode": "FULL_AND_PIECEWISE"}',
)
FORK = "vllm.model_executor.models.kimi_k3_fast:register"
GOT = {"models": "/v1/models", "report": "/k3fast/report", "metrics": "/metrics"}  # what the gate reads before and after


def key(question: dict[str, Any]) -> str:
    """Names a question: its messages and its seed."""
    return hashlib.sha256(json.dumps([question["messages"], question.get("seed")]).encode()).hexdigest()


# -- local servers ---------------------------------------------------------------------------------------------------------------
class Notes:
    """Takes down each question, and answers with its number."""

    def __init__(self) -> None:
        self.questions: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def get(self, path: str) -> tuple[int, Any]:
        return (200, {"data": [{"id": MODEL}]}) if path == GOT["models"] else (404, {})

    def post(self, question: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            number = len(self.questions)
            self.questions.append(question)
        choice = {"message": {"role": "assistant", "content": str(number)}, "finish_reason": "stop"}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": 0, "completion_tokens": 0}}


class Playback:
    """Answers as an arm on another machine did. A question that was not asked there is an error, as is one asked too often."""

    def __init__(self, arm: dict[str, Any]) -> None:
        self._arm, self._asked = arm, False
        self._answers: dict[str, list[Any]] = defaultdict(list)
        for answer in arm["answers"]:
            self._answers[answer["key"]].append(answer)

    def get(self, path: str) -> tuple[int, Any]:
        name = next((name for name, route in GOT.items() if route == path), None)
        found = self._arm["after" if self._asked else "before"].get(name)
        return (404, {}) if found is None else (200, found)

    def post(self, question: dict[str, Any]) -> tuple[int, Any]:
        self._asked = True
        left = self._answers[key(question)]
        if not left:
            return 500, {"error": {"message": "expected a recorded answer, found none: ask again, with this checkout's tasks"}}
        answer = left.pop(0)
        return answer["status"], answer["body"]


@contextlib.contextmanager
def local_server(what: Notes | Playback) -> Iterator[str]:
    """Its URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def reply(self, status: int, body: Any) -> None:
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.reply(*what.get(self.path))

        def do_POST(self) -> None:
            self.reply(*what.post(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


# -- the three steps -------------------------------------------------------------------------------------------------------------
def ask(suite_name: str, file: Path, evals: Path | None = None) -> int:
    """Write the suite's questions, a wave in each line. The number of questions."""
    from vllm.model_executor.models.kimi_k3_fast.evaluation import arm, suites

    suite, notes = suites.load(suite_name, evals or suites.EVALS), Notes()
    with local_server(notes) as url, tempfile.TemporaryDirectory() as folder:
        arm.run(url, suite, "questions", Path(folder))
        replies = [json.loads(line) for line in (Path(folder) / "requests.jsonl").read_text().splitlines()]
    by_task: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for reply in replies:
        by_task.setdefault((reply["seed"], reply["task"]), []).append(reply)
    waves = []
    for (_, task), asked in by_task.items():
        asked.sort(key=lambda reply: reply["item"])
        size = suite.tasks[task].wave
        waves += [[notes.questions[int(r["text"])] for r in asked[i : i + size]] for i in range(0, len(asked), size)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(wave) + "\n" for wave in waves))
    return len(replies)


def fetch(url: str, timeout: float = 60.0) -> Any:
    """A route's body, as JSON where it is; None where the server has none."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, OSError):
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def put(url: str, question: dict[str, Any], timeout: float = 3600.0) -> dict[str, Any]:
    """One answer: status and body, whatever it is."""
    data, headers = json.dumps(question).encode(), {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + CHAT, data, headers), timeout=timeout) as answer:
            status, body = answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read().decode(errors="replace")
    except (OSError, ValueError) as error:
        status, body = 503, {"error": {"message": f"{type(error).__name__}: {error}"}}
    return {"key": key(question), "status": status, "body": body}


def answer(url: str, waves: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Ask a running server everything, each wave whole before the next one."""
    took = {"before": {name: fetch(url + route) for name, route in GOT.items()}}
    answers = []
    with ThreadPoolExecutor(max(map(len, waves))) as pool:
        for wave in waves:
            answers += pool.map(lambda question: put(url, question), wave)
    return {**took, "answers": answers, "after": {name: fetch(url + route) for name, route in GOT.items()}}


def plugin(folder: Path) -> dict[str, str]:
    """The environment in which vLLM finds the fork where it was put into vLLM's folder without being installed."""
    if any(point.name == "kimi_k3_fast" for point in entry_points(group="vllm.general_plugins")):
        return {}
    info = folder / "kimi_k3_fast-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kimi-k3-fast\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nkimi_k3_fast = {FORK}\n")
    return {"PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)])}


def answer_both(checkpoint: Path, questions: Path, folder: Path, settings: Mapping[str, Any] | None, more: list[str]) -> bool:
    """Both arms on this machine: mode off, then the fast path. settings: of the fork in the fast arm; None for what suits the
    machine. Whether every answer came. Raises ServerFailed."""
    from two_arms import SERVE, fast_mode

    from vllm.model_executor.models.kimi_k3_fast.cli.server import Server

    gpu = GPU.exists()
    if settings is None:
        settings = {"mode": "require", "allow_unvalidated": True} if gpu else {}
    waves = [json.loads(line) for line in questions.read_text().splitlines()]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **plugin(folder / "plugin")}
    if find_spec("flashinfer") is None:
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    servers = {}
    for name, mode in (("standard", fast_mode("off")), ("fast", fast_mode("auto", settings))):
        args = [*SERVE, *(ON_GPU if gpu else ()), *mode, *more]
        servers[name] = Server(checkpoint, args, log=folder / f"{name}.log", environ=environment)
    whole = True
    with contextlib.ExitStack() as running:
        if gpu:
            with ThreadPoolExecutor(len(servers)) as pool:
                for starting in [pool.submit(running.enter_context, server) for server in servers.values()]:
                    starting.result()
        for name, server in servers.items():
            with contextlib.nullcontext() if gpu else server:
                began = time.monotonic()
                record = answer(server.url, waves)
            (folder / f"{name}.json").write_text(json.dumps(record) + "\n")
            bad = [found for found in record["answers"] if found["status"] != 200]
            whole = whole and not bad
            seconds = time.monotonic() - began
            print(f"{name}: {len(record['answers'])} answers, {len(bad)} of them errors, in {seconds:.0f} s", flush=True)
            for found in bad[:3]:
                print(f"  {found['status']}: {str(found['body'])[:300]}", flush=True)
    return whole


def judge(suite: str, folder: Path, require_fast: float, evals: Path | None = None) -> tuple[int, str]:
    """The gate on both arms; its exit status and table. Raises run.CouldNotTell."""
    from vllm.model_executor.models.kimi_k3_fast.evaluation import run

    arms = {name: Playback(json.loads((folder / f"{name}.json").read_text())) for name in ("standard", "fast")}
    with local_server(arms["standard"]) as url:
        run.gate(url, suite, folder / "standard", require_fast=None, evals=evals)
    with local_server(arms["fast"]) as url:
        return run.gate(url, suite, folder / "fast", require_fast=require_fast, against=folder / "standard", evals=evals)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (("ask", ["questions"]), ("answer", ["checkpoint", "questions", "answers"]), ("judge", ["answers"])):
        command = commands.add_parser(name)
        for word in words:
            command.add_argument(word, type=Path)
        if name == "answer":
            command.add_argument("--settings", help="of the fast arm, as JSON; on a GPU require and allow_unvalidated by default")
        else:
            command.add_argument("--suite", default="tiny")
    commands.choices["judge"].add_argument("--require-fast", type=float, default=0.99)
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    own, serve = given[:end], given[end + 1 :]  # argparse gives up on options behind -- in a command of several
    options = parser.parse_args(own)
    if serve and options.command != "answer":
        parser.error("expected arguments of `vllm serve`, after --, with `answer` only")
    if options.command == "ask":
        print(f"{ask(options.suite, options.questions)} questions in {options.questions}")
        return 0
    if options.command == "answer":
        options.answers.mkdir(parents=True, exist_ok=True)
        settings = None if options.settings is None else json.loads(options.settings)
        return 0 if answer_both(options.checkpoint, options.questions, options.answers, settings, serve) else 1
    from vllm.model_executor.models.kimi_k3_fast.evaluation import run

    try:
        status, table = judge(options.suite, options.answers, options.require_fast)
    except run.CouldNotTell as error:
        print(error, file=sys.stderr)
        return run.COULD_NOT_TELL
    print(table)
    return status


if __name__ == "__main__":
    sys.exit(main())
