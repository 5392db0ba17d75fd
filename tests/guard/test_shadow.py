"""The shadow check: two correct implementations pass, a fault of 1e-2 in one of them does not, and the step can be replayed."""

import pytest
import torch

from vllm.model_executor.models.kimi_k3_fast.guard import Guard, Policy, shadow

LAYERS, ROWS, WIDTH = 6, 4, 256


def step(dtype: torch.dtype, order: str, fault: float = 0.0, row: int | None = None) -> dict[str, torch.Tensor]:
    """A small residual network: the same numbers summed in another order, with a fault in the first operator if asked."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
    tensors = {}
    for layer in range(LAYERS):
        weight = (torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5).to(dtype)
        parts = [slice(0, None, 2), slice(1, None, 2)] if order == "halves" else [slice(None)]  # no kernel's own order
        y = sum(x[:, part] @ weight[part] for part in parts)
        if layer == 0 and fault:
            rows = slice(None) if row is None else slice(row, row + 1)
            y[rows] = y[rows] * (1 + fault)
        tensors[f"layers.{layer}.state"] = y.clone()
        x = torch.nn.functional.silu(y) + x
    tensors["logits"] = x
    return tensors


DEPTH = {**{f"layers.{i}.state": i for i in range(LAYERS)}, "logits": LAYERS}


@pytest.fixture
def guard(tmp_path):
    return Guard(Policy(shadow_every=1, events_path=str(tmp_path / "e.jsonl")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_order_of_summation_stays_within_the_bar(guard, dtype):
    assert guard.begin_writes()
    assert guard.shadow("decode/t4", step(dtype, "halves"), step(dtype, "whole"), dict, DEPTH)
    report = guard.report()
    assert report["violations"]["by_reason"] == {}
    assert report["counters"]["shadow_steps"] == 1
    assert 0 < report["gauges"]["shadow_worst_ratio"] < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", [None, 2])
def test_an_operator_that_is_off_by_a_hundredth_is_caught_saved_and_retired(guard, dtype, row):
    inputs = {"input_ids": torch.arange(ROWS)}
    fault = 1e-2 if dtype is torch.float32 else 2e-2
    assert not guard.shadow("decode/t4", step(dtype, "halves", fault, row), step(dtype, "whole"), lambda: inputs, DEPTH)
    report = guard.report()
    assert report["violations"]["by_reason"] == {"shadow_state": 1}
    where = report["violations"]["last"][0]["where"]
    assert where["tensor"] == "layers.0.state", "the first operator's"
    assert row is None or where["row"] == row
    assert guard.quarantined("decode/t4") and not guard.quarantined("decode/t8")
    saved = shadow.Step.load(where["saved"])
    assert torch.equal(saved.inputs["input_ids"], inputs["input_ids"])
    standard = step(dtype, "whole")

    def rerun(fast: dict, standard: dict) -> shadow.Replay:
        return shadow.replay(where["saved"], lambda saved: shadow.Rerun(fast, standard, standard, standard, standard))

    still = rerun(step(dtype, "halves", fault, row), standard)
    assert not still.within and all(d.within for d in still.reproduced)
    repaired = rerun(step(dtype, "halves"), standard)
    assert repaired.within and not all(d.within for d in repaired.saved)
    elsewhere = rerun(saved.fast, saved.fast)
    assert not elsewhere.within, "two sides that agree on other numbers than the server's prove nothing"


def test_a_row_that_amplifies_its_input_gets_a_higher_bar_and_no_other_row_does():
    """A distance is within where the standard path itself moves as far for one rounding of its input, and past it elsewhere."""
    standard = step(torch.float32, "whole")
    moved = {name: tensor.clone() for name, tensor in standard.items()}
    moved["logits"][1] *= 1 + 1e-4
    for nudged_row, expected in ((1, True), (2, False)):
        nudged = {name: tensor.clone() for name, tensor in standard.items()}
        nudged["logits"][nudged_row] *= 1 + 1e-4
        found = {d.name: d for d in shadow.compare(moved, standard, DEPTH, nudged)}
        assert found["logits"].within == expected
        assert expected or found["logits"].row == 1


def drawn(*distances: float) -> list[dict[str, torch.Tensor]]:
    """The standard side again, row 1 of its logits that far off in each."""
    sides = [step(torch.float32, "whole") for _ in distances]
    for side, distance in zip(sides, distances, strict=True):
        side["logits"][1] *= 1 + distance
    return sides


@pytest.mark.parametrize("faulty", [False, True])
def test_a_draw_that_misses_what_amplifies_is_followed_by_others(guard, faulty):
    """They are asked for only until the row is within; another row's fault stays past its bar through all of them."""
    fast, nudged = step(torch.float32, "whole"), drawn(1e-8)[0]
    fast["logits"][1] *= 1 + 1e-4
    if faulty:
        fast["logits"][2] *= 1 + 1e-4
    left = iter(drawn(1e-9, 1e-4, 1e-9))
    draws = shadow.furthest(step(torch.float32, "whole"), left)
    assert guard.shadow("decode/t4", fast, step(torch.float32, "whole"), dict, DEPTH, nudged, draws=draws) == (not faulty)
    assert len(list(left)) == (0 if faulty else 1)
    report = guard.report()
    assert report["counters"]["shadow_drawn_steps"] == 1
    assert report["violations"]["by_reason"] == ({"shadow_logits": 1} if faulty else {})
    if faulty:
        where = report["violations"]["last"][0]["where"]
        assert where["row"] == 2
        assert torch.equal(shadow.Step.load(where["saved"]).drawn["logits"], drawn(1e-4)[0]["logits"])


