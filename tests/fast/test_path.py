"""The fast path does not run where the guard is blind: a patch that is refused is a reason against it, among all the others."""

from __future__ import annotations

import subprocess
import sys
import textwrap


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
