"""The CI files pass their validator, and the validator sees what the pipeline generator would drop."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
AREA = ROOT / ".buildkite" / "test_areas" / "kimi_k3_fast.yaml"
SPEC = importlib.util.spec_from_file_location("buildkite_validate", ROOT / ".buildkite" / "validate.py")
assert SPEC is not None and SPEC.loader is not None
validate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(validate)


def test_the_committed_files_pass() -> None:
    assert validate.problems() == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"timeout_in_minute": 5}, "timeout_in_minute: expected a field the generator knows"),
        ({"gpu": "h200"}, "gpu: expected a field the generator knows"),
        ({"num_gpus": 2}, "num_gpus: expected a field"),
        ({"timeout_in_minutes": "5"}, "expected int"),
        ({"num_devices": True}, "expected int"),
        ({"commands": "pytest"}, "expected list"),
        ({"device": "h20"}, "device: expected one"),
        ({"num_nodes": 2}, "expected num_devices"),
        ({"concurrency": 1}, "expected both"),
        ({"mirror": {"amd": {"devices": "mi325_1"}}}, "mirror: expected amd"),
        ({"mirror": {"nvidia": {}}}, "mirror: expected amd"),
        ({"source_file_dependencies": ["vllm/no_such_folder/"]}, "no such path"),
        ({"commands": ["pytest tests/no_such_test.py"]}, "no such path below /vllm-workspace"),
    ],
)
def test_each_silent_mistake_is_named(change: dict, problem: str) -> None:
    area = yaml.safe_load(AREA.read_text())
    area["steps"][0] |= change
    before = set(validate.check_area(AREA.read_text()))
    found = [p for p in validate.check_area(yaml.safe_dump(area)) if p not in before]
    assert len(found) == 1 and problem in found[0], found


def test_a_second_step_of_one_key_and_an_empty_group_are_named() -> None:
    area = yaml.safe_load(AREA.read_text())
    twice = {**area, "steps": [area["steps"][0]] * 2}
    assert any("found 2 times" in p for p in validate.check_area(yaml.safe_dump(twice)))
    assert any("at least one" in p for p in validate.check_area(yaml.safe_dump({**area, "steps": []})))


def test_harness_configs_must_name_tasks_and_metrics_that_exist() -> None:
    text = (ROOT / ".buildkite" / "lm-eval-harness" / "configs" / "Kimi-K3-fast.yaml").read_text()
    assert list(validate.check_harness(text)) == []
    assert any("k3_aime26" in p for p in validate.check_harness(text.replace("k3_aime25", "k3_aime26")))
    assert any("exact_match" in p for p in validate.check_harness(text.replace("aime_official", "exact_match")))
    assert any("expected a number" in p for p in validate.check_harness(text.replace("value: null", "value: high", 1)))
    assert any("few_shots" in p for p in validate.check_harness(text.replace("num_fewshot", "few_shots")))
