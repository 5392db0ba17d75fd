"""The types of memory order: a wrong door does not compile."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
from order_kernels import ROWS, _plain

from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops.order import (
    Dynamic,
    FromL2,
    Ordered,
    Output,
    Peers,
    Settled,
    Static,
    dependency_wait,
)


@cute.kernel
def _reads_an_activation_early(w: Static, x: Dynamic, y: Output):
    x.early()


@cute.kernel
def _indexes_the_wrapper(w: Static, x: Dynamic, y: Output):
    dependency_wait()
    x[0]


@cute.kernel
def _writes_without_a_token(w: Static, x: Dynamic, y: Output):
    dependency_wait()
    y.after(None)[0] = w.early()[0]


@cute.kernel
def _asks_a_weight_for_order(w: Static, x: Dynamic, y: Output):
    token = dependency_wait()
    y.after(token)[0] = w.after(token)[0]


@cute.kernel
def _forges_a_token(w: Static, x: Dynamic, y: Output):
    y.after(Ordered(object(), "mine"))[0] = w.early()[0]


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (_reads_an_activation_early, "cannot be read before the dependency wait"),
        (_indexes_the_wrapper, "not read or written directly"),
        (_writes_without_a_token, "Expected the Ordered token"),
        (_asks_a_weight_for_order, "needs no token"),
        (_forges_a_token, "cannot be made by hand"),
    ],
)
def test_the_wrong_door_does_not_compile(kernel: Any, words: str, fresh_store: build.Store) -> None:
    with pytest.raises(Exception, match=words):
        build.ensure(_plain(kernel), "sm_90a")
    assert not build.compiled_here


def test_settled_elements_of_other_widths_are_refused() -> None:
    with pytest.raises(TypeError, match="16 or 32 bits, found Int64"):
        FromL2(SimpleNamespace(element_type=cutlass.Int64))[0]


@pytest.mark.parametrize("wrap", [Static, Dynamic, Output, Peers, Settled])
def test_an_access_is_decided_once(wrap: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="already Static"):
        wrap(Static(ROWS))


def test_a_peer_is_reached_with_a_token_only() -> None:
    with pytest.raises(TypeError, match="Expected the Ordered token"):
        Peers(ROWS).pointer(None, 0, None)  # type: ignore[arg-type]
