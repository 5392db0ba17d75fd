"""Every fault test fails when the check it stands for is removed: each runs here again without it, and must not pass."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from vllm.model_executor.models.kimi_k3_fast import guard, patches
from vllm.model_executor.models.kimi_k3_fast.guard import Policy, audit, core, ledger, shadow
from vllm.model_executor.models.kimi_k3_fast.guard.agreement import Agreement
from vllm.model_executor.models.kimi_k3_fast.patches import hooks


def load(path: str):
    """A test module of this suite, under a name of its own."""
    file = Path(__file__).parents[1] / path
    name = f"bite_{file.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


STATE = load("guard/test_state.py")
CORE = load("guard/test_core.py")
EVENTS = load("guard/test_events.py")
AGREEMENT = load("guard/test_agreement.py")
SHADOW = load("guard/test_shadow.py")
HOOKS = load("patches/test_hooks.py")


def on_state(test):
    return lambda patch, folder: test(STATE.make_audited())


def no_owners(patch):
    patch.setattr(ledger.Ledger, "_owned", lambda *args: [])


def no_digests(patch):
    patch.setattr(audit, "digests", lambda view: torch.zeros(view.tensor.shape[0] * view.rows_per_slot, dtype=torch.int64))


def everything_allowed(patch):
    patch.setattr(audit.Audit, "_allowed", lambda self, index, real, writes: set(range(10**4)))


def no_null_slot(patch):
    patch.setattr(audit, "NULL_SLOT", -5)


def padding_is_real(patch):
    split = audit._split
    patch.setattr(audit, "_split", lambda writes, requests, tokens: split(writes, 10**6, 10**6))


def hooked(test):
    """A test of the hooks, with the fresh state that its fixture gives it."""

    def run(patch, folder):
        patch.setattr(guard, "_guard", guard.Guard())
        for name, value in (("ran", {}), ("_outbox", []), ("_owner_of", {}), ("process", {}), ("_unheard_steps", 0)):
            patch.setattr(hooks, name, value)
        guard.current().watching = True
        test(guard.current())

    return run


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def silent_patch(patch, folder):
    patch.setattr(guard, "_guard", guard.Guard())
    patch.setattr(hooks, "ran", {"mark": 100, "logits_checked": 100, "step_received": 100})
    patch.setattr(patches, "state", lambda: {"1": {"targets": {"x": "installed"}, "refusal": "", "ran": {}}})
    patches.check()
    assert guard.current().report()["violations"]["by_reason"] == {"patch_not_run": 1}


def off_by_a_hundredth(patch, folder):
    watcher = guard.Guard(Policy(events_path=str(folder / "e.jsonl")))
    SHADOW.test_an_operator_that_is_off_by_a_hundredth_is_caught_saved_and_retired(watcher, torch.float32, None)


CASES = {
    "write outside the write-set": (on_state(STATE.test_a_write_outside_the_write_set), no_digests),
    "write-set too generous": (on_state(STATE.test_a_write_outside_the_write_set), everything_allowed),
    "write to block 0": (on_state(STATE.test_a_write_to_the_null_block), no_null_slot),
    "padded row writing": (on_state(STATE.test_a_padded_row_that_writes), padding_is_real),
    "slot of a freed request": (on_state(STATE.test_a_slot_of_a_freed_request), no_owners),
    "slot of another request": (on_state(STATE.test_a_slot_given_to_another_request_meanwhile), no_owners),
    "rank that decides differently": (
        lambda patch, folder: AGREEMENT.test_a_rank_that_decides_differently_is_named_with_the_first_step(),
        lambda patch: patch.setattr(Agreement, "add", lambda self, step, signature: None),
    ),
    "fast op off by 1e-2": (off_by_a_hundredth, lambda patch: patch.setattr(shadow, "MARGIN", 1e9)),
    "NaN row": (
        hooked(HOOKS.test_marks_end_exactly_the_marked_requests_and_are_counted),
        lambda patch: patch.setattr(hooks, "must_end", lambda output, request: None),
    ),
    "blocks of a bad request": (
        hooked(lambda watching: HOOKS.test_every_block_a_bad_request_filled_is_forgotten_freed_ones_too()),
        lambda patch: patch.setattr(hooks, "forget_blocks", lambda manager, request: None),
    ),
    "state copied to another request's slot": (
        hooked(HOOKS.test_state_may_be_copied_to_ones_own_slot_only),
        lambda patch: patch.setattr(ledger.Ledger, "_copy", lambda *args: []),
    ),
    "engine core without the patch": (
        hooked(
            lambda watching: HOOKS.test_an_engine_core_without_the_patch_is_seen_and_no_step_is_fast(watching, "says nothing")
        ),
        lambda patch: patch.setattr(hooks, "_unheard", lambda: None),
    ),
    "engine core whose patch failed": (
        hooked(lambda watching: HOOKS.test_an_engine_core_without_the_patch_is_seen_and_no_step_is_fast(watching, "says why")),
        lambda patch: patch.setattr(hooks, "_core_lacks", lambda name, why: None),
    ),
    "lines lost to a full disk": (
        lambda patch, folder: EVENTS.test_lines_that_were_lost_are_made_up_for_when_the_disk_is_back(made(folder)),
        lambda patch: patch.setattr(core.Guard, "_carry", lambda self: None),
    ),
    "patch installed but never run": (silent_patch, lambda patch: patch.setattr(patches, "_silent", lambda name, state: [])),
    "graph nobody planned": (
        lambda patch, folder: CORE.test_a_replayed_graph_nobody_planned_is_a_violation(),
        lambda patch: patch.setattr(core.Guard, "violation", lambda *args, **kwargs: None),
    ),
    "step without a path": (
        lambda patch, folder: CORE.test_a_step_that_never_says_its_path_is_a_violation(),
        lambda patch: patch.setattr(core.Guard, "_unclosed", lambda self, facts: setattr(self, "_open", None)),
    ),
    "require": (
        lambda patch, folder: CORE.test_require_fails_the_requests_of_a_decode_step_that_fell_back(),
        lambda patch: patch.setattr(core.Guard, "_require", lambda *args: None),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_fault_is_seen_with_the_check_and_missed_without_it(case, monkeypatch, tmp_path):
    fault, remove = CASES[case]
    with monkeypatch.context() as patch:
        fault(patch, tmp_path / "with")
    with monkeypatch.context() as patch:
        remove(patch)
        with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
            fault(patch, tmp_path / "without")


def test_one_changed_byte_is_missed_without_the_hash(monkeypatch, tmp_path):
    """Without the comparison of hashes the patched line would land in a file it was not written for."""
    from vllm.model_executor.models.kimi_k3_fast.patches import applier
    from vllm.model_executor.models.kimi_k3_fast.patches import ledger as diffs

    source = "def f():\n    return 1\n"
    head = "\n".join(f"{field}: 1 toy" for field in diffs.FIELDS)
    (tmp_path / "1-toy.diff").write_text(
        f"{head}\nTarget: toy_bite.py sha256 {diffs.sha256(source.encode())}\n\n"
        "--- a/toy_bite.py\n+++ b/toy_bite.py\n@@ -1,0 +2 @@\n+    pass\n"
    )
    (tmp_path / "toy_bite.py").write_text(source.replace("1", "2"))
    parsed = (diffs.parse(tmp_path / "1-toy.diff"),)
    monkeypatch.setattr(diffs, "patches", lambda: parsed)
    assert applier.Applier(tmp_path)._drift(parsed[0]) is not None
    monkeypatch.setattr(diffs, "sha256", lambda data: parsed[0].targets["toy_bite.py"])
    assert applier.Applier(tmp_path)._drift(parsed[0]) is None
