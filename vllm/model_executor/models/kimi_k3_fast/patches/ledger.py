"""The patches as data: the diffs of this folder, parsed once.

A diff is insert-only and carries no context lines, so that only the fork's own lines stand in this repository. Line numbers
count lines of the release after the diffs with smaller numbers were applied, as `git apply --unidiff-zero` needs them in that
order.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
MAX_ADDED = 40
FIELDS = ("Patch", "Why", "How", "Owner", "Upstream", "Remove when")
_TARGET = re.compile(r"(\S+) sha256 ([0-9a-f]{64})")
_HUNK = re.compile(r"@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Insertion:
    """Lines to insert after line `after` of the file as the earlier patches left it."""

    after: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Patch:
    """One diff. `targets` maps a path from the source root to the SHA-256 of the release's file."""

    name: str  # "1", "2", ...: the number that begins the file's name
    file: Path
    header: dict[str, str]
    targets: dict[str, str]
    insertions: dict[str, tuple[Insertion, ...]]

    @property
    def added(self) -> int:
        return sum(len(i.lines) for hunks in self.insertions.values() for i in hunks)


def parse(file: Path) -> Patch:
    """Read one diff. Anything but a header and pure insertions into declared targets raises ValueError."""
    head, _, body = file.read_text(encoding="utf-8").partition("\n\n")
    header: dict[str, str] = {}
    targets: dict[str, str] = {}
    for line in re.sub(r"\n\s+", " ", head).split("\n"):
        key, _, value = line.partition(": ")
        if key == "Target" and (match := _TARGET.fullmatch(value)):
            targets[match[1]] = match[2]
        elif key in FIELDS:
            header[key] = value
        else:
            raise ValueError(f"{file.name}: expected header fields {FIELDS} and 'Target: PATH sha256 HEX', found {line!r}")
    if missing := [field for field in FIELDS if field not in header]:
        raise ValueError(f"{file.name}: header lacks {missing}")
    patch = Patch(file.name.split("-")[0], file, header, targets, _insertions(file, body))
    if set(patch.insertions) != set(targets):
        raise ValueError(f"{file.name}: targets declared {sorted(targets)}, targets changed {sorted(patch.insertions)}")
    if patch.added > MAX_ADDED:
        raise ValueError(f"{file.name}: expected at most {MAX_ADDED} added lines, found {patch.added}")
    return patch


def _insertions(file: Path, body: str) -> dict[str, tuple[Insertion, ...]]:
    found: dict[str, list[Insertion]] = {}
    target, after, lines = "", -1, []  # type: str, int, list[str]

    def close() -> None:
        if lines:
            found[target].append(Insertion(after, tuple(lines)))
            lines.clear()

    for line in body.rstrip("\n").split("\n"):
        if line.startswith(("--- ", "+++ ")):
            close()
            target = line[4:].split("/", 1)[1]
            found.setdefault(target, [])
        elif line.startswith("@@"):
            close()
            match = _HUNK.fullmatch(line)
            if match is None:
                raise ValueError(f"{file.name}: expected an insertion '@@ -N,0 +M,K @@', found {line!r}")
            after = int(match[1])
        elif line.startswith("+"):
            lines.append(line[1:])
        else:
            raise ValueError(f"{file.name}: expected only added lines, found {line!r}")
    close()
    return {target: tuple(hunks) for target, hunks in found.items()}


@cache
def patches() -> tuple[Patch, ...]:
    """All patches of this folder, in order."""
    return tuple(parse(file) for file in sorted(FOLDER.glob("*.diff")))


@dataclass(frozen=True)
class Line:
    """One line of a patched file: from line `number` of the release, or inserted after it by `patch`."""

    text: str
    number: int
    patch: str = ""


def insert(source: str, target: str, refused: frozenset[str] = frozenset()) -> list[Line]:
    """`source`, the release's text of `target`, with the lines of every patch that is not refused.

    Positions are computed with all patches in place, so that a refused one does not shift the others.
    """
    lines = [Line(text, number) for number, text in enumerate(source.split("\n"), 1)]
    for patch in patches():
        for hunk in reversed(patch.insertions.get(target, ())):
            origin = lines[hunk.after - 1].number if hunk.after else 0
            lines[hunk.after : hunk.after] = [Line(text, origin, patch.name) for text in hunk.lines]
    return [line for line in lines if line.patch not in refused]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
