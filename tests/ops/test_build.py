"""The build: identity by content, ahead-of-time artefacts, and refusing to compile or load inside a capture."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch
from scale_kernel import Config, spec

from vllm.model_executor.models.kimi_k3_fast.ops import build, projection


def test_an_artefact_is_compiled_once_and_then_loaded(
    fresh_store: build.Store, arch: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        first = build.get(spec(), arch)
    assert first.stem in caplog.text and build.compiled_here == [first.stem]

    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "compile_artefact", lambda *_: pytest.fail("compiled although the artefact is there"))
    again = build.get(spec(), arch)
    assert again.stem == first.stem and again is not first
    assert build.get(spec(), arch) is again


def test_a_launcher_for_another_cpu_is_not_loaded(
    fresh_store: build.Store, arch: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would end the process at an instruction that this CPU does not have."""
    first = build.get(spec(), arch)
    record = next(fresh_store.folders[-1].glob(f"{arch}/{first.stem}.json"))
    assert {*json.loads(record.read_text())["host"]} == build.host()
    record.write_text(json.dumps({**json.loads(record.read_text()), "host": [*build.host(), "avx9000"]}))
    monkeypatch.setattr(build, "_loaded", {})
    with caplog.at_level(logging.WARNING):
        build.get(spec(), arch)
    assert build.compiled_here == [first.stem] * 2 and "that this host can run" in caplog.text
    assert {*json.loads(record.read_text())["host"]} == build.host()


def test_an_artefact_has_code_for_its_architecture_and_its_resources(shared_store: build.Store, arch: str) -> None:
    folder = build.ensure(spec(), arch)
    stem = f"bf16_scale-{build.content_hash(spec(), arch)}"
    ptx = (folder / f"{stem}.ptx").read_text()
    assert f".target {arch}" in ptx and "griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx
    record = json.loads((folder / f"{stem}.json").read_text())
    assert record["stack"] == 0 < record["registers"]
    assert [p["access"] for p in record["params"]] == ["static", "activation", "output"]


def test_the_launcher_refuses_wrong_tensors_by_name(shared_store: build.Store) -> None:
    kernel = build.get(spec(), "sm_90a")
    x = torch.zeros(8, 256, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"argument #0.*device_type=cuda"):
        kernel.function(x[0], x, x, 0)
    with pytest.raises(ValueError, match=r"argument #0.*ndim=1"):
        kernel.function(x, x, x, 0)


def test_the_hash_follows_everything_that_shapes_the_code(tmp_path: Path) -> None:
    base = spec()
    variants = [
        (spec(Config(rows=4)), "sm_90a"),
        (base, "sm_100a"),
        (dataclasses.replace(base, params=base.params[:2]), "sm_90a"),
        (dataclasses.replace(base, name="other"), "sm_90a"),
    ]
    hashes = {build.content_hash(base, "sm_90a"), *(build.content_hash(s, arch) for s, arch in variants)}
    assert len(hashes) == 1 + len(variants)
    assert build.content_hash(spec(), "sm_90a") == build.content_hash(base, "sm_90a")


def test_the_hash_covers_the_modules_an_entry_imports() -> None:
    sources = {path.name for path in build._sources(spec().source(), spec().module)}
    assert {"scale_kernel.py", "order.py"} <= sources
    assert "build.py" not in sources, "a change of the build itself shall not throw away every artefact"


def test_the_hash_is_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources are a set, whose order changes from process to process, and two are called skinny.py."""
    of = build._source_digest.__wrapped__
    kernel = projection.specs()[0]
    files = sorted(build._sources(kernel.source(), kernel.module))
    assert len({file.name for file in files}) < len(files)
    digests = set()
    for order in (files, files[::-1]):
        monkeypatch.setattr(build, "_sources", lambda path, module, order=order: order)
        digests.add(of(kernel.source(), kernel.module))
    assert len(digests) == 1


def test_a_missing_artefact_inside_a_capture_raises(fresh_store: build.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="being captured"):
        build.get(spec(), "sm_90a")
    assert not build.compiled_here


@pytest.mark.gpu
def test_a_kernel_runs_and_replays_in_a_graph(fresh_store: build.Store) -> None:
    w, x = torch.randn(256, device="cuda").bfloat16(), torch.randn(8, 256, device="cuda").bfloat16()
    y = torch.full_like(x, float("nan"))
    kernel = build.get(spec())
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="before capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        kernel(w, x, y)
    kernel(w, x, y)
    torch.testing.assert_close(y, x * w)
    with torch.cuda.graph(graph):
        kernel(w, x, y)
    x.normal_()
    y.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(y, x * w)
