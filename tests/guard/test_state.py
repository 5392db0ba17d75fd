"""Ledger and audit: every kind of wrong write, injected into caches laid out like vLLM's (groups that share memory)."""

import pytest
import torch

from vllm.model_executor.models.kimi_k3_fast.guard import BatchFacts, Guard, Path, Policy, StateView, WriteSet
from vllm.model_executor.models.kimi_k3_fast.guard.audit import Audit, digests
from vllm.model_executor.models.kimi_k3_fast.guard.ledger import Ledger
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

SLOTS, BLOCK, WIDTH, STATE = 8, 4, 6, 24  # a page is 24 floats: one KDA state, or 4 latent rows of 6


class Caches:
    """Two layers on one memory: group 0 keeps KDA state, group 1 latents; a block id belongs to one of them at a time."""

    def __init__(self) -> None:
        self.memory = torch.randn(SLOTS, STATE)
        self.kda = self.memory
        self.mla = self.memory.view(SLOTS, BLOCK, WIDTH)
        self.buffer = torch.zeros(1, 16)

    def views(self) -> list[StateView]:
        return [
            StateView("layers.0.state", "kda_recurrent", 0, 0, self.kda),
            StateView("layers.1.latent", "mla_latent", 1, 1, self.mla, rows_per_slot=BLOCK),
            StateView("residual", "buffer", -1, -1, self.buffer),
        ]


def make_audited():
    """(caches, guard, step): slots 1 and 2 are KDA state of a and b, 3 and 4 their latent blocks; every step is audited."""
    caches = Caches()
    guard = Guard(Policy(audit_every=1))
    guard.bind_state(1, caches.views())
    guard.slots_changed([("allocated", "a", [1, 3]), ("allocated", "b", [2, 4])])

    def step(write, write_set: WriteSet | None = None, requests: int = 2) -> dict:
        """Run `write` as a decode step of a and b; the report's violations."""
        guard.open_step(BatchFacts("none", requests, 4, requests, 4, True, ("a", "b")[:requests]))
        guard.begin_writes()
        write(caches)
        declared = write_set or WriteSet(slots={0: [1, 2]}, rows={1: [3 * BLOCK + 1, 4 * BLOCK + 2]})
        guard.close_step(Path.FAST, (), "decode/t2", requests, requests, requests, 0, declared)
        return guard.report()

    return caches, guard, step


@pytest.fixture
def audited():
    return make_audited()


def good(caches: Caches) -> None:
    caches.kda[[1, 2]] += 1
    caches.mla[3, 1] += 1
    caches.mla[4, 2] += 1


def only(report: dict) -> tuple[str, dict]:
    assert len(report["violations"]["last"]) == 1, report["violations"]
    violation = report["violations"]["last"][0]
    return violation["reason"], violation["where"]


def test_declared_writes_by_owners_are_no_violation(audited):
    _, _, step = audited
    report = step(good)
    assert report["violations"]["by_reason"] == {}
    assert report["counters"]["audited_steps"] == 1


def test_the_ledger_counts_what_the_manager_did(audited):
    _, guard, _ = audited
    guard.slots_changed([("shared", "c", [3]), ("freed", "", [2, 4])])
    counters = guard.report()["counters"]
    assert (counters["slots_allocated"], counters["slots_shared"], counters["slots_freed"]) == (4, 1, 2)


def test_a_write_outside_the_write_set(audited):
    _, guard, step = audited
    reason, where = only(step(lambda caches: (good(caches), caches.mla[4, 3].add_(1))))
    assert reason == "write_outside"
    assert (where["layer"], where["slot"], where["row"], where["owner"], where["step"]) == (1, 4, 3, "b", 1)
    assert guard.quarantined("decode/t2")


@pytest.mark.parametrize("ended", ["by an error", "as no step"])
def test_digests_of_a_step_that_did_not_end_are_not_compared_with_a_later_one(audited, ended):
    caches, guard, step = audited
    guard.opens_expected = guard.watching = True
    guard.policy = Policy(audit_every=2)
    step(good)  # not sampled
    if ended == "by an error":
        guard.open_step(BatchFacts("none", 2, 4, 2, 4, True, ("a", "b")))
    guard.begin_writes()
    caches.kda[5] += 1
    if ended == "by an error":
        guard.abandon_step()
    else:
        guard.close_step(Path.FAST, (), "decode/t2", 2, 2, 2, 0)
    report = step(good)
    assert report["violations"]["by_reason"] == {}


