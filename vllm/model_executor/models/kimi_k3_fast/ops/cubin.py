"""What the assembler recorded about a kernel, read straight from its cubin (an ELF image with one kernel).

Attributes of `.nv.info` sections are (form, number, payload). The numbers used here are those that `cuobjdump -elf` names
EIATTR_PARAM_CBANK, EIATTR_KPARAM_INFO, EIATTR_REGCOUNT, EIATTR_FRAME_SIZE and EIATTR_MIN_STACK_SIZE.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_PARAM_CBANK, _KPARAM_INFO, _REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE = 0x0A, 0x17, 0x2F, 0x11, 0x12


@dataclass(frozen=True)
class Resources:
    """Per thread: registers and stack bytes (spills and arrays with run-time indices). Per block: static shared memory bytes."""

    registers: int
    stack: int
    shared: int


def _sections(image: bytes) -> list[tuple[str, bytes]]:
    """(name, content) of each ELF section; a section without content in the file gives as many zero bytes as it is long."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    found = []
    for name, kind, _, _, start, size in headers:
        title = image[names + name : image.index(b"\0", names + name)].decode()
        content = bytes(size) if kind == 8 else image[start : start + size]  # 8: SHT_NOBITS
        found.append((title, content))
    return found


def _attributes(content: bytes) -> list[tuple[int, bytes]]:
    """The attributes of one `.nv.info` section: (number, payload)."""
    found, position = [], 0
    while position < len(content):
        form, number, value = struct.unpack_from("<BBH", content, position)
        length = value if form == 4 else 0  # only this form has a payload behind the header
        found.append((number, content[position + 4 : position + 4 + length]))
        position += 4 + length
    return found


def resources(cubin: Path) -> Resources:
    """What one block and one thread of the kernel occupy."""
    values = {_REGCOUNT: 0, _FRAME_SIZE: 0, _MIN_STACK_SIZE: 0}
    shared = 0
    for name, content in _sections(cubin.read_bytes()):
        if name == ".nv.info":
            for number, payload in _attributes(content):
                if number in values:
                    values[number] = max(values[number], struct.unpack_from("<II", payload)[1])
        elif name.startswith(".nv.shared.") and "reserved" not in name:
            shared = max(shared, len(content))
    return Resources(values[_REGCOUNT], max(values[_FRAME_SIZE], values[_MIN_STACK_SIZE]), shared)


def parameter_offsets(cubin: Path) -> list[tuple[int, int]]:
    """(offset in constant bank 0, size in bytes) of each kernel parameter. Raises ValueError where the cubin does not say."""
    base, parameters = None, {}
    for name, content in _sections(cubin.read_bytes()):
        if not name.startswith(".nv.info."):
            continue
        for number, payload in _attributes(content):
            if number == _PARAM_CBANK:
                base = struct.unpack_from("<IHH", payload)[1]
            elif number == _KPARAM_INFO:  # index, ordinal, offset, flags with the size in the upper bits
                _, ordinal, offset, flags = struct.unpack_from("<IHHI", payload)
                parameters[ordinal] = (offset, flags >> 18)
    if base is None:
        raise ValueError(
            f"Expected the place of the kernel's parameters in {cubin.name}, found none: is this a cubin with one kernel?"
        )
    return [(base + offset, size) for _, (offset, size) in sorted(parameters.items())]
