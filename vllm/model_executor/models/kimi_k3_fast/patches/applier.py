"""Applies the patches in memory: nothing is written, and the modules keep their identity.

A patched module is imported as always. Then the functions that hold inserted lines get a new code object, compiled from the
release's source with the lines in place; classes, function objects, decorators and everything that already refers to them
stay as they are, so a module that was imported before the fork started is patched the same way. Line numbers of the new code
are those of the release's file: tracebacks and debuggers show the right lines.

A target whose SHA-256 differs from the release refuses the whole patch, and what depends on the patch is off with that reason.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ..reasons import Reason, Refusal
from . import ledger

INSTALLED, WAITING, REFUSED, FAILED, DISPLACED = "installed", "waiting", "refused", "failed", "displaced"


class Applier:
    """The patches of one process. `root` is the folder that holds the package `vllm`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.refusals: dict[str, Refusal] = {}  # by patch
        self._states: dict[tuple[str, str], str] = {}  # (patch, target) -> state
        self._codes: dict[tuple[str, str], list[tuple[ModuleType, str, CodeType]]] = {}
        self._modules = {module_name(target): target for patch in ledger.patches() for target in patch.targets}

    def apply(self) -> None:
        """Check every target, patch the modules that are imported, and wait for the others. Safe to call twice."""
        if self._states:
            return
        for patch in ledger.patches():
            if (refusal := self._drift(patch)) is not None:
                self.refusals[patch.name] = refusal
            for target in patch.targets:
                self._states[patch.name, target] = REFUSED if refusal else WAITING
        sys.meta_path.insert(0, _Finder(self))
        for name in self._modules:
            if name in sys.modules:
                self.patch_module(sys.modules[name])

    def _drift(self, patch: ledger.Patch) -> Refusal | None:
        wrong = []
        for target, expected in patch.targets.items():
            path = self.root / target
            found = ledger.sha256(path.read_bytes()) if path.exists() else "no such file"
            if found != expected:
                wrong.append(f"{target}: expected sha256 {expected}, found {found}")
        return Refusal(Reason.PATCH_DRIFT, f"patch {patch.name}: {'; '.join(wrong)}") if wrong else None

    def waits_for(self, name: str) -> bool:
        target = self._modules.get(name)
        return target is not None and WAITING in (state for (_, t), state in self._states.items() if t == target)

    def patch_module(self, module: ModuleType) -> None:
        """Give the functions of an imported module their patched code. Errors turn into a refusal, never into a crash."""
        target = self._modules[module.__name__]
        waiting = [name for (name, t), state in self._states.items() if t == target and state == WAITING]
        try:
            source = (self.root / target).read_text(encoding="utf-8")
            lines = ledger.insert(source, target, frozenset(self.refusals))
            for name, changed in _swap(module, lines).items():
                self._codes[name, target] = changed
            state = INSTALLED
        except Exception as error:
            state = FAILED
            for name in waiting:
                self.refusals[name] = Refusal(Reason.PATCH_FAILED, f"patch {name}: {target}: {type(error).__name__}: {error}")
        for name in waiting:
            self._states[name, target] = state

    def states(self) -> dict[str, dict[str, Any]]:
        """State of each patch in this process: per target, one of installed, waiting (module not imported), refused, failed,
        displaced (something replaced the patched function)."""
        result: dict[str, dict[str, Any]] = {}
        for patch in ledger.patches():
            targets = {t: self._state(patch.name, t) for t in patch.targets}
            refusal = self.refusals.get(patch.name)
            result[patch.name] = {"targets": targets, "refusal": str(refusal) if refusal else ""}
        return result

    def _state(self, name: str, target: str) -> str:
        state = self._states.get((name, target), WAITING)
        if state == INSTALLED:
            for module, qualname, code in self._codes.get((name, target), ()):
                if not any(function.__code__ is code for function in _layers(module, qualname)):
                    return DISPLACED
        return state


def module_name(target: str) -> str:
    """`vllm/v1/outputs.py` -> `vllm.v1.outputs`."""
    return target.removesuffix(".py").replace("/", ".")


