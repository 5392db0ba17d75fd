"""The choice of path is pure, complete and bound to one generation of caches."""

import dataclasses

import pytest

from vllm.model_executor.models.kimi_k3_fast.fast.plan import Limits, Plan, StepKey, plan
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

LIMITS = Limits(max_tokens=64, generation=2, backend="torch")
DECODE = StepKey(requests=5, tokens=5, padded=8, prompt_tokens=0, width=1, bound=2)


def reasons(key: StepKey) -> list[Reason]:
    found = plan(key, LIMITS)
    return [] if isinstance(found, Plan) else [refusal.reason for refusal in found]


def test_a_decode_step_gets_a_plan_for_its_padded_rows():
    found = plan(DECODE, LIMITS)
    assert found == Plan("decode/8/torch", 8, 1, "torch", 2)
    assert plan(dataclasses.replace(DECODE, requests=7, tokens=7), LIMITS) == found, "real rows must not change the plan"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"prompt_tokens": 1}, [Reason.STEP_PREFILL]),
        ({"width": 2}, [Reason.STEP_WIDTH]),
        ({"width": 0}, [Reason.STEP_WIDTH]),
        ({"padded": 65}, [Reason.STEP_TOO_MANY_TOKENS]),
        ({"bound": 1}, [Reason.STALE_BINDING]),
        ({"bound": 0}, [Reason.STEP_UNBOUND]),
        (
            {"prompt_tokens": 9, "padded": 99, "bound": 3},
            [Reason.STEP_PREFILL, Reason.STEP_TOO_MANY_TOKENS, Reason.STALE_BINDING],
        ),
    ],
)
def test_every_reason_is_given(change, expected):
    assert reasons(dataclasses.replace(DECODE, **change)) == expected


def test_the_largest_step_is_planned():
    assert isinstance(plan(dataclasses.replace(DECODE, padded=64), LIMITS), Plan)
