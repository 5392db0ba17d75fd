"""The event file: adds up across rotations, and a bad disk costs lines, never a step."""

import errno
import json
import sys
import threading
import time

import pytest

from vllm.model_executor.models.kimi_k3_fast.guard import BatchFacts, Guard, Path, Policy
from vllm.model_executor.models.kimi_k3_fast.guard.events import EventLog
from vllm.model_executor.models.kimi_k3_fast.guard.totals import Totals, recompute


def step(guard: Guard, key: str) -> None:
    guard.open_step(BatchFacts("none", 1, 1, 1, 1, True, ("a",)))
    guard.close_step(Path.FAST, (), key, 1, 1, 1, 0)


def test_rotated_files_still_add_up(tmp_path):
    guard = Guard(Policy(events_path=str(tmp_path / "e.jsonl"), events_max_bytes=6000, events_keep=2))
    for i in range(300):
        step(guard, f"k{i % 5}")
        guard.flush()
    report = guard.report()
    assert guard.events.drain()
    files = guard.events.files()
    assert len(files) == 3, "the oldest files are gone"
    assert json.loads(files[0].read_text().split("\n")[0])["kind"] == "carry"
    assert recompute(files)["steps"] == report["steps"]
    assert recompute(files)["steps"]["fast"]["steps"] == 300


def test_files_of_an_earlier_process_are_not_added_in(tmp_path):
    policy = Policy(events_path=str(tmp_path / "e.jsonl"))
    for _ in range(2):
        guard = Guard(policy)
        step(guard, "k")
        guard.flush()
        guard.events.close()
    assert len(guard.events.files()) == 2
    assert recompute(guard.events.files())["steps"]["fast"]["steps"] == 1


class FullDisk:
    """Files that refuse to grow while `full`; every third write is torn in the middle first."""

    def __init__(self) -> None:
        self.full = False
        self.writes = 0

    def __call__(self, path, mode, buffering):
        disk, real = self, open(path, mode, buffering=buffering)  # noqa: SIM115

        class File:
            def write(self, data):
                disk.writes += 1
                if disk.full:
                    if disk.writes % 3 == 0:
                        return real.write(data[: len(data) // 2])
                    raise OSError(errno.ENOSPC, "No space left on device")
                return real.write(data)

            def close(self):
                real.close()

        return File()


def test_a_full_disk_is_counted_and_caught_up_with(tmp_path):
    guard = Guard(Policy(events_path=str(tmp_path / "e.jsonl")))
    disk = FullDisk()
    guard.events._open_file = disk
    step(guard, "k")
    guard.flush()
    assert guard.events.drain()
    disk.full = True
    began = time.perf_counter()
    for _ in range(20):
        step(guard, "k")
        guard.flush()
    assert time.perf_counter() - began < 1.0, "steps do not wait for the disk"
    deadline = time.monotonic() + 5
    while guard.events.errors < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert guard.report()["events"]["write_errors"] >= 4
    disk.full = False
    assert guard.events.drain()
    assert guard.report()["events"]["lost"] == 0
    assert guard.events.drain()
    assert recompute(guard.events.files())["steps"]["fast"]["steps"] == 21
    assert len(guard.events.files()) == 1, "errors do not rotate good files away"


def test_what_a_dead_disk_can_never_hold_is_counted_as_lost(tmp_path):
    (tmp_path / "not_a_folder").write_text("")
    log = EventLog(str(tmp_path / "not_a_folder" / "e.jsonl"), "rank0", 1000, 1)
    for _ in range(5000):
        log.write({"kind": "counters", "t": 0, "add": {}})
    assert log.lost >= 5000 - 4096 - 4096
    assert log.state()["lost"] + log.state()["waiting"] <= 5000


def test_lines_that_were_lost_are_made_up_for_when_the_disk_is_back(tmp_path):
    guard = Guard(Policy(events_path=str(tmp_path / "e.jsonl")))
    guard.events._open_file = disk = FullDisk()
    disk.full = True
    for i in range(5000):  # more than the writer keeps back
        step(guard, f"k{i % 5}")
        guard.flush()
    assert guard.events.lost > 0
    disk.full = False
    assert guard.events.drain(10.0)
    report = guard.report()
    assert guard.events.drain(10.0)
    assert report.pop("events")["lost"] > 0
    assert recompute(guard.events.files()) == report


def test_a_report_taken_during_steps_loses_none(tmp_path):
    """Under Ray, steps run on one thread and remote calls on another."""
    guard = Guard(Policy(events_path=str(tmp_path / "e.jsonl")))
    stop = threading.Event()
    reports: list[tuple[int, int]] = []  # steps by path, steps decided: a whole report is large, and there are thousands
    done = 0

    def ask() -> None:
        while not stop.is_set():
            found = guard.report()
            reports.append((found["steps"]["fast"]["steps"], found["decisions"]["step"]))
            time.sleep(1e-4)  # a thread that asks without a pause may never let the other have the lock

    asking = threading.Thread(target=ask)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    asking.start()
    try:
        while done < 4000 or (len({*reports[:200]}) <= 10 and done < 100_000):  # a busy machine
            guard.slots_changed([("allocated", "a", [done + 1])])
            step(guard, f"k{done % 50}")
            guard.count("shadow_steps")
            done += 1
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        asking.join()
    report = guard.report()
    assert report["steps"]["fast"]["steps"] == report["counters"]["slots_allocated"] == report["counters"]["shadow_steps"] == done
    assert len({*reports}) > 10, "reports fell between the steps"
    assert all(counted == decided for counted, decided in reports)


def test_an_event_of_a_newer_schema_is_refused():
    with pytest.raises(KeyError, match="found 'surprise'"):
        Totals().apply({"kind": "surprise", "t": 0})