def _swap(module: ModuleType, lines: Sequence[ledger.Line]) -> dict[str, list[tuple[ModuleType, str, CodeType]]]:
    """Run the module-level insertions and replace the code of every function with inserted lines; by patch, what was
    replaced."""
    tree = ast.parse("\n".join(line.text for line in lines))
    inserted = {number: line.patch for number, line in enumerate(lines, 1) if line.patch}
    top = [node for node in tree.body if node.lineno in inserted]
    functions = {name: node for name, node in _functions(tree) if _numbers(node) & set(inserted)}
    patches_of = {name: {inserted[n] for n in _numbers(node) & set(inserted)} for name, node in functions.items()}
    covered = {n for node in (*top, *functions.values()) for n in _numbers(node)}
    if lost := [n for n in inserted if n not in covered and lines[n - 1].text.strip()]:
        raise ValueError(f"inserted lines {lost} are neither at module level nor inside a function")
    _prune(tree, {id(node) for node in functions.values()}, {id(node) for node in top})
    _restore_lines(tree, lines)
    filename = str(module.__file__)
    statements = ast.Module([node for node in tree.body if id(node) in {id(n) for n in top}], [])
    codes = dict(_codes(compile(tree, filename, "exec", dont_inherit=True)))
    old = {name: _find(module, name, filename) for name in functions}
    for name, function in old.items():
        if function.__code__.co_freevars != codes[name].co_freevars:
            raise ValueError(f"{name}: expected free variables {function.__code__.co_freevars}, found {codes[name].co_freevars}")
    exec(compile(statements, filename, "exec", dont_inherit=True), module.__dict__)
    done: dict[str, list[tuple[ModuleType, str, CodeType]]] = {}
    for name, function in old.items():
        function.__code__ = codes[name]
        for patch in patches_of[name]:
            done.setdefault(patch, []).append((module, name, codes[name]))
    return done


def _restore_lines(tree: ast.AST, lines: Sequence[ledger.Line]) -> None:
    """Give every node the line numbers of the release's file; inserted lines take that of the line before them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt | ast.excepthandler | ast.arg | ast.keyword | ast.alias | ast.pattern):
            node.lineno = max(lines[node.lineno - 1].number, 1)
            node.end_lineno = max(lines[(node.end_lineno or 1) - 1].number, 1)
            if node.lineno == node.end_lineno:
                node.end_col_offset = max(node.col_offset, node.end_col_offset or 0)


def _numbers(node: ast.AST) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # type: ignore[attr-defined]


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions at module and class level, with their qualified names; nested functions belong to the one around them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _prune(tree: ast.Module | ast.ClassDef, functions: set[int], statements: set[int]) -> None:
    """Keep only what leads to the wanted functions: the rest of a large module need not be compiled again."""
    kept: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            _prune(node, functions, statements)
            if node.body:
                kept.append(node)
        elif (
            id(node) in functions or id(node) in statements or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        ):
            kept.append(node)
    tree.body = kept


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            if "<locals>" not in constant.co_qualname:
                yield from _codes(constant)


def _layers(module: ModuleType, qualname: str) -> Iterator[FunctionType]:
    """The function under that name now, and those it wraps, outermost first."""
    owner: Any = module
    *path, last = qualname.split(".")
    for part in path:
        owner = vars(owner)[part]
    found = vars(owner).get(last)
    while found is not None:
        found = getattr(found, "__func__", None) or getattr(found, "fget", None) or found
        if isinstance(found, FunctionType):
            yield found
        found = getattr(found, "__wrapped__", None)


def _find(module: ModuleType, qualname: str, filename: str) -> FunctionType:
    for function in _layers(module, qualname):
        code = function.__code__
        if code.co_qualname == qualname and code.co_filename == filename:
            return function
    raise ValueError(f"{module.__name__}.{qualname}: expected the release's function, found another one in its place")


class _Finder:
    """Lets a target module be imported by its own loader, and patches it right afterwards."""

    def __init__(self, applier: Applier) -> None:
        self._applier = applier

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not self._applier.waits_for(name):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._applier)  # type: ignore[assignment]
        return spec


class _Loader:
    """The module's own loader, and the patch after it."""

    def __init__(self, loader: Any, applier: Applier) -> None:
        self._loader, self._applier = loader, applier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._applier.patch_module(module)
