"""What `scope.rules.EVIDENCE` says is held to the recorded runs: devices, ranks, and sizes to which no point was slower."""

import json
import sys
from pathlib import Path

import pytest

from vllm.model_executor.models.kimi_k3_fast.scope import rules

RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200"
EVIDENCE = rules.EVIDENCE["sm_90a"]
BOUND_BY_HOST = ("engine_tp8_5_layers",)  # a step of it was as long as the host's work, whichever path it took


def engines():
    """Files of whole-engine runs."""
    files = [path for path in sorted(RESULTS.glob("engine_*.json")) if path.stem not in BOUND_BY_HOST]
    return [path for path in files if "results" in json.loads(path.read_text())]


def read(name):
    return json.loads((RESULTS / name).read_text())


def sizes(record):
    """Of the model on one rank of the slice that was run."""
    return {"MLA heads": 96 // record["shape"]["full_tp"], "expert width": 3072 // record["shape"]["full_tp"]}


def test_clients_were_served_for_ten_minutes_with_these_ranks_on_this_device():
    load = read("load_64_clients.json")
    assert (load["provenance"]["gpu"],) == EVIDENCE.devices
    assert (load["tensor_parallel"],) == EVIDENCE.ranks
    assert load["seconds"] >= 600 and load["clients"] == 64 and load["wrong"] == []
    for rank in load["ranks"]:
        assert rank["violations"]["by_reason"] == {} and rank["steps"]["fallback"] == 0
        assert rank["policy"]["audit_every"] <= 8 and rank["counters"]["audited_steps"] > 1000
        assert rank["policy"]["shadow_every"] <= 16 and rank["counters"]["shadow_steps"] > 1000


def test_a_step_from_one_state_left_the_same_bits():
    runs = read("same_bits.json")["with the proxy fence, 200 replays with pauses each (tests/gpu/test_engine_cuda.py)"]
    assert len(runs) >= 2 and all("0 differ" in found for found in runs.values())


def test_the_kernels_are_those_that_ran(monkeypatch):
    """Byte for byte, as PTX: of every kernel that one rank takes."""
    tests = Path(__file__).parents[1]
    monkeypatch.setattr(sys, "path", [str(tests / "gpu"), str(tests.parent / "benchmarks"), *sys.path])
    import slices

    served, now = json.loads(slices.SERVED.read_text()), slices.digests()
    for name in ("test_load_cuda", "test_engine_cuda", "test_faults_cuda"):
        assert any(name in passed for passed in served["passed"]), name
    changed = sorted(name for name in {*served["ptx"], *now} if served["ptx"].get(name) != now.get(name))
    assert not changed, (
        f"{', '.join(changed)}: not what ran on {EVIDENCE.devices[0]} at {served['commit']}. Run tests/gpu there and renew the "
        "record (python tests/gpu/slices.py COMMIT), or take the device out of scope.rules.EVIDENCE."
    )


@pytest.mark.parametrize("path", engines(), ids=lambda path: path.stem)
def test_no_point_that_is_carried_was_slower_than_stock(path):
    record = json.loads(path.read_text())
    carried = all(size <= EVIDENCE.most[name] for name, size in sizes(record).items())
    slower = [(p["context"], p["batch"], round(p["ratio"], 2)) for p in record["results"] if p["ratio"] < 1]
    assert (slower == []) == carried, f"{'carried' if carried else 'refused'}, and slower at {slower}"
    for point in record["results"]:
        assert point["fast_share"] > 0.999 and all(rank["violations"] == {} for rank in point["guard"]["fast"])


def test_sizes_that_are_carried_were_run_in_an_engine():
    run = [sizes(json.loads(path.read_text())) for path in engines()]
    for name, most in EVIDENCE.most.items():
        assert most in {found[name] for found in run}
