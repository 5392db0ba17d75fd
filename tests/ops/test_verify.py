"""The order checker catches every mutant, in PTX and in SASS, and passes what is right."""

from __future__ import annotations

import dataclasses

import pytest
from order_kernels import MUTANTS, RIGHT
from scale_kernel import spec as scale_spec

from vllm.model_executor.models.kimi_k3_fast.ops import build, verify
from vllm.model_executor.models.kimi_k3_fast.ops.build import KernelSpec
from vllm.model_executor.models.kimi_k3_fast.ops.cubin import parameter_offsets


@pytest.mark.parametrize("spec", RIGHT, ids=lambda spec: spec.name)
def test_right_kernels_pass(spec: KernelSpec, arch: str, fresh_store: build.Store) -> None:
    report = verify.check(spec, arch)
    assert report.passed, str(report)
    assert all(report.ordered.values()), "a kernel in which nothing was followed proves nothing"


@pytest.mark.parametrize(("spec", "words"), MUTANTS, ids=lambda value: getattr(value, "name", ""))
def test_mutants_are_caught_in_ptx_and_in_sass(spec: KernelSpec, words: str, arch: str, fresh_store: build.Store) -> None:
    report = verify.check(spec, arch)
    for stage in ("PTX", "SASS"):
        assert any(f.stage == stage and words in f.problem for f in report.findings), f"{stage} of {report}"


def _listings(arch: str) -> tuple[str, str, list[tuple[int, int]]]:
    stem = f"bf16_scale-{build.content_hash(scale_spec(), arch)}"
    path = build.ensure(scale_spec(), arch) / f"{stem}.cubin"
    return path.with_suffix(".ptx").read_text(), verify.disassemble(path), parameter_offsets(path)


def test_a_load_that_the_assembler_moved_is_caught_in_sass_alone(arch: str, fresh_store: build.Store) -> None:
    ptx, sass, offsets = _listings(arch)
    lines = sass.splitlines()
    wait = next(i for i, line in enumerate(lines) if "ACQBULK" in line)
    load = max(i for i, line in enumerate(lines) if "LDG" in line)
    lines[load + 1 : load + 1] = [lines[wait]]  # the wait now stands behind the activation's load
    del lines[wait]
    report = verify.check_files(scale_spec(), arch, ptx, "\n".join(lines), offsets)
    assert {f.stage for f in report.findings} == {"SASS"}
    assert "load of ACTIVATION before the dependency wait" in str(report)


def test_a_weight_stream_that_the_assembler_undid_is_reported(arch: str, fresh_store: build.Store) -> None:
    ptx, sass, offsets = _listings(arch)
    lines = sass.splitlines()
    first = next(i for i, line in enumerate(lines) if "LDC R1" in line)
    lines.insert(first, next(line for line in lines if "ACQBULK" in line))
    report = verify.check_files(scale_spec(), arch, ptx, "\n".join(lines), offsets)
    assert [f.problem for f in report.findings if "the assembler moved them" in f.problem], str(report)


def test_what_is_declared_decides(fresh_store: build.Store) -> None:
    ptx, sass, offsets = _listings("sm_90a")
    lying = dataclasses.replace(
        scale_spec(), params=(dataclasses.replace(scale_spec().params[0], access=build.ACTIVATION), *scale_spec().params[1:])
    )
    assert not verify.check_files(lying, "sm_90a", ptx, sass, offsets).passed
    short = dataclasses.replace(scale_spec(), params=scale_spec().params[:2])
    assert "expected 2 kernel parameters" in str(verify.check_files(short, "sm_90a", ptx, sass, offsets))


@pytest.mark.parametrize(
    ("stage", "old", "new", "words"),
    [
        ("ptx", "griddepcontrol.wait;", "call.uni helper, ();", "not modelled"),
        ("ptx", "griddepcontrol.wait;", "@%p1 griddepcontrol.wait;", "before the dependency wait"),
        ("sass", "ACQBULK ;", "BRX R2 -0x10 ;", "indirect branch"),
        ("sass", "ACQBULK ;", "@P0 ACQBULK ;", "before the dependency wait"),
        ("sass", "ACQBULK ;", "XLOAD R2, [R4.64] ;", "memory access that is not modelled"),
    ],
)
def test_what_cannot_be_followed_is_an_error(stage: str, old: str, new: str, words: str, fresh_store: build.Store) -> None:
    ptx, sass, offsets = _listings("sm_90a")
    texts = {"ptx": ptx, "sass": sass}
    assert old in texts[stage]
    texts[stage] = texts[stage].replace(old, new)
    report = verify.check_files(scale_spec(), "sm_90a", texts["ptx"], texts["sass"], offsets)
    assert words in str(report)
