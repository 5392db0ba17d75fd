"""Kernels from source to callable: ahead of time, cached by content, never while serving.

How an op uses it
-----------------
1. Device half, `ops/<op>/cute.py`: a kernel and its entry. The entry is plain Python that runs while the kernel is traced. It
   gets the config, each tensor wrapped in its access type (`ops/order.py`), and the stream, and launches exactly one kernel,
   whose tensor arguments are the entry's, in the same order: so the order checker knows which kernel parameter is which tensor.

       @cute.kernel
       def _scale(w: Static, x: Dynamic, y: Output, columns: cutlass.Constexpr):
           thread, _, _ = cute.arch.thread_idx()
           row, _, _ = cute.arch.block_idx()
           weight = w.early()[thread]                       # before the wait: a weight
           token = dependency_wait()
           release_dependents()
           y.after(token)[row, thread] = x.after(token)[row, thread] * weight

       def bf16_scale(config, w, x, y, stream):
           grid, block = [config.rows, 1, 1], [config.columns, 1, 1]
           _scale(w, x, y, config.columns).launch(grid=grid, block=block, stream=stream, use_pdl=True)

2. Host half, `ops/<op>/__init__.py`: describe the kernel with a `KernelSpec`, once, in `plan`:

       spec = KernelSpec(
           name="bf16_scale", op="scale", config=config, entry=f"{__name__}.cute:bf16_scale",
           params=(
               Param("w", "bf16", (config.columns,), STATIC),
               Param("x", "bf16", (config.rows, config.columns), ACTIVATION),
               Param("y", "bf16", (config.rows, config.columns), OUTPUT),
           ),
       )
       kernel = build.get(spec, "sm_90a")      # in plan or bind: loads the artefact, or compiles it once and says so
       kernel(w, x, y)                         # in run: torch CUDA tensors, on torch's current stream; or stream=<int handle>

   Shapes and types are checked at each call by the generated host code (a wrong one is a ValueError that names the argument). A
   size that is known only at run (a cache's number of blocks) is a `Sym("blocks")`; strides default to row-major. SCALAR
   parameters are passed as numbers.

   A weight load that shall be in flight before the wait must not be `ld.global.nc` (`LDG.CONSTANT`): the assembler moves such a
   load behind the wait. Use `device/vectors.py: load_words_streaming`, a plain load, `cp.async` or a bulk copy.

3. `ops/<op>/__init__.py` has `specs() -> list[KernelSpec]`, and `ops/index.py` lists it: it is then compiled and checked in CI.

Artefacts
---------
An artefact is four files named `<kernel>-<hash>`: `.o` (host launcher with the cubin inside, loaded through TVM-FFI in a few
milliseconds), `.ptx` and `.cubin` (for the order checker), `.json` (registers, spills, shared memory, parameters, versions). The
hash covers the source of the entry's module and of everything it imports from `ops`, the config, the parameters, the architecture
and the DSL's version. Compiling needs no GPU. They are looked for in `Store.folders` in order and written to the last one;
`k3fast kernels compile --out DIR` fills such a folder to ship. A missing artefact is logged, counted in `compiled_here` and
compiled once; inside a CUDA graph capture it raises. So is one whose launcher was compiled on a CPU with instruction sets that
this one lacks.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .cubin import resources

logger = logging.getLogger(__name__)

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
_ROOM = __name__.rpartition(".")[0]  # the `ops` package
_FORMAT = 2  # raise when the artefact's files or calling convention change


class Access(enum.Enum):
    """What a kernel may do with a parameter, and so which type of `ops/order.py` it arrives as."""

    STATIC = "static"  # loaded weights and tables: may be read before the dependency wait
    ACTIVATION = "activation"  # written by an earlier kernel
    SETTLED = "settled"  # written by a kernel that has finished when this one starts: see `ops/order.py`
    STATE = "state"  # cache or recurrent state, read and written in place
    MAILBOX = "mailbox"  # data written by peers: read behind an acquire, or by strong loads of words that carry their epoch
    SIGNAL = "signal"  # flags by which peers order mailboxes: strong at system scope, released and acquired
    OUTPUT = "output"  # written here
    SCALAR = "scalar"  # a number, passed by value


STATIC, ACTIVATION, SETTLED, STATE, MAILBOX, SIGNAL, OUTPUT, SCALAR = Access


@dataclass(frozen=True)
class Sym:
    """A size or stride that is known only at run; the same name in one spec means the same size."""

    name: str
    divisible_by: int = 1
    bits: int = 32


@dataclass(frozen=True)
class Param:
    """One kernel parameter. `dtype`: a key of `DTYPES`. `strides` in elements, row-major by default.

    `align`: bytes the pointer is aligned to.
    """

    name: str
    dtype: str
    shape: tuple[int | Sym, ...]
    access: Access
    strides: tuple[int | Sym, ...] | None = None
    align: int = 16
    points_to: Access | None = None


@dataclass(frozen=True)
class KernelSpec:
    """All that determines a kernel. `entry`: "module:function" (imported only to compile), or the function itself. `settles`: it
    releases its dependents behind its own wait, and nowhere else, so what was written in front of it is settled for them."""

    name: str
    op: str
    config: Any
    entry: str | Callable[..., None]
    params: tuple[Param, ...]
    settles: bool = False

    @property
    def module(self) -> str:
        return self.entry.partition(":")[0] if isinstance(self.entry, str) else self.entry.__module__

    def function(self) -> Callable[..., None]:
        if not isinstance(self.entry, str):
            return self.entry
        module, _, name = self.entry.partition(":")
        return getattr(importlib.import_module(module), name)

    def source(self) -> Path:
        if not isinstance(self.entry, str):
            return Path(inspect.getfile(self.entry))
        found = importlib.util.find_spec(self.module)
        if found is None or found.origin is None:
            raise ModuleNotFoundError(f"Kernel {self.name}: expected its entry in module {self.module}, found no such module.")
        return Path(found.origin)


DTYPES = {
    "bf16": ("BFloat16", torch.bfloat16),
    "f16": ("Float16", torch.float16),
    "f32": ("Float32", torch.float32),
    "f8e4m3": ("Float8E4M3FN", torch.float8_e4m3fn),
    "u8": ("Uint8", torch.uint8),
    "i8": ("Int8", torch.int8),
    "i32": ("Int32", torch.int32),
    "u32": ("Uint32", torch.uint32),
    "i64": ("Int64", torch.int64),
    "u64": ("Uint64", torch.uint64),
}


# -- identity ----------------------------------------


@functools.lru_cache(maxsize=1)
def dsl_version() -> str:
    return importlib.metadata.version("nvidia-cutlass-dsl")


@functools.cache
def _sources(path: Path, module: str) -> frozenset[Path]:
    """The file and every file of the `ops` room that it imports, transitively."""
    found = {path}
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = (
                importlib.util.resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            )
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if not name.startswith(f"{_ROOM}.") or name == __name__:
                continue
            with contextlib.suppress(ModuleNotFoundError):  # `from module import function` also tries module.function
                spec = importlib.util.find_spec(name)
                if spec and spec.origin and Path(spec.origin) not in found:
                    found.add(Path(spec.origin))
                    found |= _sources(Path(spec.origin), name)
    return frozenset(found)


@functools.cache
def _source_digest(path: Path, module: str) -> str:
    digest = hashlib.sha256()
    room = Path(__file__).parent
    named = {str(s.relative_to(room) if s.is_relative_to(room) else s.name): s for s in _sources(path, module)}
    for name in sorted(named):  # by place in the room: two files are called skinny.py, and a set has no order
        digest.update(name.encode() + b"\0" + named[name].read_bytes())
    return digest.hexdigest()


def content_hash(spec: KernelSpec, arch: str) -> str:
    """16 hex digits that name this kernel's artefact: equal exactly when everything that shapes its code is equal."""
    entry = spec.entry if isinstance(spec.entry, str) else spec.entry.__qualname__
    parts: tuple[Any, ...] = (_FORMAT, spec.name, spec.op, repr(spec.config), entry.rpartition(":")[2], repr(spec.params), arch)
    parts += (spec.settles, dsl_version(), platform.machine(), _source_digest(spec.source(), spec.module))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


