"""What `k3fast kernels list|compile|verify` do, as plain functions: the command line adds only arguments and printing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from . import build, index
from .build import ARCHS, KernelSpec


@dataclass(frozen=True)
class Row:
    """One kernel for one architecture. `registers`, `stack`, `shared`: None while it is not compiled."""

    op: str
    kernel: str
    arch: str
    stem: str
    compiled: bool
    registers: int | None = None
    stack: int | None = None
    shared: int | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether one kernel keeps the order of memory and its registers. `findings` is empty when it passed."""

    op: str
    kernel: str
    arch: str
    stem: str
    early: dict[str, int]
    ordered: dict[str, int]
    findings: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.findings


def _checked(archs: Sequence[str]) -> Sequence[str]:
    unknown = [arch for arch in archs if arch not in ARCHS]
    if unknown:
        raise ValueError(f"Expected architectures of {', '.join(ARCHS)}, found {', '.join(unknown)}.")
    return archs


def _stem(spec: KernelSpec, arch: str) -> str:
    return f"{spec.name}-{build.content_hash(spec, arch)}"


def list_kernels(archs: Sequence[str] = ARCHS, op: str | None = None) -> list[Row]:
    """Every kernel of the index, and for those compiled what they occupy."""
    rows = []
    for spec in index.specs(op):
        for arch in _checked(archs):
            stem = _stem(spec, arch)
            folder = build.store.find(arch, stem)
            record = json.loads((folder / f"{stem}.json").read_text()) if folder else {}
            sizes = [record.get(key) for key in ("registers", "stack", "shared")]
            rows.append(Row(spec.op, spec.name, arch, stem, folder is not None, *sizes))
    return rows


def compile_kernels(archs: Sequence[str] = ARCHS, out: Path | None = None, op: str | None = None, jobs: int = 1) -> Iterator[Row]:
    """Compile what is missing, into `out` (a folder to ship) or the user's cache. Needs no GPU. Yields a row for each kernel."""
    folders = [str(out)] if out else [str(folder) for folder in build.store.folders]
    for row in _in_parallel(partial(_compile, folders), archs, op, jobs):
        yield Row(**row)


def verify_kernels(archs: Sequence[str] = ARCHS, op: str | None = None, jobs: int = 1) -> Iterator[Verdict]:
    """Compile what is missing, then check the order of memory in PTX and SASS, and that registers stay in registers."""
    folders = [str(folder) for folder in build.store.folders]
    for verdict in _in_parallel(partial(_verify, folders), archs, op, jobs):
        yield Verdict(**{**verdict, "findings": tuple(verdict["findings"])})


# -- one kernel in one process ----------------------------------------


def _in_parallel(work: Callable[[KernelSpec, str], Any], archs: Sequence[str], op: str | None, jobs: int) -> Iterator[Any]:
    pairs = [(spec, arch) for spec in index.specs(op) for arch in _checked(archs)]
    if jobs <= 1:
        for spec, arch in pairs:
            yield work(spec, arch)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:  # the DSL's compiler does not survive a fork
        yield from pool.map(work, *zip(*pairs, strict=True), chunksize=4)


def _use(folders: Sequence[str]) -> None:
    build.store = build.Store([Path(folder) for folder in folders])


def _compile(folders: Sequence[str], spec: KernelSpec, arch: str) -> dict[str, Any]:
    _use(folders)
    stem = _stem(spec, arch)
    record = json.loads((build.ensure(spec, arch) / f"{stem}.json").read_text())
    return asdict(Row(spec.op, spec.name, arch, stem, True, record["registers"], record["stack"], record["shared"]))


def _verify(folders: Sequence[str], spec: KernelSpec, arch: str) -> dict[str, Any]:
    """The verdict is kept beside the artefact, under the digest of the checker: neither can change without a new check."""
    from . import verify

    _use(folders)
    stem = _stem(spec, arch)
    folder = build.ensure(spec, arch)
    kept = folder / f"{stem}.order-{_checker()}.json"
    if kept.is_file():
        return json.loads(kept.read_text())
    report = verify.check(spec, arch)
    findings = [str(finding) for finding in report.findings]
    stack = json.loads((folder / f"{stem}.json").read_text())["stack"]
    if stack and (spec.name, arch) not in index.SPILLS:
        findings.append(f"{stack} bytes of registers are kept in memory (spilled), and ops/index.py gives no reason for it")
    verdict = asdict(Verdict(spec.op, spec.name, arch, stem, report.early, report.ordered, tuple(findings)))
    kept.write_text(json.dumps(verdict))
    return verdict


@cache
def _checker() -> str:
    """Digest of the order checker's own source and of the list of allowed spills."""
    here = Path(__file__).parent
    digest = hashlib.sha256(repr(sorted(index.SPILLS)).encode())
    for source in sorted([*(here / "verify").glob("*.py"), here / "cubin.py"]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]
