"""Blackwell's kernels have run on no device. What their PTX computes is seen on the machine of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import bulk_machine
import pytest
import torch
from test_races import CASES

from vllm.model_executor.models.kimi_k3_fast.ops import build

BLACKWELL = [arch for arch in build.ARCHS if arch != "sm_90a"]
OF_COMPILING = ("test_verify.py", "test_order.py", "test_build.py", "test_blackwell.py")


@pytest.mark.parametrize("arch", BLACKWELL)
@pytest.mark.parametrize("name", CASES)
def test_the_same_numbers_as_hoppers(name: str, arch: str, shared_store: build.Store) -> None:
    make, blocks, cluster, _ = CASES[name]
    torch.manual_seed(3)
    spec, inputs = make()
    found = {}
    for which in ("sm_90a", arch):
        tensors = {key: tensor.clone() for key, tensor in inputs.items()}
        bulk_machine.run(spec, tensors, (blocks,), cluster, arch=which)
        found[which] = tensors
    for key, tensor in found["sm_90a"].items():
        torch.testing.assert_close(found[arch][key], tensor, rtol=2**-7, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.soak
@pytest.mark.parametrize("arch", BLACKWELL)
def test_all_kernels_against_float64(arch: str) -> None:
    """The operators' own tests once more: those that play a kernel play this architecture's."""
    folder = Path(__file__).parent
    files = [str(path) for path in sorted(folder.glob("test_*.py")) if path.name not in OF_COMPILING]
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", *files]
    done = subprocess.run(command, env={**os.environ, "K3FAST_PTX_ARCH": arch}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