def test_standard_steps_are_audited_in_their_own_count(audited):
    caches, guard, _ = audited
    guard.policy = Policy(audit_every=1, shadow_every=1)
    guard.open_step(BatchFacts("none", 2, 4, 2, 4, True, ("a", "b")))
    assert not guard.begin_writes(Path.STANDARD), "it is what a shadowed step would be compared with"
    good(caches)
    caches.mla[4, 3] += 1
    declared = WriteSet(slots={0: [1, 2]}, rows={1: [3 * BLOCK + 1, 4 * BLOCK + 2]})
    guard.close_step(Path.STANDARD, (), None, 2, 2, 2, 0, declared)
    assert only(guard.report())[0] == "write_outside"


def test_a_write_to_another_requests_slot(audited):
    _, guard, step = audited
    guard.slots_changed([("allocated", "c", [5])])

    def write(caches):
        good(caches)
        caches.kda[5, 0] += 1

    report = step(write)
    assert {v["reason"] for v in report["violations"]["last"]} == {"write_outside"}
    assert all(v["where"]["owner"] == "c" and v["where"]["slot"] == 5 for v in report["violations"]["last"])


def test_a_write_to_the_null_block(audited):
    _, _, step = audited
    report = step(lambda caches: (good(caches), caches.kda[0, 3].add_(1)))
    assert set(report["violations"]["by_reason"]) == {"null_block_written"}
    assert report["violations"]["last"][0]["where"]["slot"] == 0


def test_a_padded_row_that_writes(audited):
    _, guard, step = audited
    guard.slots_changed([("allocated", "c", [6])])
    stale = WriteSet(slots={0: [1, 2, 6, -1]}, rows={1: [3 * BLOCK + 1, 4 * BLOCK + 2, -1, -1]})
    report = step(lambda caches: (good(caches), caches.kda[6].add_(1)), stale)
    assert report["violations"]["by_reason"]["padded_row_wrote"] >= 1
    assert report["violations"]["last"][0]["where"]["slot"] == 6


def test_a_padded_row_that_names_a_slot_but_does_not_write_is_fine(audited):
    _, _, step = audited
    stale = WriteSet(slots={0: [1, 2, 6, -1]}, rows={1: [3 * BLOCK + 1, 4 * BLOCK + 2, -1, -1]})
    assert step(good, stale)["violations"]["by_reason"] == {}


def test_a_buffer_that_was_not_declared(audited):
    _, _, step = audited
    reason, where = only(step(lambda caches: (good(caches), caches.buffer.add_(1))))
    assert (reason, where["state"]) == ("write_outside", "residual")
    declared = WriteSet(slots={0: [1, 2]}, rows={1: [13, 18]}, buffers=("residual",))
    assert step(lambda caches: (good(caches), caches.buffer.add_(1)), declared)["violations"]["by_reason"] == {"write_outside": 1}


def test_a_slot_of_a_freed_request(audited):
    _, guard, step = audited
    guard.slots_changed([("freed", "", [2])])
    reason, where = only(step(good))
    assert (reason, where["slot"], where["request"], where["owner"]) == ("slot_not_owned", 2, "b", "")


def test_a_slot_given_to_another_request_meanwhile(audited):
    _, guard, step = audited
    guard.slots_changed([("freed", "", [2]), ("allocated", "c", [2])])
    reason, where = only(step(good))
    assert (reason, where["request"], where["owner"]) == ("slot_not_owned", "b", "c")


def test_a_prefix_hit_makes_a_reader_not_a_writer(audited):
    _, guard, step = audited
    guard.slots_changed([("freed", "", [3, 4]), ("shared", "a", [3]), ("allocated", "b", [4])])
    reason, where = only(step(good))
    assert (reason, where["slot"]) == ("slot_not_owned", 3)


def test_a_null_block_that_is_handed_out():
    guard = Guard()
    guard.slots_changed([("allocated", "a", [0])])
    assert only(guard.report())[0] == "null_block_written"


def test_a_slot_allocated_twice_without_a_free():
    guard = Guard()
    guard.slots_changed([("allocated", "a", [4]), ("allocated", "b", [4])])
    reason, where = only(guard.report())
    assert (reason, where["owner"], where["request"]) == ("slot_not_owned", "a", "b")


