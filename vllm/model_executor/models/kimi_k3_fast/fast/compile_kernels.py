"""Kernels that the store lacks, compiled side by side in processes of their own, before a server's first capture.

    python -m vllm.model_executor.models.kimi_k3_fast.fast.compile_kernels WORK SHARE SHARES

is one such process: WORK is a pickled (architecture, kernel specs), of which it compiles every SHARES-th from SHARE on. Plain
processes, since vLLM's workers are daemons, which may not use `multiprocessing`, and the DSL's compiler does not survive a fork.
"""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ..ops import build

SAY_SECONDS = 15.0


def _missing(specs: Iterable[build.KernelSpec], arch: str) -> list[build.KernelSpec]:
    return [s for s in dict.fromkeys(specs) if build.store.find(arch, f"{s.name}-{build.content_hash(s, arch)}") is None]


def compile_missing(specs: Iterable[build.KernelSpec], arch: str, say: Callable[[str], None]) -> int:
    """Compile what the store lacks, in as many processes as there are cores (K3FAST_JOBS: fewer). Returns how many kernels.

    Raises RuntimeError with the compiler's last words where one fails. Ranks of a host share the work by the store's locks.
    """
    missing = _missing(specs, arch)
    if not missing:
        return 0
    random.Random(os.getpid()).shuffle(missing)  # the ranks of a host begin with different kernels, and meet at few locks
    jobs = max(1, min(int(os.environ.get("K3FAST_JOBS", os.cpu_count() or 1)), len(missing)))
    say(
        f"compiling {len(missing)} kernels for {arch} in {jobs} processes; the next start finds them in {build.store.folders[-1]}"
    )
    started = said = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work.pickle"
        work.write_bytes(pickle.dumps((arch, missing)))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        logs = [open(Path(folder) / f"{share}.log", "w+") for share in range(jobs)]  # noqa: SIM115  closed with the processes
        running = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(work), str(i), str(jobs)], env=environment, stdout=log, stderr=log
            )
            for i, log in enumerate(logs)
        ]
        try:
            while any(process.poll() is None for process in running) and not any(process.poll() for process in running):
                time.sleep(0.2)
                if time.monotonic() - said > SAY_SECONDS:
                    said = time.monotonic()
                    done = len(missing) - len(_missing(missing, arch))
                    say(f"{done} of {len(missing)} kernels compiled after {said - started:.0f} s")
            for process, log in zip(running, logs, strict=True):
                if process.poll():
                    log.seek(0)
                    raise RuntimeError(f"a kernel for {arch} does not compile: {log.read()[-3000:]}")
        finally:
            for process, log in zip(running, logs, strict=True):
                process.kill()
                process.wait()
                log.close()
    return len(missing)


def main(work: str, share: str, shares: str) -> None:
    arch, specs = pickle.loads(Path(work).read_bytes())
    for spec in specs[int(share) :: int(shares)]:
        build.ensure(spec, arch)


if __name__ == "__main__":
    main(*sys.argv[1:])
