"""SASS written by hand, as `nvdisasm` prints a kernel."""

from __future__ import annotations

NONE = 7  # the counter of an instruction that tells none


def listing(*code: str | tuple[str, int, int]) -> str:
    """An instruction, alone or with the counter that it tells and those that it waits for, as bits; or a label, `NAME:`."""
    lines = [".section .text.kernel"]
    for i, one in enumerate(code):
        text, tells, awaits = (one, NONE, 0) if isinstance(one, str) else one
        bits = f"/* 0x{0:016x} 0x{tells << 46 | awaits << 52:016x} */"
        lines.append(text if text.endswith(":") else f"/*{i * 16:04x}*/ {text} ; {bits}")
    return "\n".join(lines)
