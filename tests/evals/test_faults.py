"""Each deliberate fault breaks the one thing it names, and nothing is broken while none is on. No server, milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import k3_faults
import pytest
import torch

from vllm.model_executor.models.kimi_k3_fast.fast.backend import TorchForms
from vllm.model_executor.models.kimi_k3_fast.ops.experts.torch_form import Weights as ExpertWeights
from vllm.model_executor.models.kimi_k3_fast.ops.kda.torch_form import Weights as KdaWeights

TOKENS, HEADS, DIM, RANK = 2, 2, 16, 4
Run = Callable[[object], dict[str, torch.Tensor]]


def kda(forms: object) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    width = HEADS * DIM
    weights = KdaWeights(
        conv=torch.randn(3 * width, 4, generator=gen),
        f_b=torch.randn(width, RANK, generator=gen),
        decay=torch.ones(HEADS, 1),
        dt_bias=torch.zeros(HEADS, DIM),
        out_norm=torch.ones(DIM),
        lower_bound=-5.0,
    )
    packed = torch.randn(TOKENS, 4 * width + RANK + HEADS, generator=gen)
    conv, state = torch.randn(4, 3, 3 * width, generator=gen), torch.randn(4, HEADS, DIM, DIM, generator=gen)
    out = forms.kda_step(packed, conv, state, torch.tensor([1, 2]), weights, torch.float32)  # type: ignore[attr-defined]
    return {"out": out, "conv": conv, "state": state}


def mla(forms: object) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(2)
    packed, cache = torch.randn(TOKENS, 8 + 16 + 4, generator=gen), torch.zeros(3, 4, 20)
    norms = torch.ones(8), torch.ones(16)
    out = forms.mla_rows(packed, *norms, 1e-5, cache, torch.tensor([5, -1]))  # type: ignore[attr-defined]
    return {"out": out, "cache": cache}


def experts(forms: object) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    sizes = ((4, 64, 32), (4, 64, 2), (4, 64, 16), (4, 64, 1))
    weights = ExpertWeights(
        *(
            torch.randint(*((0, 256) if i % 2 == 0 else (124, 128)), size, generator=gen, dtype=torch.uint8)
            for i, size in enumerate(sizes)
        )
    )
    ids = torch.tensor([[0, 2], [2, 3]])
    x = torch.randn(TOKENS, 64, generator=gen)
    return {"out": forms.experts(x, ids, torch.full((TOKENS, 2), 0.5), weights, 4.0, 25.0)}  # type: ignore[attr-defined]


CASES = [
    (kda, "lost_decay", {"out", "state"}),
    (kda, "stale_conv_state", {"conv"}),
    (mla, "fp8_scale_one", {"cache"}),
    (experts, "expert_swapped", {"out"}),
]


@pytest.mark.parametrize(("run", "fault", "broken"), CASES, ids=[case[1] for case in CASES])
def test_a_fault_breaks_what_it_names(
    run: Run, fault: str, broken: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tmp_path / "fault"
    monkeypatch.setenv(k3_faults.CONTROL, str(control))
    sound = run(TorchForms())
    for name, expected in (("none", set()), (fault, broken)):
        control.write_text(name)
        found = run(k3_faults._Forms(TorchForms()))
        assert {part for part in sound if not torch.equal(sound[part], found[part])} == expected


def test_the_padded_cache_row_stays_untouched_and_the_swap_spares_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = tmp_path / "fault"
    monkeypatch.setenv(k3_faults.CONTROL, str(control))
    control.write_text("fp8_scale_one")
    cache = mla(k3_faults._Forms(TorchForms()))["cache"]
    assert cache[1, 1].any() and int(cache.any(-1).sum()) == 1
    control.write_text("expert_swapped")
    sound, swapped = experts(TorchForms())["out"], experts(k3_faults._Forms(TorchForms()))["out"]
    assert torch.equal(sound[1], swapped[1]) and not torch.equal(sound[0], swapped[0])
