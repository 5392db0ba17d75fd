"""The shared patches: their form, their hashes, `git apply`, and what they do to modules, imported before or after."""

import importlib
import importlib.util
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vllm.model_executor.models.kimi_k3_fast import guard, patches
from vllm.model_executor.models.kimi_k3_fast.patches import applier, hooks, ledger
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

ROOT = Path(importlib.util.find_spec("vllm.version").origin).parent.parent


@pytest.fixture
def fresh_guard(monkeypatch):
    """A guard of its own that watches, and hook counters from zero."""
    monkeypatch.setattr(guard, "_guard", guard.Guard())
    monkeypatch.setattr(hooks, "ran", {})
    guard.current().watching = True
    return guard.current()


def test_every_patch_is_small_insert_only_and_fits_the_release():
    assert [patch.name for patch in ledger.patches()] == ["1", "2", "3"]
    for patch in ledger.patches():
        assert 0 < patch.added <= 40
        for target, expected in patch.targets.items():
            assert ledger.sha256((ROOT / target).read_bytes()) == expected, f"{target}: another release, or edited in place"


def test_git_applies_the_same_lines_as_memory(tmp_path):
    targets = {target for patch in ledger.patches() for target in patch.targets}
    for target in targets:
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / target, tmp_path / target)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for patch in ledger.patches():
        done = subprocess.run(["git", "apply", "--unidiff-zero", str(patch.file)], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    for target in targets:
        in_memory = "\n".join(line.text for line in ledger.insert((ROOT / target).read_text(), target))
        assert (tmp_path / target).read_text() == in_memory
        compile(in_memory, target, "exec")


def test_a_refused_patch_leaves_the_others_in_their_places():
    target = "vllm/v1/worker/gpu_model_runner.py"
    source = (ROOT / target).read_text()
    whole, without = ledger.insert(source, target), ledger.insert(source, target, frozenset({"1"}))
    assert [line for line in whole if line.patch != "1"] == without
    assert any(line.patch == "3" for line in without)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b", "expected an insertion"),
        ("--- a/x.py\n+++ b/x.py\n@@ -1,0 +2 @@\n context", "expected only added lines"),
        ("--- a/x.py\n+++ b/x.py\n@@ -1,0 +2,41 @@\n" + "+a\n" * 41, "at most 40"),
        ("--- a/y.py\n+++ b/y.py\n@@ -1,0 +2 @@\n+a", "targets declared"),
    ],
    ids=["replaces a line", "carries a context line", "too long", "undeclared target"],
)
def test_what_is_not_a_small_insertion_is_refused(tmp_path, body, complaint):
    head = "\n".join(f"{field}: x" for field in ledger.FIELDS) + f"\nTarget: x.py sha256 {'0' * 64}"
    (tmp_path / "9-bad.diff").write_text(f"{head}\n\n{body}\n")
    with pytest.raises(ValueError, match=complaint):
        ledger.parse(tmp_path / "9-bad.diff")


SOURCE = """
import functools

def deco(f):
    @functools.wraps(f)
    def inner(*a, **k):
        return f(*a, **k)
    return inner

class Base:
    def twice(self, x):
        return 2 * x

class Child(Base):
    @deco
    def twice(self, x):
        y = super().twice(x)
        return y

def fail():
    raise RuntimeError("here")
"""
DIFF = """
--- a/toy_target.py
+++ b/toy_target.py
@@ -2,0 +3 @@
+SEEN = []
@@ -17,0 +19 @@
+        SEEN.append(x)
@@ -20,0 +23 @@
+    SEEN.append("fail")
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A folder with one module and one patch for it; returns a function that makes the applier."""
    (tmp_path / "toy_target.py").write_text(SOURCE)
    folder = tmp_path / "diffs"
    folder.mkdir()
    head = "\n".join(f"{field}: 1 toy" for field in ledger.FIELDS)
    digest = ledger.sha256(SOURCE.encode())
    (folder / "1-toy.diff").write_text(f"{head}\nTarget: toy_target.py sha256 {digest}\n{DIFF}")
    parsed = (ledger.parse(folder / "1-toy.diff"),)
    monkeypatch.setattr(ledger, "patches", lambda: parsed)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "toy_target", raising=False)
    yield lambda: applier.Applier(tmp_path)
    sys.modules.pop("toy_target", None)


@pytest.mark.parametrize("imported_first", [True, False])
def test_functions_are_patched_whenever_the_module_was_imported(toy, imported_first):
    before = importlib.import_module("toy_target") if imported_first else None
    patcher = toy()
    patcher.apply()
    module = importlib.import_module("toy_target")
    assert before is None or module is before, "the module keeps its identity"
    assert module.Child().twice(3) == 6, "super() and decorators still work"
    assert module.SEEN == [3]
    assert patcher.states()["1"]["targets"] == {"toy_target.py": applier.INSTALLED}


