"""A damaged checkpoint behind `vllm serve`: the server ends before it answers, and its log names what is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from vllm.model_executor.models.kimi_k3_fast.cli.server import Server, ServerFailed

pytestmark = pytest.mark.engine


def weights(directory: Path) -> Path:
    return max(directory.glob("*.safetensors"), key=lambda file: file.stat().st_size)


def truncate(directory: Path) -> str:
    """Cut the end of a file off; what the log must say."""
    file = weights(directory)
    file.write_bytes(file.read_bytes()[:-1000])
    return file.name


def poison(directory: Path) -> str:
    """Put one NaN into one tensor; what the log must say."""
    file = weights(directory)
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if name.endswith("o_proj.weight"))
    tensors[name].view(-1)[5] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    return f"not finite: {name} holds NaN"


@pytest.mark.parametrize("damage", [poison, pytest.param(truncate, marks=pytest.mark.soak)])
def test_no_server_answers_for_a_damaged_checkpoint(tiny: Path, tmp_path: Path, damage: Callable[[Path], str]) -> None:
    """The loader refuses every kind of damage in its own tests; here the way of a refusal to whoever started the server. A NaN is
    found last, with most of the weights loaded; the rest of the way is the same for all."""
    directory = tmp_path / "damaged"
    shutil.copytree(tiny, directory)
    expected = damage(directory)
    log = tmp_path / "server.log"
    with pytest.raises(ServerFailed, match=r"exit code [1-9]"), Server(directory, ["--max-model-len", "256"], log=log):
        pass
    text = log.read_text(errors="replace")
    assert "CheckpointError" in text and expected in text, text[-3000:]
