"""The library as it is built and loaded: present, chosen by the machine, on torch's threads, clean under the sanitizers."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import attend_case, expert_weights, kda_case, normal
from vllm.utils.ompmultiprocessing import OMPProcessManager

from vllm.model_executor.models.kimi_k3_fast.ops import cpu
from vllm.model_executor.models.kimi_k3_fast.ops.cpu import library
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason, Refusal

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "csrc/kimi_k3_fast/cpu/build.py"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@needs_compiler
def test_it_was_built_where_there_is_a_compiler():
    assert cpu.available(), f"{cpu.load()}; install the package again, or run {BUILD.name}"


def test_the_best_level_is_taken_and_a_missing_one_refused():
    assert cpu.CpuForms("auto").level == cpu.available()[-1]
    for name in cpu.available():
        assert cpu.CpuForms(name).name == f"cpp-{name}"
    for name in {*cpu.LEVELS, "sse9"} - {*cpu.available()}:
        with pytest.raises(ValueError, match="expected an instruction set"):
            cpu.CpuForms(name)
    cpu.CpuForms("auto")


def test_without_the_library_there_is_a_reason(tmp_path, monkeypatch):
    for file in (tmp_path / "none.so", tmp_path / "bad.so"):
        monkeypatch.setattr(library, "FILE", file)
        (tmp_path / "bad.so").write_bytes(b"no library")
        library.load.cache_clear()
        found = library.load()
        assert isinstance(found, Refusal) and found.reason is Reason.CPU_LIBRARY and file.name in found.detail
        assert cpu.available() == ()
    monkeypatch.undo()
    library.load.cache_clear()
    assert cpu.available()


def test_the_library_brings_no_second_openmp_runtime():
    """In a fresh process, it works on the runtime that torch has loaded: a second one would have its own pool of threads."""
    script = (
        "import torch; from vllm.model_executor.models.kimi_k3_fast.ops.cpu import CpuForms\n"
        "found = lambda: {l.split()[-1] for l in open('/proc/self/maps') if 'gomp' in l or 'iomp' in l or 'libomp' in l}\n"
        "x = torch.ones(64, 512); x @ x.T; before = found(); CpuForms().linear(x, x); print(*(found() - before), sep=',')"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_results_do_not_depend_on_the_number_of_threads(best):
    """Bit for bit, in every operator that divides its work."""

    def results() -> list[torch.Tensor]:
        torch.manual_seed(0)
        x, w = normal(3, 256, dtype=torch.bfloat16), normal(300, 256, dtype=torch.bfloat16)
        packed, conv_state, state, kda_weights, _ = kda_case(5, 2, torch.bfloat16, 9)
        step = best.kda_step(packed, conv_state, state, torch.tensor([4, 0, 7, 1, 2]), kda_weights, torch.bfloat16)
        query, cache, table, lengths, latent = attend_case([700, 3, 1500], 4, torch.bfloat16)
        ids, weights = best.route(normal(9, 64), normal(200, 64), normal(200), 6, True, 1.0)
        routed = best.experts(normal(9, 64), ids % 5, weights, expert_weights(5, 64, 96), 4.0, 25.0)
        attended = best.attend(query, cache, table, lengths, latent, 0.1, 1500)
        values = best.values(attended, normal(4, 40, latent, dtype=torch.bfloat16), normal(3, 160, dtype=torch.bfloat16))
        mixed = best.mix(normal(4, 40, 256), None, normal(256), normal(256), 1e-5, torch.bfloat16)
        return [best.linear(x, w), best.gate_up(x, w, 4.0, None), step, conv_state, state, attended, values, ids, routed, mixed]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = results()
        torch.set_num_threads(3)
        found = results()
    finally:
        torch.set_num_threads(before)
    assert [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)] == []


def driver(folder: Path, *flags: str) -> Path:
    program = folder / "driver"
    subprocess.run([sys.executable, BUILD, program, "--driver", Path(__file__).with_name("driver.cpp"), *flags], check=True)
    return program


def clean_environment() -> dict[str, str]:
    """vLLM's CPU platform preloads libraries into this process' children; a runtime that counts or checks has to come first."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


