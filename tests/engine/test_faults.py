"""A fast operator off by a hundredth in a running engine: found, retired, saved, and found again by `k3fast replay-step`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from engines import Engine, retire, set_policy, spoil_attention, take_path, tokens

pytestmark = pytest.mark.engine

REPLAY = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1] / "model")!r}]
from engines import spoil_attention
from typer.testing import CliRunner
from vllm.model_executor.models.kimi_k3_fast.cli.app import app
for factor in (1.0, 1.01):
    spoil_attention(None, factor)
    result = CliRunner().invoke(app, ["replay-step", sys.argv[1]])
    print("RESULT", factor, result.exit_code, "past the bar" in result.output, "other numbers than it did" in result.output)
"""


@pytest.mark.parametrize("family", ["k3"], indirect=True)
def test_an_operator_off_by_a_hundredth_is_retired_saved_and_replayed(family: Engine) -> None:
    family.call(take_path, "fast")
    before = family.reports()[0]
    prompts = [tokens(140, 80), tokens(9, 81)]
    family.call(spoil_attention, 1.01)
    family.call(set_policy, {"shadow_every": 1})
    family.run(prompts)  # holds every token to the reference: a shadowed step hands out the standard path's numbers
    family.call(set_policy, {"shadow_every": 0})
    family.call(spoil_attention, 1.0)
    family.call(retire, [])
    after = family.reports()[0]
    new = {code: n - before["violations"]["by_reason"].get(code, 0) for code, n in after["violations"]["by_reason"].items()}
    assert {code for code, n in new.items() if n} == {"shadow_state"}
    where = after["violations"]["last"][-1]["where"]
    assert where["tensor"] == "layers.4.conv", "the first state behind layer 3, the first with MLA"
    assert after["quarantined"][where["plan_key"]] == "shadow_state"
    assert after["steps"]["by_reason"]["plan_quarantined"] >= 10, "the rest of the run was standard"

    done = subprocess.run([sys.executable, "-c", REPLAY, where["saved"]], capture_output=True, text=True, timeout=300)
    results = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert results == [["1.0", "0", "False", "False"], ["1.01", "1", "True", "False"]], done.stdout[-2000:] + done.stderr[-2000:]
