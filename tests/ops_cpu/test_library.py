"""The library as it is built and loaded: present, chosen by the machine, on torch's threads, clean under the sanitizers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("threads", [1, 3])
def test_results_do_not_depend_on_the_number_of_threads(best, threads):
    torch.manual_seed(0)
    x, w = torch.randn(3, 256).bfloat16(), torch.randn(300, 256).bfloat16()
    before = torch.get_num_threads()
    expected = best.linear(x, w)
    torch.set_num_threads(threads)
    assert torch.equal(best.linear(x, w), expected)
    torch.set_num_threads(before)


@needs_compiler
def test_sanitizers_find_nothing(tmp_path):
    """Every operator on every instruction set under the address and undefined-behaviour sanitizers, shapes and indices at random.

    A longer run: build the same program, then `driver 60`.
    """
    program = tmp_path / "driver"
    subprocess.run([sys.executable, BUILD, program, "--driver", Path(__file__).with_name("driver.cpp"), "--sanitize"], check=True)
    result = subprocess.run([program, "5"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    assert int(result.stdout.split()[0]) > 0
