"""The order checker catches every mutant, in PTX and in SASS, and passes what is right."""

from __future__ import annotations

import dataclasses
import os

import pytest
from order_kernels import MUTANTS, RIGHT
from sass_listing import listing
from scale_kernel import spec as scale_spec

from vllm.model_executor.models.kimi_k3_fast.ops import build, commands, index, projection, verify
from vllm.model_executor.models.kimi_k3_fast.ops.build import KernelSpec
from vllm.model_executor.models.kimi_k3_fast.ops.cubin import parameter_offsets
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import Tactic
from vllm.model_executor.models.kimi_k3_fast.ops.verify import sass
from vllm.model_executor.models.kimi_k3_fast.ops.verify.flow import Kind
from vllm.model_executor.models.kimi_k3_fast.ops.verify.landing import UNTOLD


@pytest.mark.parametrize("spec", RIGHT, ids=lambda spec: spec.name)
def test_right_kernels_pass(spec: KernelSpec, arch: str, shared_store: build.Store) -> None:
    report = verify.check(spec, arch)
    assert report.passed, str(report)
    assert all(report.ordered.values()), "a kernel in which nothing was followed proves nothing"


@pytest.mark.parametrize(("spec", "words"), MUTANTS, ids=lambda value: getattr(value, "name", ""))
def test_mutants_are_caught_in_ptx_and_in_sass(spec: KernelSpec, words: str, arch: str, shared_store: build.Store) -> None:
    report = verify.check(spec, arch)
    for stage in ("PTX", "SASS"):
        assert any(f.stage == stage and words in f.problem for f in report.findings), f"{stage} of {report}"


def _listings(arch: str) -> tuple[str, str, list[tuple[int, int]]]:
    stem = f"bf16_scale-{build.content_hash(scale_spec(), arch)}"
    path = build.ensure(scale_spec(), arch) / f"{stem}.cubin"
    return path.with_suffix(".ptx").read_text(), verify.disassemble(path), parameter_offsets(path)


def test_a_load_that_the_assembler_moved_is_caught_in_sass_alone(arch: str, shared_store: build.Store) -> None:
    ptx, sass, offsets = _listings(arch)
    lines = sass.splitlines()
    wait = next(i for i, line in enumerate(lines) if "ACQBULK" in line)
    load = max(i for i, line in enumerate(lines) if "LDG" in line)
    lines[load + 1 : load + 1] = [lines[wait]]  # the wait now stands behind the activation's load
    del lines[wait]
    report = verify.check_files(scale_spec(), arch, ptx, "\n".join(lines), offsets)
    assert {f.stage for f in report.findings} == {"SASS"}
    assert "load of ACTIVATION before the dependency wait" in str(report)


def test_a_weight_stream_that_the_assembler_undid_is_reported(arch: str, shared_store: build.Store) -> None:
    ptx, sass, offsets = _listings(arch)
    lines = sass.splitlines()
    first = next(i for i, line in enumerate(lines) if "LDC R1" in line)
    lines.insert(first, next(line for line in lines if "ACQBULK" in line))
    report = verify.check_files(scale_spec(), arch, ptx, "\n".join(lines), offsets)
    assert [f.problem for f in report.findings if "moved by the assembler" in f.problem], str(report)


def test_what_is_declared_decides(shared_store: build.Store) -> None:
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
def test_what_cannot_be_followed_is_an_error(stage: str, old: str, new: str, words: str, shared_store: build.Store) -> None:
    ptx, sass, offsets = _listings("sm_90a")
    texts = {"ptx": ptx, "sass": sass}
    assert old in texts[stage]
    texts[stage] = texts[stage].replace(old, new)
    report = verify.check_files(scale_spec(), "sm_90a", texts["ptx"], texts["sass"], offsets)
    assert words in str(report)


def test_every_kernel_compiles_keeps_the_order_and_its_registers() -> None:
    """All of the index on all three architectures, as `k3fast kernels verify`: compiled here unless kept from an earlier run."""
    verdicts = list(commands.verify_kernels(jobs=os.cpu_count() or 1))
    assert len(verdicts) == len(index.specs()) * len(build.ARCHS) > 0
    failed = [f"{v.arch} {v.kernel} {v.stem}: {'; '.join(v.findings)}" for v in verdicts if not v.passed]
    assert not failed, "\n".join(failed)