# -- the store ----------------------------------------
LAUNCHER_SETS = {"avx", "avx2", "fma", "bmi1", "bmi2", "avx512f", "avx512bw", "avx512dq", "avx512vl"}


@dataclass
class Store:
    """Folders that hold artefacts: read in order, written to the last."""

    folders: list[Path]

    def find(self, arch: str, stem: str) -> Path | None:
        """The folder that holds all of the artefact, with a launcher that this host can run, or None."""
        for folder in self.folders:
            record = folder / arch / f"{stem}.json"
            if record.is_file() and {*json.loads(record.read_text())["host"]} <= host():  # written last
                return folder / arch
        return None

    def writable(self, arch: str) -> Path:
        folder = self.folders[-1] / arch
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@functools.cache
def host() -> frozenset[str]:
    """What a launcher may rely on: the DSL compiles it for the CPU that it runs on, with all that this one has."""
    with contextlib.suppress(OSError):
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), flags=re.M)
        return frozenset([platform.machine(), *(LAUNCHER_SETS & {*(flags[1].split() if flags else ())})])
    return frozenset([platform.machine()])


def default_store() -> Store:
    """Artefacts shipped inside the package, then `$K3FAST_KERNELS` or the user's cache."""
    own = os.environ.get("K3FAST_KERNELS")
    cache = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kimi_k3_fast" / "kernels"
    return Store([Path(__file__).parent / "artefacts", cache])


