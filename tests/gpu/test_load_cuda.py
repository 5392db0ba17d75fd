"""The load of `tests/server/load_clients.py` on GPUs: 64 clients, audit and shadow on.

Twenty seconds here; the evidence is of ten minutes:

    K3FAST_LOAD_SECONDS=600 K3FAST_LOAD_RESULT=benchmarks/results/h200/load_64_clients.json pytest tests/gpu/test_load_cuda.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from load_clients import Load, judge, play
from slices import BUDGET, NAME, gpu_memory
from timing import provenance

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

SECONDS = float(os.environ.get("K3FAST_LOAD_SECONDS", "20"))
RESULT = os.environ.get("K3FAST_LOAD_RESULT", "")
LOAD = Load(NAME, clients=64, budget=BUDGET, prompt=600, answer=200, dropped=2000, prefixes=(900, 1500, 2400))


def test_64_clients_with_audit_and_shadow(load_server: Any) -> None:
    """A checked step copies the caches and runs three times: one of the two in eight leaves the server a server."""
    pytest.importorskip("httpx")
    where = {name: value for name, value in provenance().items() if name != "method"}  # of timing
    found = {
        "provenance": where,
        **play(load_server.url, LOAD, min(10.0, SECONDS / 2), SECONDS, lambda: gpu_memory(load_server.url)),
    }
    if RESULT:
        Path(RESULT).write_text(json.dumps(found, indent=1) + "\n")
    judge(found, LOAD, grown_mib=64)
