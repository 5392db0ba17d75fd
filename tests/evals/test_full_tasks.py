"""The tasks for a real Kimi K3, on stand-ins for the public data sets: pinning, refusing other data, and the gate over them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import full
import pin
import pytest
from datasets import Dataset
from fake_server import Behaviour, serve

from vllm.model_executor.models.kimi_k3_fast.evaluation import run, suites

BINS = [(8, 16), (16, 32)]


def mrcr_row(index: int, words: int) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": " ".join(f"w{i}" for i in range(words - 3))},
        {"role": "user", "content": f"give {index}"},
    ]
    return {"prompt": json.dumps(messages), "answer": f"p{index}", "random_string_to_prepend": f"p{index}", "n_needles": 2}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Local data sets, pins that choose from them, and a copy of evals/ that reads these pins."""
    rows = [mrcr_row(i, words) for i, words in enumerate([4, 8, 9, 16, 17, 32, 33, 12, 20])]
    for needles in (2, 4, 8):
        folder = tmp_path / "data" / "mrcr" / f"{needles}needle"
        folder.mkdir(parents=True)
        Dataset.from_list(rows).to_parquet(folder / f"{needles}needle_0.parquet")
    (tmp_path / "data" / "aime25").mkdir()
    problems = [{"problem": f"What is {i}?", "answer": str(i)} for i in range(10)]
    Dataset.from_list(problems).to_parquet(tmp_path / "data" / "aime25" / "test.parquet")
    evals = tmp_path / "evals"
    shutil.copytree(suites.EVALS, evals, ignore=shutil.ignore_patterns("__pycache__", "baselines"))
    for name in ("mrcr", "aime25"):
        path = evals / "pins" / f"{name}.json"
        pins = json.loads(path.read_text()) | {"revision": "made here"}
        if name == "mrcr":
            chosen = pin.choose(rows, lambda text: len(text.split()), BINS, 2, pins["fields"])
            pins["rows"] = {str(n): chosen for n in (2, 4, 8)}
        else:
            pins["rows"] = [{"row": i, "sha256": full.row_sha256(p, pins["fields"])} for i, p in enumerate(problems)]
        path.write_text(json.dumps(pins))
    monkeypatch.setenv(full.LOCAL, str(tmp_path / "data"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return evals


def test_bins_are_open_below_except_the_first() -> None:
    assert [pin.bin_of(n, BINS) for n in (7, 8, 16, 17, 32, 33)] == [None, 16, 16, 32, 32, None]


def test_the_choice_is_by_tokens_of_prompt_and_answer_and_repeatable() -> None:
    rows = [mrcr_row(i, words) for i, words in enumerate([8, 9, 16, 12, 40])]
    first = pin.choose(rows, lambda text: len(text.split()), BINS, 3, ["prompt", "answer"])
    assert first == pin.choose(rows, lambda text: len(text.split()), BINS, 3, ["prompt", "answer"])
    assert list(first) == ["16"] and len(first["16"]) == 3 and {p["row"] for p in first["16"]} <= {0, 1, 2, 3}
    assert all(8 <= p["tokens"] <= 16 for p in first["16"])


def test_the_full_suite_runs_over_pinned_rows(data: Path, tmp_path: Path) -> None:
    def answer(messages: list[dict[str, Any]]) -> tuple[str | None, str | None]:
        question = messages[-1]["content"]
        if question.startswith("give "):
            return "p" + question.removeprefix("give "), "stop"
        return "\\boxed{" + question.removeprefix("What is ").split("?")[0] + "}", "stop"

    behaviour = Behaviour(answer=answer, prompt_tokens=lambda messages: sum(len(m["content"].split()) for m in messages))
    with serve(behaviour) as url:
        status, table = run.gate(url, "full", tmp_path / "out", require_fast=0.99, evals=data)
    report = json.loads((tmp_path / "out" / "gate.json").read_text())
    tasks = report["arms"][0]["tasks"]
    assert status == 2 and {c["name"].split()[0] for c in report["checks"] if c["verdict"] == "unknown"} >= {
        "score"
    }  # no baseline
    assert not [c for c in report["checks"] if c["verdict"] == "fail"], table
    assert tasks["k3_mrcr_2"]["by_group"] == {"to 16": 1.0, "to 32": 1.0} and tasks["k3_mrcr_2"]["items"] == 4
    assert tasks["k3_aime25"]["metrics"] == {"aime_official": 1.0, "aime_integer": 1.0}
    sampled = [r for r in behaviour.seen if "Reason step by step" in r["messages"][-1]["content"]]
    assert sorted({r["seed"] for r in sampled}) == [1, 2, 3, 4, 5, 6, 7, 8] and {r["temperature"] for r in sampled} == {1.0}
    assert not any("stop" in r for r in behaviour.seen)


def test_rows_of_another_revision_are_refused(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "data" / "aime25" / "test.parquet"
    Dataset.from_list([{"problem": f"What was {i}?", "answer": str(i)} for i in range(10)]).to_parquet(file)
    with (
        serve(Behaviour(answer=lambda m: ("p", "stop"), prompt_tokens=lambda m: 100)) as url,
        pytest.raises(run.CouldNotTell, match="another"),
    ):
        run.gate(url, "full", tmp_path / "out", require_fast=0.99, evals=data)


def test_without_pins_nothing_can_be_told(tmp_path: Path) -> None:
    """As committed, the pins name no revision: the full suite says how to make them."""
    with (
        serve(Behaviour(answer=lambda m: ("p", "stop"), prompt_tokens=lambda m: 100)) as url,
        pytest.raises(run.CouldNotTell, match=r"evals/pin\.py"),
    ):
        run.gate(url, "full", tmp_path / "out", require_fast=0.99)
