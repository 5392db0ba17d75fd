"""Loading the C++ library: once, after torch, so that both share one OpenMP runtime and its threads."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char_p, c_float, c_int64, c_void_p
from pathlib import Path

import torch  # noqa: F401  before the library: the loader then resolves libgomp to the one that torch has already loaded

from ...reasons import Reason, Refusal

FILE = Path(__file__).with_name("kernels.so")
LEVELS = ("portable", "avx2", "avx512", "avx512bf16")

_P, _I, _F = c_void_p, c_int64, c_float
# Argument types of csrc/kimi_k3_fast/cpu/abi.cpp, in its order. All return 0, or 1 with a message in k3_error().
SIGNATURES: dict[str, tuple[type, ...]] = {
    "linear": (_P, _I, _P, _I, _P, *[_I] * 5),
    "gate_up": (_P, _I, _P, _I, _P, *[_I] * 4, _F, _F, _I, _I),
    "mix": (_P, _I, *[_P] * 4, *[_I] * 4, _F, _I),
    "rms_norm": (_P, _I, _P, _P, *[_I] * 3, _F),
    "situ": (_P, _I, _P, *[_I] * 3, _F, _F, _I, _I),
    "kda": (_P, _I, _P, _P, _I, _P, _I, _P, _I, _I, *[_P] * 6, *[_I] * 6, _F, _I, _P, _P, _I),
    "mla_rows": (_P, _I, *[_P] * 4, *[_I] * 5, _P, *[_I] * 7, _F),
    "mla_absorb": (_P, _P, _I, _I, _P, *[_I] * 7),
    "mla_attend": (_P, _P, *[_I] * 5, _P, *[_I] * 3, _P, _I, _I, _P, *[_I] * 5, _F, _I),
    "mla_value": (_P, _P, _I, _I, _P, _I, _P, *[_I] * 6),
    "route": (_P, _I, *[_P] * 4, *[_I] * 6, _F, _I),
    "experts": (_P, _I, *[_P] * 7, *[_I] * 6, _F, _F, _I, _I),
    "reserve": (_I,) * 7,
    "set_level": (_I,),
}


@functools.cache
def load() -> ctypes.CDLL | Refusal:
    """The library, with its signatures declared, or why there is none."""
    if not FILE.exists():
        return Refusal(
            Reason.CPU_LIBRARY, f"expected {FILE.name} beside {Path(__file__).name}, found none: built without a compiler"
        )
    try:
        library = ctypes.CDLL(str(FILE))
        for name, types in SIGNATURES.items():
            function = getattr(library, f"k3_{name}")
            function.argtypes, function.restype = types, ctypes.c_int
        library.k3_error.restype = c_char_p
        library.k3_level.restype = library.k3_allocations.restype = c_int64
        library.k3_available.argtypes = (c_int64,)
    except (OSError, AttributeError) as error:  # a library of older sources lacks a function
        return Refusal(Reason.CPU_LIBRARY, f"{FILE.name} does not load here: {error}")
    return library


def available() -> tuple[str, ...]:
    """The instruction sets of this machine that the library has kernels for, the best last; empty without a library."""
    library = load()
    if isinstance(library, Refusal):
        return ()
    return tuple(name for number, name in enumerate(LEVELS) if library.k3_available(number))


def check(library: ctypes.CDLL, failed: int) -> None:
    """Raise what the library says is wrong with a call."""
    if failed:
        raise ValueError(library.k3_error().decode())


def set_level(name: str) -> str:
    """Let every later call use this instruction set, or the best for "auto"; returns its name.

    Raises ValueError where this machine lacks it, RuntimeError without a library.
    """
    library = load()
    if isinstance(library, Refusal):
        raise RuntimeError(str(library))
    if name == "auto":
        name = available()[-1]
    if name not in LEVELS:
        raise ValueError(f"expected an instruction set of {', '.join(LEVELS)}, found {name!r}")
    check(library, library.k3_set_level(LEVELS.index(name)))
    return name