def test_no_draw_is_asked_for_within_the_bar(guard):
    fast, standard = step(torch.float32, "halves"), step(torch.float32, "whole")
    assert guard.shadow("decode/t4", fast, standard, dict, DEPTH, standard, draws=map(lambda _: pytest.fail(), [0]))
    assert "shadow_drawn_steps" not in guard.report()["counters"]


def test_the_furthest_draw_is_kept_row_by_row():
    standard = {"x": torch.ones(3, 2)}
    sides = [{"x": torch.tensor([[1.0, 1], [3, 3], [2, 2]])}, {"x": torch.tensor([[0.0, 0], [2, 2], [1, 1]])}]
    kept = [{name: tensor.tolist() for name, tensor in side.items()} for side in shadow.furthest(standard, sides)]
    assert kept == [{"x": [[1, 1], [3, 3], [2, 2]]}, {"x": [[0, 0], [3, 3], [2, 2]]}]


def test_the_first_tensor_past_its_bar_is_named_not_the_furthest():
    """Layer by layer: states, the choice of experts, and behind all of them what the step returns."""
    depth = {"hidden": 2, "logits": 2, "layers.1.choice": 1, "layers.1.state": 1, "layers.0.state": 0}
    distances = {"hidden": 9.0, "logits": 9.0, "layers.1.choice": 7.0, "layers.1.state": 2.0, "layers.0.state": 0.5}
    found = [shadow.Difference(name, distance, 1.0, 0) for name, distance in distances.items()]
    order = []
    while first := shadow.first_past(found, depth):
        order.append(first.name)
        found.remove(first)
    assert order == ["layers.1.state", "layers.1.choice", "hidden", "logits"]


def test_a_nan_on_one_side_only_is_past_every_bar(guard):
    fast = step(torch.float32, "whole")
    fast["logits"][1, 3] = float("nan")
    assert not guard.shadow("decode/t4", fast, step(torch.float32, "whole"), dict, DEPTH)
    assert guard.report()["violations"]["by_reason"] == {"shadow_logits": 1}


def test_sides_that_do_not_hold_the_same_tensors_are_an_error_not_a_pass():
    fast = step(torch.float32, "whole")
    with pytest.raises(ValueError, match="different tensors"):
        shadow.compare({"logits": fast["logits"]}, fast, DEPTH)
    with pytest.raises(ValueError, match=r"expected torch\.float32"):
        shadow.compare({"logits": fast["logits"].double()}, {"logits": fast["logits"]}, DEPTH)


def test_only_some_steps_are_kept_and_a_bad_file_is_named(guard, tmp_path):
    for _ in range(shadow.KEPT_FILES + 3):
        guard.step += 1
        guard.shadow("decode/t4", step(torch.float32, "whole", 1e-2), step(torch.float32, "whole"), dict, DEPTH)
    assert len(list((tmp_path / "k3fast-steps").glob("*.pt"))) == shadow.KEPT_FILES
    bad = tmp_path / "bad.pt"
    bad.write_bytes(b"not a saved step")
    with pytest.raises(ValueError, match=r"bad.pt: expected a step saved by the shadow check"):
        shadow.Step.load(bad)
    torch.save({"schema": 99}, bad)
    with pytest.raises(ValueError, match="schema"):
        shadow.Step.load(bad)
