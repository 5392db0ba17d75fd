"""The whole-engine benchmark without GPUs: its arithmetic, its account of a run, its verdict on tokens; engines are stand-ins."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import engine_arm
import gpu_engine
import rank_slice

from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import released_tensors, tiny_config
from vllm.model_executor.models.kimi_k3_fast.model.config import K3Config

H200 = 143771 << 20


# -- rank slices -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("full_tp", "run_tp"), [(8, 1), (8, 2), (8, 8), (16, 1), (16, 4), (4, 4), (1, 1)])
def test_slice_divides_what_tensor_parallelism_divides(full_tp: int, run_tp: int) -> None:
    config = rank_slice.config(full_tp, run_tp, 8)
    c = K3Config.from_hf(config)
    assert c.kda_heads // run_tp == 96 // full_tp
    assert c.moe_intermediate_size // run_tp == 3072 // full_tp
    assert (c.hidden_size, c.latent_size, c.num_experts, c.experts_per_token) == (7168, 3584, 896, 16)
    assert sorted(set(range(8)) - c.kda_layers) == [3, 7]


def test_slice_that_k3_does_not_divide_into_is_refused() -> None:
    with pytest.raises(ValueError, match="heads = 96"):
        rank_slice.config(7, 1, 8)
    with pytest.raises(ValueError, match="run_tp"):
        rank_slice.config(8, 3, 8)


@pytest.mark.parametrize(("full_tp", "layers"), [(8, 8), (16, 12), (4, 8)])
def test_weight_bytes_are_those_of_the_checkpoint(full_tp: int, layers: int) -> None:
    """Up to what stock adds on a GPU: absorbed MLA halves, conv copies, and experts padded to 256 rows."""
    size = {torch.bfloat16: 2, torch.float32: 4, torch.uint8: 1}
    c = K3Config.from_hf(rank_slice.config(full_tp, 1, layers))
    stored = sum(math.prod(shape) * size[dtype] for _, shape, dtype in released_tensors(c))
    padding = (layers - 1) * 896 * (rank_slice.expert_bytes(full_tp, padded=True) - rank_slice.expert_bytes(full_tp))
    assert 0 <= rank_slice.weight_bytes(full_tp, layers) - padding - stored < 0.01 * stored


def test_floor_of_a_layer() -> None:
    """296 MB for a KDA and MoE layer of the TP8 slice at batch 1: 90 + 22 + 13 + 2 x 51 + 33 and 16 experts of 2.19 MB."""
    twice = [rank_slice.floor_bytes(8, layers, 1, 0) for layers in (1, 2)]
    state = 2 * 4 * 12 * 128 * 128
    assert twice[1] - twice[0] - state == pytest.approx(296e6, rel=0.005)
    assert rank_slice.floor_bytes(8, 8, 4, 1000) - rank_slice.floor_bytes(8, 8, 4, 0) == 4 * 1000 * 2 * 1152
    many = (rank_slice.floor_bytes(8, 2, 64, 0) - rank_slice.floor_bytes(8, 1, 64, 0)) / 2193408
    assert 610 < many - 120 < 700, "64 tokens choose some 610 of 896 experts; the rest is dense"


def test_cache_is_what_the_weights_leave() -> None:
    two = rank_slice.cache_bytes(8, 24, H200)
    assert two == pytest.approx(12.6e9, rel=0.05)
    assert rank_slice.cache_bytes(8, 24, H200, engines=1) > 4 * two
    with pytest.raises(ValueError, match="one engine"):
        rank_slice.cache_bytes(8, 30, H200)


def test_weights_are_the_checkpoint_and_the_same_every_time() -> None:
    config = tiny_config()
    made = {name: tensor.clone() for name, tensor in rank_slice.tensors(config, "cpu")}
    wanted = {name: (shape, dtype) for name, shape, dtype in released_tensors(K3Config.from_hf(config))}
    assert {name: (tuple(t.shape), t.dtype) for name, t in made.items()} == wanted
    assert all(torch.equal(tensor, made[name]) for name, tensor in rank_slice.tensors(config, "cpu"))
    name = "model.layers.1.block_sparse_moe.experts.{}.w1.weight_packed"
    assert not torch.equal(made[name.format(0)], made[name.format(1)])
    assert made["model.layers.1.block_sparse_moe.gate.weight"].float().std() == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize(("rank", "ranks", "padding"), [(0, 1, 0), (1, 2, 0), (1, 2, 32)])
def test_experts_loaded_whole_are_those_loaded_one_by_one(rank: int, ranks: int, padding: int) -> None:
    """By stock's own loader, with and without rows that it pads."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

    experts, width, latent = 4, 64, 128
    held = width // ranks + padding
    routed = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(routed)
    routed.quant_config, routed.quant_method, routed._fused_shared_expert_quantizer = None, SimpleNamespace(), None
    routed._map_global_expert_id_to_local_expert_id = lambda expert: expert
    parallel = SimpleNamespace(tp_size=ranks)
    routed.moe_config = SimpleNamespace(
        tp_rank=rank, tp_shard_with_padding=False, is_act_and_mul=True, moe_parallel_config=parallel, num_logical_experts=experts
    )
    shapes = {"w13": (2 * held, latent), "w2": (latent, held)}
    parameters = {}
    for (matrix, (rows, columns)), (kind, share) in itertools.product(shapes.items(), {"": 2, "_scale": 32}.items()):
        made = torch.nn.Parameter(torch.zeros(experts, rows, columns // share, dtype=torch.uint8), requires_grad=False)
        made.weight_loader = Mxfp4MoEMethod.get_scale_weight_loader(routed.weight_loader) if kind else routed.weight_loader
        made.quant_method = "block"
        parameters[f"model.layers.1.block_sparse_moe.experts.routed_experts.{matrix}_weight{kind}"] = made
    whole = rank_slice.WholeExperts(SimpleNamespace(named_parameters=parameters.items))
    for matrix, kind in itertools.product(("w1", "w2", "w3"), ("packed", "scale")):
        rows, columns = (latent, width) if matrix == "w2" else (width, latent)
        piece = torch.randint(0, 255, (experts, rows, columns // (2 if kind == "packed" else 32)), dtype=torch.uint8)
        assert whole(f"model.layers.1.block_sparse_moe.experts.0.{matrix}.weight_{kind}", piece)
        target = f"{'w2' if matrix == 'w2' else 'w13'}_weight{'_scale' if kind == 'scale' else ''}"
        ((name, loaded),) = ((n, p) for n, p in parameters.items() if n.endswith(f".{target}"))
        before = loaded.data.clone()
        for expert in range(experts):
            loaded.weight_loader(loaded, piece[expert], name, shard_id=matrix, expert_id=expert)
        assert torch.equal(before, loaded.data) and before.any()
    assert whole.pieces == 6


def test_mxfp4_is_of_the_size_of_its_fan_in() -> None:
    from vllm.model_executor.models.kimi_k3_fast.model import mxfp4

    for fan_in in (384, 3584):
        draw = torch.Generator().manual_seed(1)
        packed = rank_slice.mxfp4("packed", (64, fan_in // 2), draw)
        scale = rank_slice.mxfp4("scale", (64, fan_in // 32), draw)
        assert set(scale.unique().tolist()) == {int(scale.min()) + i for i in range(3)}, (
            "a scale misread as its neighbour's shows"
        )
        rms = mxfp4.decode(packed, scale, torch.float32).pow(2).mean().sqrt().item()
        assert 0.6 < rms * fan_in**0.5 < 2.2


def test_entry_points_are_found_by_a_process_with_the_folders_on_its_path(tmp_path: Path) -> None:
    import subprocess

    path = rank_slice.entry_points(tmp_path)
    code = "from importlib.metadata import entry_points as e; print(*(p.value for p in e(group='vllm.general_plugins')))"
    found = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(path)})
    assert "rank_slice:register" in found.stdout


# -- measuring -------------------------------------------------------------------------------------------------------------------
class Standin:
    """An engine whose step takes `us(batch)` microseconds a layer; the guard counts `lost` of a thousand tokens as standard."""

    def __init__(self, name: str, us, lost: int | None = None, room: int = 64) -> None:
        self.name, self.us, self.lost, self.holds = name, us, lost, room
        self.batch, self.calls, self.tokens = 0, [], {"fast": 0, "standard": 0}

    def call(self, method: str, *args, seconds: float = 600.0):
        self.calls.append((method, *args))
        return getattr(self, method)(*args)

    def room(self, context: int) -> int:
        return self.holds

    def drop(self) -> None:
        self.batch = 0

    def fill(self, batch: int, context: int) -> dict:
        new, self.batch = batch - self.batch, batch
        return {"seconds": 0.5, "prompt_tokens": new * context, "steps": 1}

    def steps(self, count: int) -> dict:
        tokens = self.batch * count
        standard = tokens * (self.lost or 0) // 1000
        self.tokens["fast"] += tokens - standard
        self.tokens["standard"] += standard
        return {"seconds": count * self.us(self.batch) * 10 / 1e6, "tokens": tokens}

    def report(self) -> list[dict] | None:
        if self.lost is None:
            return None
        paths = {path: {"decode_tokens": count} for path, count in self.tokens.items()}
        reasons = {"step_width": self.tokens["standard"]} if self.tokens["standard"] else {}
        return [{"rank": f"rank{i}", "steps": {**paths, "by_reason": reasons}, "violations": {"by_reason": {}}} for i in (0, 1)]

    def trace(self, count: int) -> list[dict]:
        return [{"launches": 100.0}]


def measured(stock: Standin, fast: Standin, points: dict, saves: list, **options) -> dict:
    given = {"rounds": 3, "steps": 20, "trace": False, "deadline": 1000.0, **options}
    record = {"shape": {"full_tp": 8, "run_tp": 2, "layers": 10}, "results": [], "not_run": []}
    arms = {"stock": stock, "fast": fast}
    gpu_engine.measure(arms, points, SimpleNamespace(**given), record, lambda: saves.append(json.dumps(record)))
    return record


def test_a_run_is_interleaved_proved_and_saved_after_every_point(capsys: pytest.CaptureFixture[str]) -> None:
    stock, fast = Standin("stock", lambda b: 100 + b), Standin("fast", lambda b: 50 + b, lost=1)
    saves: list[str] = []
    record = measured(stock, fast, {512: [1, 64]}, saves, trace=True)
    first, last = record["results"]
    assert first["us_per_layer"] == pytest.approx({"stock": 101, "fast": 51})
    assert last["ratio"] == pytest.approx(164 / 114)
    assert first["wanted_ratio"] == 1.88 and first["reached"] and last["reached"]
    assert len(first["ratio_by_round"]) == 3 and first["tokens_lost"] == 0
    ranks = last["guard"]["fast"]
    assert [rank["rank"] for rank in ranks] == ["rank0", "rank1"]
    assert ranks[0]["decode_tokens"] == {"fast": 3 * 1279, "standard": 3}, "the three turns together, no other step"
    assert last["fast_share"] == pytest.approx(1279 / 1280) and ranks[0]["reasons"] == {"step_width": 3}
    assert [len(json.loads(text)["results"]) for text in saves] == [1, 2]
    turns = [call for arm in (stock, fast) for call in arm.calls if call[0] == "steps"]
    assert len(turns) == 2 * 2 * 3
    assert "1.44x" in capsys.readouterr().out


def test_points_that_do_not_fit_are_listed_with_the_reason() -> None:
    stock, fast = Standin("stock", lambda b: 100, room=8), Standin("fast", lambda b: 120, lost=0)
    record = measured(stock, fast, {32768: [4, 8, 16]}, [])
    assert [point["batch"] for point in record["results"]] == [4, 8]
    assert all(point["ratio"] < 1 for point in record["results"]), "slower is said, not hidden"
    assert record["not_run"] == [{"batch": 16, "context": 32768, "why": "the caches hold 8 requests of 32768 tokens"}]
    assert [call for call in stock.calls if call[0] in ("fill", "drop")] == [("fill", 4, 32768), ("fill", 8, 32768), ("drop",)]
    late = measured(Standin("stock", lambda b: 1), Standin("fast", lambda b: 1, lost=0), {512: [1]}, [], deadline=-1.0)
    assert "no time left" in late["not_run"][0]["why"] and not late["results"]


def test_points_of() -> None:
    assert gpu_engine.points_of("", "8,1", "512,32768") == {512: [1, 8], 32768: [1, 8]}
    assert gpu_engine.points_of("131072:1;512:1,64,8", "1", "1") == {512: [1, 8, 64], 131072: [1]}


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record = measured(
        Standin("stock", lambda b: 100 + b), Standin("fast", lambda b: 50 + b, lost=0), {512: [1, 8], 32768: [1]}, []
    )
    record["arms"] = {"fast": {"ranks": [{"device": "a GPU"}]}}
    gpu_engine.plot(record, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_table_puts_runs_side_by_side() -> None:
    one = measured(Standin("stock", lambda b: 100 + b), Standin("fast", lambda b: 50 + b, lost=0), {512: [1, 8]}, [])
    two = measured(Standin("stock", lambda b: 80), Standin("fast", lambda b: 40, lost=0), {512: [1]}, [], trace=True)
    one["shape"] = {**one["shape"], "run_tp": 1}
    lines = gpu_engine.table([two, one]).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["1", "1", "2"]
    assert "| 80.0 | 40.0 | 2.00 |" in lines[-1] and "| 100 | 100 |" in lines[-1]
    assert all(line.count("|") == 16 for line in lines)


def test_start_up_is_the_slowest_ranks() -> None:
    guard = [{"gauges": {"startup_compile_seconds": seconds, "shadow_worst_ratio": 1.0}} for seconds in (1.0, 2.0)]
    record = {"arms": {"stock": {"start_seconds": 30.0}, "fast": {"start_seconds": 40.0}}, "guard": guard}
    wanted = {"stock_seconds": 30.0, "fast_seconds": 40.0, "startup_compile_seconds": 2.0}
    assert gpu_engine.start_up(record) == wanted


def test_trace_summary() -> None:
    one = [(0.0, 10.0, "gemm"), (5.0, 12.0, "gemm"), (12.0, 13.0, "Memcpy DtoH"), (14.0, 20.0, "ncclAllReduce")]
    rows = [(start + at, end + at, name) for at in (0.0, 30.0) for start, end, name in one]
    found = engine_arm.summarise(rows, 2)
    assert (found["launches"], found["copies"], found["span_us"], found["busy_us"]) == (3, 1, 25, 18)
    assert found["communication_us"] == 6
    assert found["kernels"][0] == {"name": "gemm", "launches": 2, "us": 17, "later_us": 17}
    assert sum(kernel["later_us"] for kernel in found["kernels"]) == found["span_us"]
    assert engine_arm.summarise([], 2)["launches"] == 0


# -- greedy tokens ---------------------------------------------------------------------------------------------------------------
class Speaker:
    """Says the length of the text so far, with a runner-up `gap` below; `slips`: at these lengths it prefers the runner-up."""

    def __init__(self, gaps: dict[int, float], slips: set[int] = frozenset(), blur: float = 0.0) -> None:
        self.name, self.gaps, self.slips, self.blur = "speaker", gaps, slips, blur

    def top(self, length: int, blur: float = 0.0) -> dict[int, float]:
        gap = self.gaps.get(length, 2.0)
        return {length: -0.1, 1000 + length: -0.1 - gap + blur}

    def call(self, method: str, prompts, count: int, top: int, prompt_top: int | None = None, seconds: float = 600.0):
        assert method == "complete"
        replies = []
        for text in prompts:
            lengths = range(len(text), len(text) + count)
            tokens = [1000 + n if n in self.slips else n for n in lengths]
            asked = [self.top(n, self.blur) for n in range(len(text))] if prompt_top else []
            replies.append({"tokens": tokens, "top": [self.top(n) for n in lengths], "prompt": asked})
        return replies


def test_a_difference_at_a_tie_is_explained_and_the_check_goes_on_behind_it() -> None:
    gaps = {14: 0.01, 20: 0.5}
    found = gpu_engine.greedy_check(Speaker(gaps, blur=0.05), Speaker(gaps, slips={14, 20}), [[0] * 10, [0] * 12], 16)
    assert found["positions"] == found["asked"] == 32
    assert [(d["prompt"], d["position"], d["explained"]) for d in found["differences"]] == [
        (0, 4, True),
        (1, 2, True),
        (0, 10, False),
        (1, 8, False),
    ]
    assert not found["explained"]
    assert found["stock_own_error"]["max"] == pytest.approx(0.05) and found["stock_own_error"]["count"] == 32
    assert found["stock_own_differences"] == 2, "at the tie of length 14, in both texts"


def test_without_an_own_error_no_difference_is_explained() -> None:
    found = gpu_engine.greedy_check(Speaker({13: 1e-6}), Speaker({13: 1e-6}, slips={13}), [[0] * 10], 8)
    assert [d["explained"] for d in found["differences"]] == [False]
    same = gpu_engine.greedy_check(Speaker({}), Speaker({}), [[0] * 10], 8)
    assert same["differences"] == [] and same["explained"]


# -- one engine as both arms -----------------------------------------------------------------------------------------------------
def test_a_half_puts_its_graphs_in_force_before_every_call() -> None:
    class Whole:
        def __init__(self) -> None:
            self.calls: list[tuple] = []

        def call(self, *call, seconds: float = 600.0) -> int:
            self.calls.append(call)
            return len(self.calls)

    whole = Whole()
    stock, fast = (engine_arm.Half(name, whole) for name in ("stock", "fast"))
    assert (stock.call("steps", 4), fast.call("report")) == (2, 4)
    assert whole.calls == [("take", "stock"), ("steps", 4), ("take", "fast"), ("report",)]


def test_the_guard_is_told_whose_graphs_are_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay of stock's graph counts as a standard step for a named reason, and `require` does not fail it."""
    import twin_graphs

    from vllm.model_executor.models.kimi_k3_fast import guard
    from vllm.model_executor.models.kimi_k3_fast.guard import BatchFacts, Guard, Policy

    watching = Guard(Policy(mode="require"))
    monkeypatch.setattr(guard, "current", lambda: watching)
    key = guard.GraphKey("full", 4, 4, True)
    watching.planned(key, "decode/4/cute")
    manager = SimpleNamespace(graphs={"4": "fast graph"}, _capture_descs={})
    fast = SimpleNamespace(refusals=(), stage=lambda *batch: None, staged=None)
    runner = SimpleNamespace(model=SimpleNamespace(fast=fast), cudagraph_manager=manager)
    runner.capture_model = lambda: manager.graphs.update({"4": "stock graph"})
    worker = SimpleNamespace(model_runner=runner)
    scratch = SimpleNamespace(_current_workspaces=["kept"], unlock=lambda: None)
    monkeypatch.setattr("vllm.v1.worker.workspace.current_workspace_manager", lambda: scratch)

    def replay() -> str:
        facts = BatchFacts("full", 4, 4, 4, 4, True, ("a", "b", "c", "d"), 4)
        assert facts.graph_key == key
        watching.open_step(facts)
        return manager.graphs["4"]

    assert twin_graphs.make(worker) == 1
    assert replay() == "fast graph"
    twin_graphs.take(worker, "stock")
    assert replay() == "stock graph"
    assert watching.take_failing() == {}, "a benchmark's standard steps are no failures"
    twin_graphs.take(worker, "fast")
    assert replay() == "fast graph"
    watching.flush()
    report = watching.report()
    assert [report["steps"][path]["decode_tokens"] for path in ("fast", "standard")] == [8, 4]
    assert report["steps"]["by_reason"] == {"mode_off": 1} and watching.policy.mode == "require"
