"""What tests ask of a running server besides completions: a status, the guard's report, a series."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any


def get(url: str, timeout: float = 30.0) -> tuple[int, str]:
    """Status and body of a GET; status 0 where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except (urllib.error.URLError, OSError) as error:
        return 0, str(error)


def report(url: str) -> dict[str, Any]:
    status, body = get(f"{url}/k3fast/report")
    assert status == 200, body
    return json.loads(body)


def metric(url: str, name: str) -> float:
    """The sum of a series over its labels."""
    lines = get(f"{url}/metrics")[1].splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ", name + "_total{")))


def wait_for(what: str, seconds: float, true: Any) -> float:
    """Seconds until `true()`. Fails after `seconds`."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.25)
    return time.monotonic() - began
