"""Build the CPU kernels: `python csrc/kimi_k3_fast/cpu/build.py LIBRARY [--driver PROGRAM] [--sanitize]`; `setup.py` does too.

kernels.cpp is compiled once for each instruction set, with that set's flags and nobody else's; abi.cpp, which chooses among them
at run time, with none. The library needs the C++ compiler's OpenMP runtime and nothing of Python or torch.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent
AVX512 = ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
# Instruction set -> its flags, in the order of K3_LEVEL. Products and sums may contract to FMA at every level.
LEVELS: dict[str, list[str]] = {
    "portable": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": AVX512,
    "avx512bf16": [*AVX512, "-mavx512bf16"],
}
FLAGS = ["-O3", "-std=c++17", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
FLAGS += ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
QUIET = ["-Wno-maybe-uninitialized", "-Wno-psabi"]  # both fire inside the compiler's own intrinsics headers
SANITIZE = ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def levels() -> list[str]:
    """The instruction sets of this architecture."""
    return list(LEVELS) if platform.machine().lower() in ("x86_64", "amd64") else ["portable"]


def build(target: Path, driver: Path | None = None, sanitize: bool = False) -> None:
    """Compile the shared library `target`, or, with a `driver` source, a program that holds the kernels itself.

    Raises OSError without a compiler (`CXX`, by default g++) and CalledProcessError where it fails.
    """
    compiler = os.environ.get("CXX", "g++").split()
    flags = [*compiler, *FLAGS, *QUIET, *(SANITIZE if sanitize else [])]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [([*flags, "-c", str(SOURCES / "abi.cpp")], "abi.o")]
        for number, name in enumerate(LEVELS):
            if name in levels():
                defines = [f"-DK3_LEVEL={number}", f"-DK3_NAMESPACE={name}"]
                jobs.append(([*flags, *LEVELS[name], *defines, "-c", str(SOURCES / "kernels.cpp")], f"{name}.o"))
        if driver is not None:
            jobs.append(([*flags, f"-I{SOURCES}", "-c", str(driver)], "driver.o"))
        objects = [str(Path(folder) / name) for _, name in jobs]
        commands = [[*command, "-o", made] for (command, _), made in zip(jobs, objects, strict=True)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for result in pool.map(lambda command: subprocess.run(command, capture_output=True, text=True), commands):
                if result.returncode:
                    raise subprocess.CalledProcessError(result.returncode, result.args, result.stdout, result.stderr)
        target.parent.mkdir(parents=True, exist_ok=True)
        linked = target.with_name(f".{target.name}.{os.getpid()}")  # replaced at once: a server may be starting
        link = [*flags, *([] if driver is not None else ["-shared"]), *objects, "-o", str(linked)]
        subprocess.run(link, check=True, capture_output=True, text=True)
        linked.replace(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--driver", type=Path, help="a source with main(): build a program instead of the library")
    parser.add_argument("--sanitize", action="store_true", help="with the address and undefined-behaviour sanitizers")
    options = parser.parse_args()
    try:
        build(options.target, options.driver, options.sanitize)
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.stderr) from None


if __name__ == "__main__":
    main()