def test_a_mailbox_epoch_that_goes_back(audited):
    _, _, step = audited
    declared = dict(slots={0: [1, 2]}, rows={1: [13, 18]})
    assert step(good, WriteSet(**declared, epochs={"tp": 7}))["violations"]["by_reason"] == {}
    reason, where = only(step(good, WriteSet(**declared, epochs={"tp": 6})))
    assert (reason, where["buffer"]) == ("write_outside", "tp")


ONE_DIFFERENCE = {
    "a slot": (WriteSet(slots={0: [1, 5]}, rows={1: [13, 18]}), ("a", "b"), []),
    "the slots' order": (WriteSet(slots={0: [2, 1]}, rows={1: [13, 18]}), ("a", "b"), []),
    "a row": (WriteSet(slots={0: [1, 2]}, rows={1: [13, 21]}), ("a", "b"), []),
    "a request": (WriteSet(slots={0: [1, 2]}, rows={1: [13, 18]}), ("a", "c"), []),
    "an owner": (WriteSet(slots={0: [1, 2]}, rows={1: [13, 18]}), ("a", "b"), [("freed", "", [4])]),
}


def steady_steps(changed: str, as_tensors: bool) -> dict:
    """Equal steps of a and b, their rows moving on inside their blocks, then one that differs in one thing."""
    guard = Guard()
    guard.bind_state(1, Caches().views())
    guard.slots_changed([("allocated", "a", [1, 3]), ("allocated", "b", [2, 4]), ("allocated", "c", [5])])

    def step(writes: WriteSet, requests: tuple[str, ...]) -> None:
        if as_tensors:
            slots = {group: torch.tensor(values) for group, values in writes.slots.items()}
            writes = WriteSet(slots=slots, rows={group: torch.tensor(values) for group, values in writes.rows.items()})
        guard.open_step(BatchFacts("none", 2, 2, 2, 2, True, requests))
        guard.close_step(Path.FAST, (), "decode/t2", 2, 2, 2, 0, writes)

    for offset in range(BLOCK):
        step(WriteSet(slots={0: [1, 2]}, rows={1: [3 * BLOCK + offset, 4 * BLOCK + offset]}), ("a", "b"))
    assert guard.report()["violations"]["by_reason"] == {}
    writes, requests, changes = ONE_DIFFERENCE[changed]
    guard.slots_changed(changes)
    step(writes, requests)
    return guard.report()


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("changed", ONE_DIFFERENCE)
def test_one_difference_between_two_equal_steps_is_seen_at_once(changed, as_tensors):
    assert set(steady_steps(changed, as_tensors)["violations"]["by_reason"]) == {"slot_not_owned"}


def test_in_steady_steps_nobody_is_asked_twice(monkeypatch):
    asked = []
    owned = Ledger._owned
    monkeypatch.setattr(Ledger, "_owned", lambda *args: asked.append(args[1]) or owned(*args))
    steady_steps("an owner", True)
    assert asked == [0, 1] * 2, "in the first step, and in the one behind a change"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_any_single_changed_byte_changes_exactly_its_rows_digest(dtype):
    tensor = torch.zeros(5, 3, 10, dtype=dtype)
    view = StateView("x", "mla_latent", 0, 0, tensor, rows_per_slot=3)
    before = digests(view)
    raw = tensor.view(torch.uint8)
    for byte in range(raw.shape[2]):
        raw[2, 1, byte] ^= 1
        assert (digests(view) != before).nonzero().flatten().tolist() == [7]
        raw[2, 1, byte] ^= 1
    assert torch.equal(digests(view), before)


def test_views_with_gaps_between_their_slots():
    memory = torch.randn(6, 32)
    view = StateView("state", "kda_recurrent", 0, 0, memory[:, :20])
    audit = Audit(1, [view])
    audit.begin()
    memory[3, 25] += 1  # behind the state: another view's business
    assert audit.end(WriteSet(), 1, 1, lambda slot: "") == []
    audit.begin()
    memory[3, 5] += 1
    found = audit.end(WriteSet(), 1, 1, lambda slot: "")
    assert [finding.reason for finding in found] == [Reason.WRITE_OUTSIDE]
