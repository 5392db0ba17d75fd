"""One arm: the suite run once against one server, with what the server said of every request and the guard of every step."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .suites import Suite

REPORT_ROUTE = "/k3fast/report"
SPECULATION_METRICS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")


class NoServer(RuntimeError):
    """The server does not answer what the gate has to know; the message says what was asked."""


@dataclass
class Item:
    """One prompt under one seed: its scores by metric, and the request's account (see `client.Reply`, without the texts).

    group: what the task sorts its items by (a bin of lengths, a number of steps); empty where it does not.
    """

    item: int
    group: str
    seed: int
    prompt_sha256: str
    prompt_tokens: int
    expected_tokens: int | None
    prompt_characters: int
    completion_tokens: int
    finish: str
    error: str
    reply_sha256: str
    scores: dict[str, float]


@dataclass
class Arm:
    """Everything that the gate judges, as plain data: an arm read from its file is judged like one just run."""

    suite: str
    label: str
    model: str
    started: float
    seconds: float
    report_before: dict[str, Any] | None
    report_after: dict[str, Any] | None
    speculation: dict[str, float]  # counted by the server while the arm ran
    items: dict[str, list[Item]] = field(default_factory=dict)  # by task, seed after seed
    lost: list[str] = field(default_factory=list)  # what lm-eval should have given back and did not

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Arm:
        text = json.loads(path.read_text())
        text["items"] = {task: [Item(**item) for item in items] for task, items in text["items"].items()}
        return cls(**text)


def prompts_sha256(items: Sequence[Item]) -> str:
    """One hash for the prompts of a task in their order: equal hashes, equal questions."""
    return hashlib.sha256("\n".join(f"{i.item} {i.prompt_sha256}" for i in items).encode()).hexdigest()


def get(url: str, timeout: float = 60.0) -> bytes:
    """The body of a GET. Raises NoServer."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.read()
    except (urllib.error.URLError, OSError) as error:
        raise NoServer(f"{url}: expected an answer, found {error}") from None


def fetch_report(url: str) -> dict[str, Any] | None:
    """The guard's report; None where the server has none (stock vLLM, the plug-in not loaded)."""
    try:
        return json.loads(get(url + REPORT_ROUTE))
    except (NoServer, json.JSONDecodeError):
        return None


def served_model(url: str) -> str:
    """The name of the model the server serves. Raises NoServer."""
    try:
        return json.loads(get(url + "/v1/models"))["data"][0]["id"]
    except (json.JSONDecodeError, KeyError, IndexError) as error:
        raise NoServer(f"{url}/v1/models: expected the list of served models, found something else ({error})") from None


def speculation_counters(url: str) -> dict[str, float]:
    """vLLM's own counters of drafts, summed over labels; empty where the server exports none."""
    try:
        text = get(url + "/metrics").decode()
    except NoServer:
        return {}
    found: dict[str, float] = {}
    for name in SPECULATION_METRICS:
        values = re.findall(rf"^{re.escape(name)}(?:_total)?(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        if values:
            found[name] = sum(map(float, values))
    return found


def run(url: str, suite: Suite, label: str, folder: Path, extra_body: Mapping[str, Any] | None = None, every: int = 1) -> Arm:
    """Run the suite against `url`. Writes `folder`/arm.json and `folder`/requests.jsonl. Raises NoServer.

    A request that fails does not end the run: it is an item with its error and score 0. `every`: ask only every n-th item of
    a task, for experiments of many arms.
    """
    url = url.rstrip("/")
    model = served_model(url)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "requests.jsonl"
    log.unlink(missing_ok=True)
    before, drafts_before, started = fetch_report(url), speculation_counters(url), time.time()
    arm = Arm(suite.name, label, model, started, 0.0, before, None, {})
    for seed in sorted({seed for task in suite.tasks.values() for seed in task.seeds}):
        names = [name for name, task in suite.tasks.items() if seed in task.seeds]
        _run_seed(arm, url, suite, names, seed, log, extra_body, every)
    drafts = speculation_counters(url)
    arm.speculation = {name: value - drafts_before.get(name, 0.0) for name, value in drafts.items()}
    arm.report_after, arm.seconds = fetch_report(url), round(time.time() - started, 1)
    arm.write(folder / "arm.json")
    return arm


def _run_seed(
    arm: Arm,
    url: str,
    suite: Suite,
    names: list[str],
    seed: int,
    log: Path,
    extra_body: Mapping[str, Any] | None,
    every: int,
) -> None:
    if all(name.startswith("k3_tiny_") for name in suite.tasks):  # generated items: nothing may be asked of a hub
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    from .client import RecordedChat

    chat = RecordedChat(
        url, arm.model, seed=seed, waves={name: suite.tasks[name].wave for name in names}, log=log, extra_body=extra_body
    )
    manager = TaskManager(include_path=str(suite.folder / "tasks"), include_defaults=False)
    # Not `simple_evaluate`: it also runs `pip list`, for an account of the client's machine that nobody needs.
    loaded = manager.load(list(names))
    picked = {name: list(range(0, len(loaded["tasks"][name].eval_docs), every)) for name in names} if every > 1 else None
    results = evaluate(lm=chat, task_dict=loaded, samples=picked, bootstrap_iters=0, log_samples=True)
    samples = (results or {}).get("samples", {})
    replies = {(r.task, r.item): r for r in chat.replies}
    for name in names:
        rows = sorted(samples.get(name, []), key=lambda row: row["doc_id"])
        if not rows:
            arm.lost.append(f"{name}: lm-eval returned no samples")
        into = arm.items.setdefault(name, [])
        for row in rows:
            # Requests are numbered among the picked items, samples among all.
            reply = replies.get((name, row["doc_id"] // every))
            if reply is None or reply.text != row["resps"][0][0]:
                arm.lost.append(f"{name} item {row['doc_id']}: the scored reply is not the one on record")
                continue
            into.append(
                Item(
                    item=reply.item,
                    group=str(row["doc"].get("group", "")),
                    seed=seed,
                    prompt_sha256=reply.prompt_sha256,
                    prompt_tokens=reply.prompt_tokens,
                    expected_tokens=row["doc"].get("prompt_tokens"),
                    prompt_characters=reply.prompt_characters,
                    completion_tokens=reply.completion_tokens,
                    finish=reply.finish,
                    error=reply.error,
                    reply_sha256=hashlib.sha256(reply.text.encode()).hexdigest(),
                    scores={metric: float(row[metric]) for metric in row["metrics"]},
                )
            )
