"""The house keeps its shape: imports follow the arrows of docs/architecture.md, documents name only what exists, and no file of
vLLM stands in the repository."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "vllm.model_executor.models.kimi_k3_fast"
HOME = ROOT / "vllm/model_executor/models/kimi_k3_fast"

# For each room, the rooms it may import and whether it may import vLLM ("no", "yes", or the files that may).
ARROWS: dict[str, tuple[frozenset[str], object]] = {
    "reasons": (frozenset(), "no"),
    "base": (frozenset({"reasons"}), "no"),
    "settings": (frozenset({"reasons"}), "no"),
    "scope": (frozenset({"reasons", "settings"}), {"deployment.py"}),
    "model": (frozenset({"reasons"}), "yes"),
    "ops": (frozenset({"reasons", "comm"}), "no"),
    "comm": (frozenset({"reasons"}), "no"),
    "fast": (
        frozenset({"reasons", "settings", "scope", "ops", "comm", "guard", "model"}),
        {"metadata.py", "views.py", "served.py", "cuda.py", "cuda_exchange.py", "standard.py", "standard_views.py", "replay.py"},
    ),
    "guard": (frozenset({"reasons"}), {"api.py"}),
    "patches": (frozenset({"reasons", "guard"}), "no"),
    "evaluation": (frozenset({"reasons"}), "no"),
}
EVERYTHING = {"cli", "__init__"}

# ops must load where vLLM, CUDA and everything that vLLM brings along are absent.
OPS_MAY_USE = {"torch", "cutlass", "cuda", "numpy", "triton"}


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def room_of(file: Path) -> str:
    return file.relative_to(HOME).with_suffix("").parts[0]


def imported(file: Path) -> Iterator[tuple[str, int]]:
    """Absolute names of the modules that `file` imports anywhere, with line numbers; names for type checking alone left out."""
    package = [*PACKAGE.split("."), *file.relative_to(HOME).parts[:-1]]
    tree = ast.parse(file.read_text())
    skipped = {id(inner) for node in ast.walk(tree) if is_type_checking(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            if start == PACKAGE:
                yield from ((f"{start}.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield start, node.lineno


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def sources() -> list[Path]:
    return sorted(HOME.rglob("*.py"))


@pytest.mark.parametrize("file", sources(), ids=lambda file: str(file.relative_to(HOME)))
def test_imports_follow_the_arrows(file: Path) -> None:
    room = room_of(file)
    if room in EVERYTHING:
        return
    assert room in ARROWS, f"{file} is in a room that docs/architecture.md does not know"
    rooms, vllm = ARROWS[room]
    wrong = []
    for name, line in imported(file):
        if name == PACKAGE or name.startswith(PACKAGE + "."):
            other = (name.removeprefix(PACKAGE).strip(".") or "__init__").split(".")[0]
            if other not in rooms | {room}:
                wrong.append(f"line {line}: {room} may import {sorted(rooms)}, found {other}")
        elif name.split(".")[0] == "vllm" and vllm != "yes" and (vllm == "no" or file.name not in vllm):
            wrong.append(f"line {line}: vLLM ({name}) may be imported here by {vllm if vllm != 'no' else 'nobody'}")
    assert not wrong, "\n".join(wrong)


def test_the_table_and_the_picture_show_the_arrows() -> None:
    rows = re.findall(
        r"^\| `(\w+)\S*` \|.*\| ([\w, ]+?)(?:;[^|]*)? \|$", (ROOT / "docs/architecture.md").read_text(), flags=re.MULTILINE
    )
    assert dict(rows).pop("cli") == "everything"
    table = {room: set(known.split(", ")) - {"nothing"} for room, known in rows if room != "cli"}
    assert table == {room: set(rooms) for room, (rooms, _) in ARROWS.items()}
    picture = (ROOT / "docs/architecture.svg").read_text()
    drawn = set(re.findall(r'<path id="(\w+)-(\w+)"', picture))
    assert drawn == {(room, other) for room, (rooms, _) in ARROWS.items() for other in rooms - {"reasons"}}
    named = picture.partition('font-weight="bold">')[2]  # after the title
    assert not [room for room in (*ARROWS, "cli") if not re.search(rf">{room}\b", named)]


def test_ops_use_torch_and_the_dsl_only() -> None:
    import sys

    allowed = OPS_MAY_USE | sys.stdlib_module_names
    wrong = [
        f"{file.relative_to(HOME)}:{line}: {name}"
        for file in sources()
        if room_of(file) in {"ops", "comm"}
        for name, line in imported(file)
        if not name.startswith(PACKAGE) and name.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_of_vllm_stands_in_the_repository() -> None:
    outside = [str(file.relative_to(ROOT)) for file in tracked("vllm") if not file.is_relative_to(HOME)]
    assert not outside, outside


def test_stock_vllm_is_not_shadowed() -> None:
    above = [HOME.parents[i] / "__init__.py" for i in range(3)]
    assert not [str(file) for file in above if file.exists()]


def documents() -> list[Path]:
    return [file for file in tracked("*.md") if "evidence" not in file.parts]


NAMED = re.compile(r"`([\w./-]+/[\w.-]+\.(?:py|md|json|txt|toml|diff|html|svg|png|ya?ml|in|cpp))`|\]\(([\w./-]+)\)")


@pytest.mark.parametrize("document", documents(), ids=lambda file: str(file.relative_to(ROOT)))
def test_documents_name_paths_that_exist(document: Path) -> None:
    """Links, and names in backquotes with a folder: seen from the root, the document, the package, or stock vLLM's folder. A
    first folder in capitals stands for one that the reader chooses."""
    import vllm

    places = (ROOT, document.parent, HOME, HOME.parent, Path(vllm.__path__[0]).parent)
    found = [match[1] or match[2] for match in NAMED.finditer(document.read_text())]
    names = sorted({name for name in found if not name.partition("/")[0].isupper()})
    missing = [name for name in names if not any((place / name).exists() for place in places)]
    assert not missing, missing


def test_documents_name_commands_that_exist() -> None:
    from typer.main import get_command

    from vllm.model_executor.models.kimi_k3_fast.cli.app import app

    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    wrong = []
    for document in documents():
        for line in re.findall(r"(?:^|`|\$ )((?:make|k3fast) [a-z-]+)", document.read_text(), flags=re.MULTILINE):
            tool, name = line.split()
            if name not in (targets if tool == "make" else known):
                wrong.append(f"{document.relative_to(ROOT)}: {line}")
    assert not wrong, wrong