def test_tracebacks_show_the_lines_of_the_file_on_disk(toy):
    toy().apply()
    module = importlib.import_module("toy_target")
    with pytest.raises(RuntimeError) as caught:
        module.fail()
    assert caught.traceback[-1].lineno + 1 == SOURCE.split("\n").index('    raise RuntimeError("here")') + 1


def test_a_file_that_differs_by_one_byte_is_refused_and_left_alone(toy, tmp_path):
    (tmp_path / "toy_target.py").write_text(SOURCE.replace("2 * x", "3 * x"))
    patcher = toy()
    patcher.apply()
    refusal = patcher.refusals["1"]
    assert refusal.reason is Reason.PATCH_DRIFT
    assert "toy_target.py: expected sha256" in refusal.detail
    assert not hasattr(importlib.import_module("toy_target"), "SEEN")
    assert patcher.states()["1"]["targets"] == {"toy_target.py": applier.REFUSED}


def test_a_function_that_is_not_the_releases_is_refused_not_overwritten(toy):
    module = importlib.import_module("toy_target")
    module.fail = lambda: "another extension's"
    patcher = toy()
    patcher.apply()
    assert patcher.refusals["1"].reason is Reason.PATCH_FAILED
    assert module.fail() == "another extension's"
    assert module.Child().twice(3) == 6
    assert not hasattr(module, "SEEN"), "all of a file or nothing"


def test_a_function_replaced_after_the_patch_shows_as_displaced(toy):
    patcher = toy()
    patcher.apply()
    module = importlib.import_module("toy_target")
    module.fail = lambda: None
    assert patcher.states()["1"]["targets"] == {"toy_target.py": applier.DISPLACED}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_real_modules_take_the_patches_before_and_after_import():
    out = run("""
        import vllm.v1.core.sched.scheduler            # imported before
        from vllm.model_executor.models.kimi_k3_fast import patches
        print("refused", patches.apply(), patches.apply())
        import vllm.v1.worker.gpu_model_runner, vllm.v1.worker.gpu_worker   # and after
        import vllm.v1.worker.gpu.model_runner
        states = patches.state()
        print({s for p in states.values() for s in p["targets"].values()})
        from types import SimpleNamespace as Step
        from vllm.v1.core.block_pool import BlockPool
        from vllm.model_executor.models.kimi_k3_fast import guard
        hooks, pool = patches.hooks, BlockPool(8, True, 16)
        pool.get_new_blocks(2)
        print(hooks.ran)
        guard.current().watching, pool = True, BlockPool(8, True, 16)
        hooks.owner("a"); got = pool.get_new_blocks(3)
        hooks.owner("b"); pool.touch(got[:1])
        pool.free_blocks(got[1:]); pool.free_blocks(got[:1])
        step = Step(); hooks.scheduled(step); hooks.step_received(step)
        print(guard.current().ledger.writer, guard.current().report()["counters"])
    """)
    assert "refused [] []" in out
    assert "{'installed'}" in out
    assert "{'blocks_allocated': 1}" in out
    # With the patches in place, vLLM's own block pool reaches the ledger.
    assert "{1: 'a'}" in out and "'slots_allocated': 3" in out and "'slots_shared': 1" in out and "'slots_freed': 2" in out


def test_a_patch_that_is_installed_but_never_runs_is_a_violation(fresh_guard, monkeypatch):
    states = {name: {"targets": {"x.py": applier.INSTALLED}, "refusal": ""} for name in patches.HOOKS}
    monkeypatch.setattr(patches, "state", lambda: {n: {**s, "ran": {}} for n, s in states.items()})
    monkeypatch.setattr(hooks, "ran", {"batch_dispatched": 100, "mark": 100, "logits_checked": 100, "step_received": 100})
    patches.check()
    assert fresh_guard.report()["violations"]["by_reason"] == {}
    hooks.ran["batch_dispatched"] = 0
    patches.check()
    patches.check()
    report = fresh_guard.report()
    assert report["violations"]["by_reason"] == {"patch_not_run": 1}, "said once"
    assert report["violations"]["last"][0]["where"]["patch"] == "1"
    states["1"]["targets"]["x.py"] = applier.WAITING
    monkeypatch.setattr(guard, "_guard", guard.Guard())
    patches.check()
    assert guard.current().report()["violations"]["by_reason"] == {}, "a runner that is never imported need not run"


def test_a_displaced_function_is_a_violation(fresh_guard, monkeypatch):
    state = {"1": {"targets": {"x.py": applier.DISPLACED}, "refusal": "", "ran": {}}}
    monkeypatch.setattr(patches, "state", lambda: state)
    patches.check()
    assert "replaced" in fresh_guard.report()["violations"]["last"][0]["detail"]