store = default_store()
compiled_here: list[str] = []  # artefacts that this process had to compile: a serving process wants this empty


# -- compiling ----------------------------------------


def _guarded(spec: KernelSpec) -> Callable[..., None]:
    """The DSL's entry for a spec: one named argument per parameter, then the stream; tensors arrive in their access type."""
    from . import order

    wrap = {
        STATIC: order.Static,
        ACTIVATION: order.Dynamic,
        SETTLED: order.Settled,
        STATE: order.Dynamic,
        MAILBOX: order.Dynamic,
        SIGNAL: order.Signal,
        OUTPUT: order.Output,
        SCALAR: lambda number: number,
    }
    function = spec.function()

    def launcher(*args: Any) -> None:
        *values, stream = args
        wrapped = (order.Peers(v) if p.points_to else wrap[p.access](v) for p, v in zip(spec.params, values, strict=True))
        function(spec.config, *wrapped, stream)

    names = [*(p.name for p in spec.params), "stream"]
    scope: dict[str, Any] = {"launcher": launcher}
    exec(
        f"def entry({', '.join(names)}):\n    launcher({', '.join(names)})", scope
    )  # the DSL reads argument names from the signature
    entry = scope["entry"]
    entry.__name__ = entry.__qualname__ = spec.name
    entry.__module__ = spec.module
    return entry


def _fake_arguments(spec: KernelSpec) -> list[Any]:
    """Arguments with types and shapes but no memory, as the DSL wants them to compile without a GPU."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    symbols: dict[str, Any] = {}

    def size(value: int | Sym) -> Any:
        if isinstance(value, int):
            return value
        if value.name not in symbols:
            symbols[value.name] = cute.sym_int(value.bits, divisibility=value.divisible_by, symbol=value.name)
        return symbols[value.name]

    def fake(param: Param) -> Any:
        dtype = getattr(cutlass, DTYPES[param.dtype][0])
        if param.access is SCALAR:
            return dtype(0)
        strides = param.strides or _row_major(param)
        return make_fake_tensor(dtype, tuple(map(size, param.shape)), tuple(map(size, strides)), assumed_align=param.align)

    return [*(fake(p) for p in spec.params), make_fake_stream()]


def _row_major(param: Param) -> tuple[int, ...]:
    strides = [1]
    for extent in reversed(param.shape[1:]):
        if not isinstance(extent, int):
            raise ValueError(
                f"Parameter {param.name}: only the first size may be a Sym unless strides are given, found {param.shape}."
            )
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides)) if param.shape else ()


def tool(name: str) -> str:
    """Path of a CUDA binary tool such as `nvdisasm`: from NVIDIA's package of that name, from triton, or on the PATH."""
    for package, pattern in (("nvidia", f"*/bin/{name}"), ("triton", f"backends/nvidia/bin/{name}")):
        found = importlib.util.find_spec(package)
        for folder in (found.submodule_search_locations or ()) if found else ():
            for path in sorted(Path(folder).glob(pattern)):
                return str(path)
    on_path = shutil.which(name)
    if on_path is None:
        raise FileNotFoundError(f"Expected {name} from the package nvidia-cuda-{name}, triton or PATH, found none: install one.")
    return on_path


@contextlib.contextmanager
def _largest_carveout() -> Iterator[None]:
    """Every launch asks for the largest shared-memory carve-out, as a launch attribute: the DSL's `preferred_smem_carveout`
    reaches only kernels that the DSL itself loads, no exported ones. Kernels of different carve-outs cannot share an SM, so a
    change between two of them drains it, and the later one's weights cannot be on their way early.
    """
    from cutlass import Int32
    from cutlass._mlir.dialects import cuda as dialect

    plain = dialect.launch_cfg_cooperative

    def with_carveout(config: Any, value: Any, **place: Any) -> Any:
        dialect.launch_cfg_shared_mem_carveout(config, Int32(100).ir_value(**place), **place)
        return plain(config, value, **place)

    dialect.launch_cfg_cooperative = with_carveout
    try:
        yield
    finally:
        dialect.launch_cfg_cooperative = plain


