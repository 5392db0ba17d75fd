"""The whole model against the float64 reference, however a sequence is cut into steps, and what a step must leave alone."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from harness import BLOCK, Harness
from reference import Reference
from vllm.forward_context import override_forward_context

from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import random_tensors, tiny_config, tiny_kimi_linear_config

pytestmark = pytest.mark.usefixtures("parallel_groups")

CONFIGS = {"k3": tiny_config(), "kimi_linear": tiny_kimi_linear_config()}
TENSORS = {name: random_tensors(config, seed=1) for name, config in CONFIGS.items()}


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(10, 260, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(found: torch.Tensor, expected: torch.Tensor, relative: float = 1e-5) -> None:
    error = (found.double() - expected).norm() / expected.norm()
    assert error < relative, f"relative error {error:.2e}"


@pytest.fixture(params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def harness(name: str, dtype: torch.dtype = torch.float32) -> Harness:
    return Harness(CONFIGS[name], TENSORS[name], dtype=dtype)


@pytest.mark.parametrize("cuts", [[], [1], [33], [40, 41, 42], [BLOCK, 2 * BLOCK], [BLOCK - 1, BLOCK + 1], list(range(1, 70))])
def test_logits_do_not_depend_on_how_a_prompt_is_cut(name: str, cuts: list[int]) -> None:
    prompt = tokens(70)
    engine = harness(name)
    edges = [0, *cuts, len(prompt)]
    found = torch.cat([engine.step([(0, prompt[a:b])]) for a, b in pairwise(edges)])
    assert_close(found, Reference(CONFIGS[name], TENSORS[name]).logits(prompt))


def test_requests_of_a_mixed_step_do_not_see_each_other(name: str) -> None:
    """Decode rows, a prefill, a one-token prompt and a resumed chunk together, in an order no one promised."""
    engine, prompts = harness(name), [tokens(30, 1), tokens(21, 2), tokens(5, 3), tokens(40, 4)]
    got: list[list[torch.Tensor]] = [[] for _ in prompts]

    def step(*parts: tuple[int, int, int], padding: int = 0) -> None:
        logits = engine.step([(r, prompts[r][a:b]) for r, a, b in parts], padding)
        for (r, _, _), piece in zip(parts, logits.split([b - a for _, a, b in parts]), strict=True):
            got[r].append(piece)

    step((0, 0, 29))
    step((3, 0, 17), (0, 29, 30), (2, 0, 1), padding=3)
    step((2, 1, 2), (1, 0, 20), (3, 17, 39))
    step((2, 2, 3), (1, 20, 21), (3, 39, 40), padding=1)
    step((2, 3, 5))
    reference = Reference(CONFIGS[name], TENSORS[name])
    for prompt, pieces in zip(prompts, got, strict=True):
        assert_close(torch.cat(pieces), reference.logits(prompt))


def test_bfloat16_errs_no_more_than_pytorch_itself() -> None:
    """The median over tokens: a token whose routing flips in BF16 is far off either way."""
    prompt = tokens(64)
    engine = harness("k3", torch.bfloat16)
    found = torch.cat([engine.step([(0, prompt[:40])]), *(engine.step([(0, [t])]) for t in prompt[40:])])
    exact = Reference(CONFIGS["k3"], TENSORS["k3"]).logits(prompt)
    plain = Reference(CONFIGS["k3"], TENSORS["k3"], dtype=torch.bfloat16).logits(prompt)

    def error(logits: torch.Tensor) -> float:
        return float(((logits.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).median())

    assert error(found) < 1.2 * error(plain)
    assert error(plain) < 0.3  # the yardstick means something: unrelated logits are off by 1.4


def caches(engine: Harness) -> list[torch.Tensor]:
    return [
        t
        for layer in engine.layers.values()
        for t in (layer.kv_cache if isinstance(layer.kv_cache, tuple) else (layer.kv_cache,))
    ]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=-7e7), b.nan_to_num(nan=-7e7))


def test_a_step_writes_only_what_its_requests_own(name: str) -> None:
    """Padded rows and tokens, with poison in the null block: nothing of it is read, and it is still poison afterwards."""
    engine = harness(name)
    engine.step([(1, tokens(20))])
    before = [t.clone() for t in caches(engine)]
    logits = engine.step([(None, [3]), (0, tokens(18)), (None, [4, 5, 6])], padding=2)
    assert torch.isfinite(logits[1:19]).all()
    for old, new in zip(before, caches(engine), strict=True):
        per_request = (old.shape[0] - 1) // 4
        assert torch.isnan(new[0].float()).all(), "the null block was written"
        assert same(old[1 + per_request :], new[1 + per_request :]), "another request's cache was written"


def test_a_reused_slot_starts_from_nothing(name: str) -> None:
    first, second = tokens(25, 5), tokens(1, 6) + tokens(12, 7)
    engine = harness(name)
    engine.step([(0, first)])
    engine.lengths[0] = 0  # the request ended, and another got its slot and blocks
    found = torch.cat([engine.step([(0, second[:1])]), engine.step([(0, second[1:])])])
    assert_close(found, Reference(CONFIGS[name], TENSORS[name]).logits(second))


def test_a_profiling_run_needs_no_metadata(name: str) -> None:
    engine = harness(name)
    before = [t.clone() for t in caches(engine)]
    with override_forward_context(SimpleNamespace(attn_metadata=None)):
        hidden = engine.model(torch.tensor(tokens(9)), torch.zeros(9, dtype=torch.long))
    assert hidden.shape == (9, CONFIGS[name]["hidden_size"]) and torch.isfinite(hidden).all()
    assert all(same(a, b) for a, b in zip(before, caches(engine), strict=True))
