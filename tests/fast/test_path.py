"""The fast path does not run where the guard is blind: a patch that is refused is a reason against it, among all the others; and
what the guard sees of a step's slots it sees before they are written."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.models.kimi_k3_fast.guard import BatchFacts, Guard, GuardStop, Policy, StateView


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_target_that_differs_by_one_byte_keeps_the_fast_path_off_and_require_from_starting(tmp_path):
    """In a process of its own: copies of the real targets, one byte of one changed, take the place of the installed release."""
    out = run(f"""
        import importlib.util, pathlib, shutil, types
        from vllm.model_executor.models.kimi_k3_fast import guard, patches
        from vllm.model_executor.models.kimi_k3_fast.fast.path import FastPath, FastPathRequired
        from vllm.model_executor.models.kimi_k3_fast.patches import ledger
        from vllm.model_executor.models.kimi_k3_fast.scope import Deployment
        from vllm.model_executor.models.kimi_k3_fast.settings import Settings

        copy = pathlib.Path({str(tmp_path)!r})
        installed = pathlib.Path(importlib.util.find_spec("vllm.version").origin).parent.parent
        for target in {{target for patch in ledger.patches() for target in patch.targets}}:
            (copy / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(installed / target, copy / target)
        changed = copy / "vllm/v1/core/block_pool.py"
        data = bytearray(changed.read_bytes())
        data[100] ^= 1
        changed.write_bytes(data)

        patches.importlib = types.SimpleNamespace(util=types.SimpleNamespace(
            find_spec=lambda name: types.SimpleNamespace(submodule_search_locations=[str(copy / "vllm")])))
        print("refused:", *patches.apply())
        deployment = Deployment(kda_heads=4, attention_heads=4)
        path = FastPath(deployment, Settings(), [], None)
        print("auto:", [r.reason.code for r in path.refusals], path._decide(None) == path.refusals)
        report = guard.current().report()["deployment"]
        print("report:", report["selected"], [r["reason"] for r in report["refusals"]])
        try:
            FastPath(Deployment(kda_heads=4, attention_heads=4, lora=True), Settings(mode="require"), [], None)
        except FastPathRequired as error:
            print("require:", error)
    """)
    assert "refused: patch_drift: patch 2: vllm/v1/core/block_pool.py: expected sha256 6d1e0d89" in out
    assert "auto: ['patch_drift'] True" in out
    assert "report: False ['patch_drift']" in out
    require = out[out.index("require:") :]
    assert "lora: LoRA is enabled" in require and "patch_drift: patch 2" in require, "all reasons, not the first"
    assert "Install the unmodified release" in require


@pytest.mark.parametrize(
    ("slot", "audit", "seen"), [(1, 0, ["run"]), (2, 0, []), (2, 1, ["run"])], ids=["own", "wrong", "audited"]
)
def test_a_slot_of_another_request_stops_the_step_before_it_is_written(slot: int, audit: int, seen: list[str]) -> None:
    """But for steps that are audited: their digests are compared behind the writes."""
    from vllm.model_executor.models.kimi_k3_fast.fast.executor import StateSlots
    from vllm.model_executor.models.kimi_k3_fast.fast.path import FastPath
    from vllm.model_executor.models.kimi_k3_fast.fast.plan import Plan, StepKey

    ran: list[str] = []
    path, guard = object.__new__(FastPath), Guard(Policy(policy="stop", audit_every=audit))
    guard.bind_state(1, [StateView("layers.0.state", "kda_recurrent", 0, 0, torch.zeros(4, 8))])
    guard.slots_changed([("allocated", "a", [1]), ("allocated", "b", [2])])
    path.guard, path._groups, path._executor = guard, ["kda"], SimpleNamespace(run=lambda *args: ran.append("run"))
    guard.open_step(BatchFacts("none", 1, 1, 1, 1, True, ("a",)))
    key = StepKey(requests=1, tokens=1, padded=1, prompt_tokens=0, width=1, bound=1)
    step = Plan("decode/1/torch", 1, 1, "torch", 1), torch.zeros(1), key, {"kda": StateSlots(torch.tensor([slot]))}
    if slot == 1:
        path._run(*step, lambda nudge: torch.zeros(1))
    else:
        with pytest.raises(GuardStop, match="slot_not_owned"):
            path._run(*step, lambda nudge: torch.zeros(1))
    assert ran == seen
    assert guard.report()["steps"]["fast"]["steps"] == 1