@needs_compiler
def test_sanitizers_find_nothing(tmp_path):
    """Every operator on every instruction set under the address and undefined-behaviour sanitizers, shapes and indices at random.

    Longer runs: `benchmarks/cpu_fuzz.py`, whose last results are in `benchmarks/results/cpu_fuzz.json`.
    """
    program = driver(tmp_path, "--sanitize")
    result = subprocess.run([program, "5"], capture_output=True, text=True, env=clean_environment())
    assert result.returncode == 0, result.stderr[-4000:]
    counts = {op: (int(valid), int(bad)) for op, valid, bad in map(str.split, result.stdout.splitlines())}
    assert set(counts) == set(library.SIGNATURES) - {"reserve", "set_level"} | {"kda_prompt"}
    assert all(valid and bad for valid, bad in counts.values()), counts


@needs_compiler
def test_no_call_allocates_the_second_time(tmp_path):
    """The library that is served, under an allocator that counts: neither the kernels nor the OpenMP runtime below them."""
    program = tmp_path / "driver"
    source = Path(__file__).with_name("driver.cpp")
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-o", program, source, library.FILE, f"-Wl,-rpath,{library.FILE.parent}"], check=True
    )
    result = subprocess.run([program, "steady"], capture_output=True, text=True, env=clean_environment())
    assert result.returncode == 0, result.stderr[-4000:]
    first, second = map(int, result.stdout.split())
    assert first > 0, "the counter counts"
    assert second == 0


def test_reserved_memory_is_enough(best):
    """After `reserve`, steps of any size up to it take no more memory."""
    best.reserve(64, 16, 64, 33, 8, 96, 64)
    before = best.allocations()
    for tokens in (1, 64, 7):
        query, cache, table, lengths, latent = attend_case([5000 // tokens] * tokens, 16, torch.bfloat16)
        best.attend(query, cache, table, lengths, latent, 0.1, 5000)
        ids, weights = best.route(normal(tokens, 96), normal(33, 96), normal(33), 8, True, 1.0)
        best.experts(normal(tokens, 96), ids, weights, expert_weights(33, 96, 64), 4.0, 25.0)
    assert best.allocations() == before


@pytest.mark.parametrize("binding", ["0", "0,1", "0|1"])
def test_threads_are_those_that_vllm_bound(binding):
    """One process a rank, with the environment that vLLM gives its workers. A rank of one CPU stays one thread; the threads of a
    rank of two stay where they were bound: nobody is oversubscribed."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    script = (
        "import os, torch\n"
        "from vllm.model_executor.models.kimi_k3_fast.ops.cpu import CpuForms\n"
        "threads = lambda: {t: sorted(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')}\n"
        "x = torch.ones(64, 4096); x @ x.T; before = threads(); ops = CpuForms()\n"
        "for _ in range(20): ops.linear(x, x); ops.situ(x, 4.0, 25.0)\n"
        "after = threads()\n"
        "print(torch.get_num_threads(), len(set(after) - set(before)), sorted({tuple(after[t]) for t in after if t in before}))"
    )
    ranks = [list(map(int, cpus.split(","))) for cpus in binding.split("|")]
    for local_rank, cpus in enumerate(ranks):
        manager = object.__new__(OMPProcessManager)  # without the deployment that its constructor asks
        manager.skip_setup, manager.cpu_lists, manager.use_iomp, manager.use_gomp = False, ranks, False, True
        with manager.configure_omp_envs(local_rank, local_rank):
            done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        count, new, places = done.stdout.split(maxsplit=2)
        assert (int(count), int(new)) == (len(cpus), 0), done.stdout
        assert set(ast.literal_eval(places)) >= {(cpu,) for cpu in cpus}
