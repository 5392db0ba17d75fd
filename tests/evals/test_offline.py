"""The gate by way of files gives what the gate gives at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import offline
import pytest
from fake_server import Behaviour, serve

from vllm.model_executor.models.kimi_k3_fast.evaluation import arm as arms
from vllm.model_executor.models.kimi_k3_fast.evaluation import run, suites


def answers_to(messages: list[dict[str, Any]]) -> tuple[str, str]:
    """Wrong, but the same for the same question."""
    return f"\\boxed{{{len(messages[-1]['content']) % 7}}}", "stop"


@pytest.fixture(scope="module")
def asked(evals: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    file = tmp_path_factory.mktemp("asked") / "questions.jsonl"
    assert offline.ask("tiny", file, evals) == 20
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_questions_are_those_of_the_gate_wave_by_wave(asked, evals: Path, tmp_path: Path) -> None:
    behaviour = Behaviour(answer=answers_to, prompt_tokens=lambda messages: 5)
    with serve(behaviour) as url:
        arms.run(url, suites.load("tiny", evals), "direct", tmp_path)
    assert [len(wave) for wave in asked] == [4, 4, 2, 4, 4, 2], "two tasks of ten items in waves of four"
    flat = [{**question, "model": ""} for wave in asked for question in wave]
    by_key = {offline.key(question): {**question, "model": ""} for question in behaviour.seen}
    assert [by_key[offline.key(question)] for question in flat] == flat and len(by_key) == 20


def test_recorded_answers_are_judged_as_the_server_was(asked, evals: Path, tmp_path: Path) -> None:
    """With its failures, its guard's counts and the paired test between the arms."""
    share = {"standard": 0.0, "fast": 0.5}
    direct, replayed = tmp_path / "direct", tmp_path / "replayed"
    replayed.mkdir()
    for name in ("standard", "fast"):
        behaviour = Behaviour(
            answer=answers_to,
            prompt_tokens=lambda messages: 5,
            fast_share=share[name],
            fails=lambda messages: "Prepend" in messages[-1]["content"] and len(messages[-1]["content"]) % 3 == 0,
        )
        with serve(behaviour) as url:
            (replayed / f"{name}.json").write_text(json.dumps(offline.answer(url, asked)))
        with serve(behaviour) as url:
            options = {"require_fast": None} if name == "standard" else {"require_fast": 0.9, "against": direct / "standard"}
            wanted = run.gate(url, "tiny", direct / name, evals=evals, **options)
    found = offline.judge("tiny", replayed, 0.9, evals)
    assert found[0] == wanted[0] == 1
    left, right = (json.loads((folder / "fast" / "gate.json").read_text()) for folder in (direct, replayed))
    assert right["checks"] == left["checks"]
    assert "fast share" in " ".join(check["name"] for check in right["checks"] if check["verdict"] == "fail")


def test_a_question_that_was_not_asked_is_an_error() -> None:
    playback = offline.Playback({"before": {}, "after": {}, "answers": []})
    assert playback.post({"messages": []})[0] == 500
    assert playback.get("/k3fast/report") == (404, {})


def test_both_arms_get_the_machines_options_and_those_behind_the_dashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU both servers run at a time; options of the command line come last, where they win."""
    started: list[tuple[list[str], int]] = []
    running: set[int] = set()

    class Server:
        url = "http://127.0.0.1:9"

        def __init__(self, model: Path, args: list[str], **more: Any) -> None:
            self.args, self.environ = args, more["environ"]

        def __enter__(self) -> Server:
            running.add(id(self))
            started.append((self.args, len(running)))
            return self

        def __exit__(self, *error: object) -> None:
            running.discard(id(self))

    (tmp_path / "gpu").touch()
    (tmp_path / "questions").write_text(json.dumps([{"messages": []}]) + "\n")
    answered = {"before": {}, "answers": [{"key": "k", "status": 400, "body": "why"}], "after": {}}
    monkeypatch.setattr("vllm.model_executor.models.kimi_k3_fast.cli.server.Server", Server)
    monkeypatch.setattr(offline, "answer", lambda url, waves: answered)
    monkeypatch.setattr(offline, "GPU", tmp_path / "gpu")
    given = ["answer", "model", str(tmp_path / "questions"), str(tmp_path), "--", "--gpu-memory-utilization", "0.3"]
    monkeypatch.setattr("sys.argv", ["offline.py", *given])
    assert offline.main() == 1, "an error among the answers is not success"
    assert "400: why" in capsys.readouterr().out
    (one, _), (two, most) = started
    assert most == 2 and not running
    assert all(args[-2:] == ["--gpu-memory-utilization", "0.3"] and "--kv-cache-memory-bytes" in args for args in (one, two))
    modes = [json.loads(args[args.index("--additional-config") + 1])["kimi_k3_fast"] for args in (one, two)]
    assert {mode["mode"] for mode in modes} == {"off", "require"} and {"mode": "off"} in modes