def compile_artefact(spec: KernelSpec, arch: str, folder: Path) -> Path:
    """Compile one kernel for one architecture and write its four files under `folder`. Returns the path of the `.o`.

    Needs no GPU.
    """
    import cutlass.cute as cute

    stem = f"{spec.name}-{content_hash(spec, arch)}"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        options = f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {scratch}"
        with _largest_carveout():
            compiled = cute.compile(cute.jit(_guarded(spec), preprocess=False), *_fake_arguments(spec), options=options)
        ptx, cubin = (next(Path(scratch).glob(f"*.{kind}")) for kind in ("ptx", "cubin"))
        compiled.export_to_c(object_file_path=f"{scratch}/launcher.o", function_name=_symbol(stem))
        record = {
            "kernel": spec.name,
            "op": spec.op,
            "arch": arch,
            "config": repr(spec.config),
            "params": [asdict(p) for p in spec.params],
            "dsl": dsl_version(),
            "host": sorted(host()),
            **asdict(resources(cubin)),
        }
        (Path(scratch) / "record.json").write_text(json.dumps(record, indent=1, default=lambda access: access.value))
        for kind, path in (("ptx", ptx), ("cubin", cubin), ("o", "launcher.o"), ("json", "record.json")):
            os.replace(Path(scratch) / path, folder / f"{stem}.{kind}")
    return folder / f"{stem}.o"


def _symbol(stem: str) -> str:
    return re.sub(r"\W", "_", f"k3_{stem}")


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """One process at a time: the ranks of one host want the same kernels at the same moment."""
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def ensure(spec: KernelSpec, arch: str) -> Path:
    """The folder that holds the artefact's files, compiled now if no folder of the store has them."""
    stem = f"{spec.name}-{content_hash(spec, arch)}"
    found = store.find(arch, stem)
    if found:
        return found
    folder = store.writable(arch)
    with _only_one(folder / f".{stem}.lock"):
        if not store.find(arch, stem):
            compile_artefact(spec, arch, folder)
            compiled_here.append(stem)
    return folder


def artefact(spec: KernelSpec, arch: str, kind: str) -> Path:
    """The `ptx`, `cubin`, `o` or `json` of a kernel, compiled now if it is missing."""
    return ensure(spec, arch) / f"{spec.name}-{content_hash(spec, arch)}.{kind}"


# -- running ----------------------------------------


@dataclass
class Compiled:
    """A kernel ready to launch. Call it with torch CUDA tensors (numbers for SCALAR parameters) in the order of `spec.params`."""

    spec: KernelSpec
    arch: str
    stem: str
    function: Callable[..., None] = field(repr=False)
    _used_on: set[int] = field(default_factory=set, repr=False)

    def __call__(self, *args: Any, stream: int | None = None) -> None:
        """Launch on `stream` (a CUDA stream handle), by default torch's current one.

        Raises if the first launch on a device is captured.
        """
        device = torch.cuda.current_device()
        if device not in self._used_on:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"Kernel {self.spec.name}: expected a launch on device {device} before capture, found none. "
                    "The first launch loads the code onto the device, which a capture forbids; run the step once eagerly first."
                )
            self._used_on.add(device)
        self.function(*args, torch.cuda.current_stream(device).cuda_stream if stream is None else stream)


_loaded: dict[tuple[KernelSpec, str], Compiled] = {}


def device_arch() -> str:
    """The kernel architecture of torch's current device. Raises RuntimeError where the project has none."""
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}a"
    if arch not in ARCHS:
        raise RuntimeError(
            f"Expected a device of {', '.join(ARCHS)}, found {arch}. There are no kernels for it: use the standard path."
        )
    return arch


def get(spec: KernelSpec, arch: str | None = None) -> Compiled:
    """The callable kernel for a spec, from memory, from the store, or (logged, and never inside a capture) freshly compiled."""
    arch = arch or device_arch()
    if (spec, arch) in _loaded:
        return _loaded[spec, arch]
    stem = f"{spec.name}-{content_hash(spec, arch)}"
    folder = store.find(arch, stem)
    if folder is None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"Kernel {stem} for {arch} is in none of {[str(f) for f in store.folders]} and a CUDA graph is being captured. "
                "Compile before capture: run `k3fast kernels compile`, or plan the step once eagerly."
            )
        logger.warning(
            "No artefact of kernel %s for %s that this host can run: compiling it now. `k3fast kernels compile` does this ahead "
            "of time, for CPUs with the instruction sets of the one that it runs on.",
            stem,
            arch,
        )
        folder = ensure(spec, arch)

    import cutlass.cute as cute

    module = cute.runtime.load_module(str(folder / f"{stem}.o"), enable_tvm_ffi=True)
    _loaded[spec, arch] = Compiled(spec, arch, stem, getattr(module, _symbol(stem)))
    return _loaded[spec, arch]
