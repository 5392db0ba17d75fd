"""What a newcomer waits for: `make demo` in a fresh clone, timed by phase, with the server's memory at its peak.

    python benchmarks/fresh_clone.py FOLDER [--out benchmarks/results/demo.json]

FOLDER must not exist. Nothing of an earlier environment is used, nor pip's cache. Linux, standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from cpu_decode import machine

ROOT = Path(__file__).resolve().parents[1]
EVERY = 0.5  # seconds between two looks at the memory


def family(root: int) -> list[tuple[int, int]]:
    """(pid, session) of every process that descends from `root`."""
    parents: dict[int, tuple[int, int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(stat.parent.name)] = (int(fields[1]), int(fields[3]))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        children = [child for child, (parent, _) in parents.items() if parent == pid]
        found += [(child, parents[child][1]) for child in children]
        todo += children
    return found


def memory(pid: int) -> int:
    """Bytes that a process holds; a page shared by n processes counts 1/n."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return 1024 * int(re.search(r"^Pss:\s+(\d+)", text, flags=re.MULTILINE)[1])


def timed(command: list[str], folder: Path) -> tuple[float, int, str]:
    """Seconds, the most bytes that processes of another session than ours (the server) held at once, and what was printed."""
    begun, peak = time.monotonic(), 0
    with (folder.parent / f"{folder.name}.log").open("w+") as log:
        environ = os.environ | {"PIP_NO_CACHE_DIR": "1"}
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=environ)
        while process.poll() is None:
            ours = os.getsid(0)
            peak = max(peak, sum(memory(pid) for pid, session in family(process.pid) if session != ours))
            time.sleep(EVERY)
        seconds = time.monotonic() - begun
        log.seek(0)
        text = log.read()
    sys.stdout.write(text)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: expected exit 0, found {process.returncode}")
    return seconds, peak, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/demo.json")
    options = parser.parse_args()
    load = [os.getloadavg()[0]]
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(options.folder)], check=True)
    install, _, _ = timed(["make", "install", f"PYTHON={sys.executable}"], options.folder)
    load.append(os.getloadavg()[0])
    demo, peak, text = timed(["make", "demo"], options.folder)
    load.append(os.getloadavg()[0])
    found = {
        "seconds": {
            "install": round(install, 1),
            "demo": round(demo, 1),
            "of_demo_until_the_server_answers": int(re.search(r"server: \S+ after (\d+) s", text)[1]),
            "total": round(install + demo, 1),
        },
        "server_memory_peak_gib": round(peak / 2**30, 2),
        "answers_right": text.count("(right)"),
        "answers_wrong": text.count("(wrong)"),
        "machine": {
            **machine(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        },
        "load_average_before_between_after": [round(value, 2) for value in load],
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip(),
    }
    options.out.write_text(json.dumps(found, indent=2) + "\n")
    print(
        f"{options.out}, in words: on {found['machine']['cores']} cores (load {min(load):.1f} to {max(load):.1f}) a fresh clone "
        f"took {install + demo:.0f} s, {install:.0f} s to install and {demo:.0f} s to serve, answer and stop; the server's "
        f"processes held {peak / 2**30:.1f} GiB at most."
    )


if __name__ == "__main__":
    main()
