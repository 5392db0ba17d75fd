"""From timings to a table and back to a plan; what a matmul of several launches costs its layer."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import layer_chain, timing
from benchmarks.ops import matmuls, winners
from vllm.model_executor.models.kimi_k3_fast.ops import measured, projection
from vllm.model_executor.models.kimi_k3_fast.ops.library import LIBRARY
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import Tactic, ring_tactic, tactics

ROWS, COLUMNS = 3216, 7168


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "tactics.json").write_text("[]\n")
    yield tmp_path
    measured.rows.cache_clear()


def _configs(tokens: int) -> list[projection.Config]:
    found = tactics(ROWS, (COLUMNS,), tokens)
    return matmuls.compared(projection, projection.Config(tokens, ROWS, COLUMNS), found, quick=True)


def _timing(variant: str, tokens: int, us: float) -> timing.Timing:
    label = {"slice": "tp16", "batch": tokens, "rows": ROWS, "columns": COLUMNS}
    return timing.Timing(variant, label, us, us, us, 0, 0.0, None)


def test_what_was_fastest_is_what_plan_takes(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [c for tokens in (8, 32, 64) for c in _configs(tokens)]
    kernels = {tokens: next(c.tactic for c in configs if c.tokens == tokens and c.tactic != LIBRARY) for tokens in (8, 32, 64)}
    found = [_timing("stock cublas", tokens, 20.0) for tokens in (8, 32, 64)]
    found += [_timing("library", 8, 21.0), _timing("library", 32, 15.0), _timing("library", 64, 16.0)]
    found += [_timing(matmuls.name(kernels[tokens]), tokens, us) for tokens, us in ((8, 11.0), (32, 14.0), (64, 30.0))]
    monkeypatch.setattr(matmuls, "compile_all", lambda specs, arch: list(specs))
    monkeypatch.setattr(matmuls, "main", lambda name, cases, chosen: found)
    monkeypatch.setattr(matmuls.build, "device_arch", lambda: "sm_90a")
    monkeypatch.setattr(winners, "provenance", lambda commit: dict.fromkeys(("gpu", "driver", "commit", "date", "versions")))
    chosen = argparse.Namespace(compile=None, tactics=table / "tactics.json", commit=None)
    matmuls.run("projection", chosen, configs, projection.spec, iter(()), ("rows", "columns"))

    rows = json.loads((table / "tactics.json").read_text())
    assert [(row["tokens"], row["us"], row["incumbent_us"]) for row in rows] == [
        (8, 11.0, 20.0),
        (32, 14.0, 20.0),
        (64, 16.0, 20.0),
    ]
    take = lambda tokens, library=True: measured.tactic(table, tokens, library=library, rows=ROWS, columns=COLUMNS)  # noqa: E731
    assert (take(5), take(8), take(17), take(33), take(64)) == (kernels[8], kernels[8], kernels[32], LIBRARY, LIBRARY)
    assert take(64, library=False) is None, "who cannot take the library takes its own default"
    assert measured.tactic(table, 64, library=True, rows=ROWS + 1, columns=COLUMNS) is LIBRARY
    assert measured.tactic(table, 47, library=True, rows=ROWS + 1, columns=COLUMNS) is None


def test_tactics_of_one_case_have_names_of_their_own() -> None:
    for tokens in (1, 16, 32, 64):
        names = [matmuls.name(c.tactic) for c in _configs(tokens)]
        assert "library" in names and len(set(names)) == len(names)
    ring = ring_tactic(ROWS, (COLUMNS,), 8)
    assert matmuls.name(ring) != matmuls.name(replace(ring, passing=True))
    assert Tactic(**asdict(ring)) == ring


def test_a_matmul_costs_what_its_kernels_cost() -> None:
    in_proj, o_proj = [("nvjet", 20.0), ("splitk", 2.0)], [("project", 7.0)]
    front, tail = [("nvjet", 8.0), ("nvjet", 14.0), ("nvjet", 9.0), ("situ", 1.5)], [("rms_norm", 1.0), ("nvjet", 14.0)]
    layer = [("attn_res", 4.0), *in_proj, ("kda", 5.0), *o_proj, ("attn_res", 4.0), *front, ("topk", 3.0)]
    layer += [("w13_grouped", 90.0), ("w2_grouped", 60.0), *tail]
    found = layer_chain.matmul_costs(layer, 2)
    assert found == {"in_proj": 22.0, "o_proj": 7.0, "front": 32.5, "tail": 15.0}


def test_a_kernel_costs_the_median_over_layers() -> None:
    rows = [(10.0 * i, 8.0, "a" if i % 2 == 0 else "b") for i in range(8)]
    rows[4] = (40.0, 300.0, "a")  # the profiler stumbles
    assert layer_chain.costs([*rows[:5], *((start + 300, us, name) for start, us, name in rows[5:])], 2)[0] == ("a", 10.0)
