"""The engine's tests measure tokens against the float64 model of the model's tests. One engine for each family of models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "model")]  # for `engines` and `reference`


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one family stand together, in their order: an engine is started at each change, and that is most of their time."""
    places = [i for i, item in enumerate(items) if "family" in getattr(getattr(item, "callspec", None), "params", {})]
    together = sorted((items[i] for i in places), key=lambda item: item.callspec.params["family"])  # type: ignore[attr-defined]
    for place, item in zip(places, together, strict=True):
        items[place] = item


@pytest.fixture(scope="package")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A running fp32 engine of the tiny configuration named by the parameter: "k3" or "kimi_linear"."""
    from engines import CONFIGS, Engine

    engine = Engine.start(tmp_path_factory.mktemp(request.param), CONFIGS[request.param])
    yield engine
    engine.stop()