def test_the_commands_list_compile_and_verify(
    fresh_store: build.Store, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(index, "specs", lambda op=None: [scale_spec(), MUTANTS[0][0]])
    assert not any(row.compiled for row in commands.list_kernels(("sm_90a",)))
    shipped = tmp_path_factory.mktemp("shipped")
    rows = list(commands.compile_kernels(("sm_90a", "sm_103a"), out=shipped))
    assert len(rows) == 4 and all(row.registers and row.stack == 0 for row in rows)
    assert {path.name for path in shipped.iterdir()} == {"sm_90a", "sm_103a"}

    build.store = build.Store([shipped, *fresh_store.folders])  # a host that was given the folder
    assert all(row.compiled for row in commands.list_kernels(("sm_90a",)))
    monkeypatch.setattr(build, "compile_artefact", lambda *_: pytest.fail("compiled although it was shipped"))
    right, mutant = commands.verify_kernels(("sm_90a",))
    assert right.passed and not mutant.passed
    assert list(commands.verify_kernels(("sm_90a",))) == [right, mutant], "a kept verdict differs from the fresh one"
    with pytest.raises(ValueError, match="sm_80"):
        list(commands.verify_kernels(("sm_80",)))


def test_a_spill_is_a_failure_unless_listed(fresh_store: build.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = scale_spec()
    folder = build.ensure(spec, "sm_90a")
    record = next(folder.glob("bf16_scale-*.json"))
    record.write_text(record.read_text().replace('"stack": 0', '"stack": 16'))
    folders = [str(f) for f in fresh_store.folders]
    assert any("spilled" in finding for finding in commands._verify(folders, spec, "sm_90a")["findings"])
    monkeypatch.setattr(index, "SPILLS", {("bf16_scale", "sm_90a"): "a test"})
    commands._checker.cache_clear()
    assert not commands._verify(folders, spec, "sm_90a")["findings"]
    commands._checker.cache_clear()


# -- arrivals and the loads before them ----------------------------------------
STAGES = Tactic(groups=2, k_warps=4, tiles=3, stages=2, chunk=256, fetchers=2, height=48)
RING = projection.spec(projection.Config(8, 96, 2048, tactic=STAGES))


def _ring(arch: str) -> tuple[str, list[str], list[tuple[int, int]]]:
    """PTX, the instructions of the listing, and the parameters' offsets."""
    assert RING is not None
    path = build.artefact(RING, arch, "cubin")
    return path.with_suffix(".ptx").read_text(), verify.disassemble(path).splitlines(), parameter_offsets(path)


def test_an_arrival_that_goes_while_loads_are_under_way_is_caught(arch: str, shared_store: build.Store) -> None:
    """As in the ring before it had its fence."""
    ptx, lines, offsets = _ring(arch)
    assert verify.check_files(RING, arch, ptx, "\n".join(lines), offsets).passed
    without = verify.check_files(RING, arch, ptx, "\n".join(line for line in lines if "FENCE.VIEW.ASYNC" not in line), offsets)
    assert [(f.stage, "loads of shared memory are under way" in f.problem) for f in without.findings] == [("SASS", True)]
    arrival = next(i for i, line in enumerate(lines) if "SYNCS.ARRIVE" in line and ".ART0" in line)
    load = max(i for i, line in enumerate(lines[:arrival]) if "LDS.128" in line)
    lines.insert(load + 1, lines.pop(arrival))
    report = verify.check_files(RING, arch, ptx, "\n".join(lines), offsets)
    assert [(f.stage, "loads of shared memory are under way" in f.problem) for f in report.findings] == [("SASS", True)]


def test_an_arrival_that_is_not_known_is_an_error(arch: str, shared_store: build.Store) -> None:
    ptx, lines, offsets = _ring(arch)
    listing = "\n".join(line.replace("SYNCS.ARRIVE.TRANS64.ART0", "SYNCS.ARRIVE.TRANS64.NEW0") for line in lines)
    assert "none that is known in SASS" in str(verify.check_files(RING, arch, ptx, listing, offsets))
    assert "expected the bits" in str(verify.check_files(RING, arch, ptx, listing.replace(" 0x", " "), offsets))


def test_the_counters_are_where_they_are_read(arch: str, shared_store: build.Store) -> None:
    """In the bits of each instruction. Nobody reads a register that a load of shared memory has still to fill; were the fields
    elsewhere, some would."""
    _, lines, offsets = _ring(arch)
    filled: dict[str, int] = {}  # by register, the counter that will tell
    untold: list[str] = []
    loads = 0
    for instruction in sass.parse("\n".join(lines), offsets).instructions:
        filled = {register: counter for register, counter in filled.items() if not instruction.awaits >> counter & 1}
        assert not {*instruction.reads} & {*filled, *untold}, instruction.text
        if instruction.kind in (Kind.BRANCH, Kind.BARRIER, Kind.EXIT):
            filled, untold = {}, []  # another path: what it waits for is not followed here
        if instruction.lands == UNTOLD:
            untold += instruction.writes
        elif (counter := instruction.shuffles if instruction.lands is None else instruction.lands) not in (None, UNTOLD):
            filled |= dict.fromkeys([*untold, *instruction.writes], counter)
            untold = []
        loads += instruction.lands is not None
    assert loads > 10


OVERWRITTEN = {
    "a shuffle": (["SHFL.BFLY PT, R2, R9, 0x1, 0x1f"], 2),
    "logic with a predicate first": (["LOP3.LUT P1, R2, R9, 0x1, RZ, 0xc0, !PT"], 2),
    "the third result of a product": (["LDC.64 R10, c[0x0][0x210]", "HMMA.16816.F32.BF16 R8, R12, R16, R20"], 10),
}


@pytest.mark.parametrize("what", OVERWRITTEN)
def test_a_weights_address_that_was_overwritten_is_none_any_more(what: str) -> None:
    instructions, register = OVERWRITTEN[what]

    def findings(last: str) -> list[str]:
        code = ["LDC.64 R2, c[0x0][0x210]", "LDC.64 R6, c[0x0][0x218]", "ACQBULK", *instructions[:-1], last]
        code += [f"IMAD.WIDE R4, R{register}, 0x2, R6", "STG.E desc[UR4][R4.64], R24", "EXIT"]
        report = verify.Report("kernel", "sm_90a")
        program = sass.parse(listing(*code), [(0x210, 8), (0x218, 8)])
        verify.check_program("SASS", program, [build.Access.STATIC, build.Access.OUTPUT], [None, None], report)
        return [finding.problem for finding in report.findings]

    assert findings(instructions[-1]) == []
    assert "a static parameter is never written" in " ".join(findings(f"@P0 {instructions[-1]}")), "it may still be the address"
