"""Check the CI files against what their readers know: `python .buildkite/validate.py`. Exit status 1 lists every problem.

vLLM's pipeline generator builds a step from the fields it has and drops every other key silently, so that a misspelt
`timeout_in_minutes` is no timeout. Fields and devices: vllm-project/ci-infra, buildkite/pipeline_generator, autumn 2026.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
WORKSPACE = "/vllm-workspace"
GROUP_FIELDS = {"group": str, "depends_on": list, "steps": list}
STEP_FIELDS: dict[str, type] = {
    "label": str, "key": str, "working_dir": str, "depends_on": list, "commands": list, "device": str, "agent_tags": dict,
    "num_devices": int, "num_nodes": int, "source_file_dependencies": list, "soft_fail": bool, "parallelism": int,
    "concurrency": int, "concurrency_group": str, "timeout_in_minutes": int, "env": dict, "retry": dict, "optional": bool,
    "no_plugin": bool, "no_gpu": bool, "dind": bool, "mount_buildkite_agent": bool, "mirror": dict,
}  # fmt: skip
MIRROR_FIELDS = {"device", "label", "timeout_in_minutes", "source_file_dependencies", "commands", "depends_on"}
DEVICES = re.compile(r"h100|h200|h200_35gb|h200_18gb|b200|b200-k8s|a100|cpu|intel_cpu|intel_gpu|arm_cpu|mi3\d\d_[1248]")
HARNESS_FIELDS = {"model_name", "tasks", "limit", "num_fewshot", "backend", "apply_chat_template", "gen_kwargs", "rtol"}


def check_area(text: str) -> Iterator[str]:
    """Problems of one file of test_areas/."""
    area = yaml.safe_load(text)
    if not isinstance(area, Mapping):
        yield f"expected an object with {', '.join(GROUP_FIELDS)}, found {type(area).__name__}"
        return
    yield from _fields(area, GROUP_FIELDS, "group")
    keys: list[str] = []
    for number, step in enumerate(area.get("steps") or ()):
        where = f"step {number}" + (f" ({step.get('label')})" if isinstance(step, Mapping) else "")
        yield from (f"{where}: {problem}" for problem in check_step(step))
        keys.append(step.get("key", "") if isinstance(step, Mapping) else "")
    for key in sorted({k for k in keys if k and keys.count(k) > 1}):
        yield f"key {key}: expected once, found {keys.count(key)} times"
    if not keys:
        yield "steps: expected at least one, found none"


def _fields(found: Mapping[str, Any], known: Mapping[str, type], what: str) -> Iterator[str]:
    for name, value in found.items():
        if name not in known:
            yield f"{name}: expected a field the generator knows, found an unknown one; it would be dropped without a word"
        elif not isinstance(value, known[name]) or (known[name] is int and isinstance(value, bool)):
            yield f"{name}: expected {known[name].__name__} in a {what}, found {value!r}"


def check_step(step: Any) -> Iterator[str]:
    """Problems of one step: unknown fields, wrong types, fields that need each other, paths that do not exist."""
    if not isinstance(step, Mapping):
        yield f"expected an object, found {step!r}"
        return
    yield from _fields(step, STEP_FIELDS, "step")
    for name in ("label", "commands", "timeout_in_minutes"):
        if name not in step:
            yield f"{name}: expected one, found none"
    if "device" in step and not DEVICES.fullmatch(str(step["device"])):
        yield f"device: expected one of the generator's, found {step['device']!r}"
    if "num_nodes" in step and "num_devices" not in step:
        yield "num_nodes: expected num_devices beside it"
    if ("concurrency" in step) != ("concurrency_group" in step):
        yield "concurrency and concurrency_group: expected both or neither"
    for name, mirror in (step.get("mirror") or {}).items():
        unknown = sorted(set(mirror) - MIRROR_FIELDS) if name == "amd" else [name]
        if unknown:
            yield f"mirror: expected amd with {', '.join(sorted(MIRROR_FIELDS))}, found {', '.join(unknown)}"
    for path in step.get("source_file_dependencies") or ():
        if not (ROOT / str(path).removeprefix("!")).exists():
            yield f"source_file_dependencies: {path}: no such path; the step would never run for it"
    yield from _commands(step)


def _commands(step: Mapping[str, Any]) -> Iterator[str]:
    folder = str(step.get("working_dir", f"{WORKSPACE}/tests"))
    base = ROOT / Path(folder).relative_to(WORKSPACE) if folder.startswith(WORKSPACE) else None
    for command in step.get("commands") or ():
        words = shlex.split(str(command))
        paths = [w for w in words[1:] if not w.startswith("-") and ("/" in w or w == "tests") and " " not in w]
        for path in paths:
            if base is not None and not (base / path).exists():
                yield f"commands: {path}: no such path below {folder}"


def check_harness(text: str) -> Iterator[str]:
    """Problems of one file of lm-eval-harness/configs/: unknown fields, tasks and metrics that evals/ does not define."""
    config = yaml.safe_load(text)
    yield from (f"{name}: expected {', '.join(sorted(HARNESS_FIELDS))}" for name in sorted(set(config) - HARNESS_FIELDS))
    for task in config.get("tasks") or ():
        path = ROOT / "evals" / "tasks" / f"{task['name']}.yaml"
        if not path.is_file():
            yield f"task {task['name']}: expected evals/tasks/{task['name']}.yaml, found none"
            continue
        known = set(re.findall(r"metric: (\w+)", path.read_text()))
        for metric in task["metrics"]:
            name, _, kept = metric["name"].partition(",")
            if name not in known or kept != "none":
                yield f"task {task['name']}: metric {metric['name']!r}: expected one of {', '.join(sorted(known))}, then ',none'"
            if not isinstance(metric["value"], int | float | None):
                yield f"task {task['name']}: value: expected a number or null, found {metric['value']!r}"


def problems() -> list[str]:
    """Every problem of every CI file, with the file's name."""
    here = ROOT / ".buildkite"
    found = []
    for folder, check in (("test_areas", check_area), ("lm-eval-harness/configs", check_harness)):
        for path in sorted((here / folder).glob("*.yaml")):
            found += [f"{path.relative_to(ROOT)}: {problem}" for problem in check(path.read_text())]
    return found


if __name__ == "__main__":
    wrong = problems()
    print("\n".join(wrong) or "CI files: every key is known and every path exists")
    sys.exit(bool(wrong))
