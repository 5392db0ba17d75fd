"""Every inserted line of the runners runs, without a GPU and without vLLM: the patched functions, compiled from the release's
source, over pretended runners. The V2 runner needs CUDA, so nothing else runs its lines on a CPU."""

from __future__ import annotations

import ast
import builtins
import enum
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from vllm.model_executor.models.kimi_k3_fast import guard
from vllm.model_executor.models.kimi_k3_fast.guard import GraphKey
from vllm.model_executor.models.kimi_k3_fast.patches import hooks, ledger
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

ROOT = Path(importlib.util.find_spec("vllm.version").origin).parent.parent
NAN = float("nan")
V1, V2 = "vllm/v1/worker/gpu_model_runner.py", "vllm/v1/worker/gpu/model_runner.py"
OUTPUT, SAMPLER, LOGITS = (f"vllm/v1/worker/gpu/{name}.py" for name in ("async_utils", "sample/sampler", "metrics/logits"))
MAMBA = "vllm/v1/worker/mamba_utils.py"

Mode = enum.Enum("Mode", ["NONE", "PIECEWISE", "FULL"])


class Globals(dict):
    """A module's names: those given, and something pretended for every other one."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return self.setdefault(name, MagicMock(name=name))


class Patched:
    """One function of a patched file, and which of its inserted lines have run."""

    def __init__(self, target: str, qualname: str, **names: Any) -> None:
        lines = ledger.insert((ROOT / target).read_text(), target)
        tree = ast.parse("\n".join(line.text for line in lines))
        node: Any = tree
        for part in qualname.split("."):
            node = next(n for n in node.body if getattr(n, "name", None) == part)
        node.decorator_list, node.returns = [], None
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        code = compile(ast.Module([node], []), target, "exec", dont_inherit=True)
        known = {"np": np, "torch": torch, "k3fast_hooks": hooks, "envs": SimpleNamespace(**dict.fromkeys(ENVIRONMENT, False))}
        namespace = Globals(known | names)
        exec(code, namespace)
        self.function = namespace[node.name]
        span = range(node.lineno, node.end_lineno + 1)
        starts = {n.lineno for n in ast.walk(node) if isinstance(n, ast.stmt)}
        self.inserted = {n for n, line in enumerate(lines, 1) if line.patch and n in span and n in starts}
        self.ran: set[int] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def trace(frame: Any, event: str, argument: Any) -> Any:
            if frame.f_code is self.function.__code__:
                self.ran.add(frame.f_lineno)
                return trace
            return None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return self.function(*args, **kwargs)
        finally:
            sys.settrace(before)

    @property
    def missed(self) -> set[int]:
        return self.inserted - self.ran


ENVIRONMENT = ("VLLM_RAISE_ON_LOGIT_NANS", "VLLM_COMPUTE_NANS_IN_LOGITS")


@pytest.fixture(autouse=True)
def watching(monkeypatch: pytest.MonkeyPatch) -> guard.Guard:
    monkeypatch.setattr(guard, "_guard", guard.Guard())
    for name, value in (("ran", {}), ("_outbox", []), ("check", lambda: None)):
        monkeypatch.setattr(hooks, name, value)
    guard.current().watching = True
    return guard.current()


@contextmanager
def all_lines(*functions: Patched) -> Iterator[None]:
    assert all(function.inserted for function in functions), "expected inserted lines in each"
    yield
    assert [function.missed for function in functions] == [set()] * len(functions)


def runner(**fields: Any) -> MagicMock:
    none = ("lora_config", "pcp_manager", "speculator", "pp_handler", "aux_output_connector", "adaptive_verification")
    off = dict.fromkeys(("is_encoder_decoder", "uses_inputs_embeds", "check_ep_fault", "use_aux_hidden_state_outputs"), False)
    return MagicMock(**dict.fromkeys(none), **off, dcp_size=1, num_speculative_steps=0, **fields)


def dispatched(mode: Mode, padded: int, requests: int | None = None) -> SimpleNamespace:
    uniform = 1 if mode is Mode.FULL else None
    return SimpleNamespace(
        cg_mode=mode,
        num_tokens=padded,
        num_reqs=requests,
        uniform_token_count=uniform,
        num_ubatches=1,
        num_active_loras=0,
        max_query_len=1,
    )


def v2_step(self: MagicMock, descriptor: SimpleNamespace, function: Patched, dummy: bool = False) -> None:
    """A step of three requests on the V2 runner, dispatched as `descriptor`."""
    requests = ("a", "b", "c")
    scheduled = SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(requests, 1), total_num_scheduled_tokens=3, scheduled_encoder_inputs={},
        finished_req_ids=set(), aux_output_connector_metadata=None, num_spec_tokens_to_schedule=0,
    )  # fmt: skip
    self.gather_batch_req_state.return_value = (SimpleNamespace(num_tokens=3, has_prefill=False), 1)
    self.prepare_inputs.return_value = MagicMock(
        req_ids=list(requests), num_tokens=3, num_tokens_after_padding=descriptor.num_tokens
    )
    self.prepare_attn.return_value = self.prepare_dummy_attn.return_value = (MagicMock(), MagicMock())
    self.model_state.prepare_inputs.return_value = {}
    self.cudagraph_manager.run_fullgraph.return_value = self.cudagraph_manager.run_pw_graph.return_value = torch.zeros(1)
    self.model.return_value = torch.zeros(1)
    function.function.__globals__["dispatch_cg_and_sync_dp"] = lambda *args, **kwargs: (descriptor, None)
    function(self, scheduled, dummy_run=dummy)


def test_v2_dispatch_reaches_the_guard_and_a_replayed_graph_joins_what_its_capture_planned(watching: guard.Guard) -> None:
    """Batches of three on graphs of four and eight rows: one was planned fast, the other refused; a third was never captured."""
    watching.opens_expected = True
    watching.planned(GraphKey("full", 4, 4, True), "decode/4/cute")
    watching.planned(GraphKey("full", 8, 8, True), (guard.core.Refusal(Reason.STEP_TOO_MANY_TOKENS),))
    execute = Patched(V2, "GPUModelRunner.execute_model", CUDAGraphMode=Mode)
    with all_lines(execute):
        v2_step(runner(), dispatched(Mode.FULL, 4, 4), execute)
    v2_step(runner(), dispatched(Mode.FULL, 8, 8), execute)
    report = watching.report()
    assert report["steps"]["fast"] == {"steps": 1, "requests": 3, "tokens": 3, "decode_tokens": 3, "padded_rows": 1}
    assert report["steps"]["standard"] == {"steps": 1, "requests": 3, "tokens": 3, "decode_tokens": 3, "padded_rows": 5}
    assert report["steps"]["by_mode"] == {"full": 2}
    assert report["violations"]["by_reason"] == {}
    v2_step(runner(), dispatched(Mode.FULL, 16, 16), execute)
    last = watching.report()["violations"]["last"][-1]
    assert (last["reason"], last["where"]["graph"]) == ("graph_unplanned", "full/t16/r16/uniform")


@pytest.mark.parametrize("mode", [Mode.NONE, Mode.PIECEWISE])
def test_v2_other_steps_stay_open_for_the_model_to_record(watching: guard.Guard, mode: Mode) -> None:
    execute = Patched(V2, "GPUModelRunner.execute_model", CUDAGraphMode=Mode)
    v2_step(runner(), dispatched(mode, 8), execute)
    assert watching._open == guard.BatchFacts(mode.name.lower(), 3, 8, 3, 3, False, ("a", "b", "c"))


def test_v2_dummy_runs_are_no_steps(watching: guard.Guard) -> None:
    execute = Patched(V2, "GPUModelRunner.execute_model", CUDAGraphMode=Mode)
    v2_step(runner(), dispatched(Mode.FULL, 4, 4), execute, dummy=True)
    assert (watching.step, watching._open) == (0, None)


def test_v2_bad_rows_travel_from_the_logits_to_the_scheduler(watching: guard.Guard) -> None:
    """Sampler, runner and output in a row: logits of four rows, two of them request b's, one of those NaN."""
    make = Patched(SAMPLER, "Sampler.__init__")
    count = Patched(LOGITS, "get_num_nans")
    sample = Patched(V2, "GPUModelRunner.sample_tokens", ModelRunnerOutput=lambda **fields: SimpleNamespace(**fields))
    get = Patched(OUTPUT, "AsyncOutput.get_output")
    with all_lines(make, count, sample, get):
        sampler = SimpleNamespace()
        make(sampler, MagicMock(), 8, 100, "cuda", MagicMock())
        assert sampler.compute_nans, "vLLM's own switch is off"
        logits = torch.zeros(4, 100)
        logits[2, 5] = NAN
        sampled = MagicMock(num_nans=count(logits))
        assert sampled.num_nans.tolist() == [0, 0, 1, 0]
        self = runner(is_last_pp_rank=True)
        batch = MagicMock(req_ids=["a", "b", "c"], cu_num_logits=torch.tensor([0, 1, 3, 4], dtype=torch.int32))
        self.execute_model_state.input_batch = batch
        self.sample.return_value = (sampled, MagicMock(), MagicMock())
        watching.fail_request("c", Reason.STEP_NOT_CAPTURED)
        sample.function.__globals__["AsyncOutput"] = lambda **fields: SimpleNamespace(**fields)
        output = sample(self, None).model_runner_output
        assert sampled.num_nans.tolist() == [0, 1, 0], "by request"
        ready = MagicMock(num_nans=sampled.num_nans.numpy(), model_runner_output=output, _has_fault=None)
        ready.sampled_token_ids, ready.num_sampled_tokens_np = np.zeros((3, 1), int), np.ones(3, int)
        ready.sampling_mask_tensors = ready.logprobs_tensors = ready.pending_aux_output = None
        got = get(ready)
    assert {request: hooks.must_end(got, request) for request in "abc"} == {
        "a": None,
        "b": "non_finite",
        "c": "step_not_captured",
    }
    assert watching.report()["violations"]["by_reason"] == {"non_finite": 1}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_v1_bad_rows_travel_with_either_output(watching: guard.Guard, asynchronous: bool) -> None:
    keep = Patched(V1, "GPUModelRunner._bookkeeping_sync", gpu_sync_allowed=MagicMock)
    logits = torch.zeros(2, 100)
    logits[1, 3] = NAN
    batch = MagicMock(num_reqs=2, req_ids=["a", "b"], req_id_to_index={"a": 0, "b": 1}, prev_sampled_token_ids=None)
    batch.generators, batch.num_tokens_no_spec, batch.token_ids_cpu = {}, np.zeros(2, int), np.zeros((2, 8), int)
    self = runner(use_async_scheduling=asynchronous, input_batch=batch, max_model_len=8)
    self.discard_request_mask.np, self._to_list = np.zeros(2, bool), torch.Tensor.tolist
    sampled = SimpleNamespace(sampled_token_ids=torch.ones(2, 1, dtype=torch.int), logprobs_tensors=None)
    scheduled = SimpleNamespace(scheduled_spec_decode_tokens={}, num_scheduled_tokens={"a": 1, "b": 1})
    by_request, on_device, *_ = keep(self, scheduled, sampled, logits, torch.zeros(2, 4), 2)
    if not asynchronous:
        assert by_request == {"a": 0, "b": 1} and keep.missed == set()
        return
    assert on_device.tolist() == [False, True]
    get = Patched(
        V1, "AsyncGPUModelRunnerOutput.get_output", nans_to_dict=lambda nans, index: {r: nans[i] for r, i in index.items()}
    )
    output = SimpleNamespace(req_id_to_index={"a": 0, "b": 1})
    hooks.mark(output)
    ready = SimpleNamespace(
        sampled_token_ids_cpu=torch.ones(2, 1, dtype=torch.int), async_copy_ready_event=MagicMock(), _invalid_req_indices=[],
        _logprobs_tensors=None, _sampled_token_ids=None, _logprobs_tensors_cpu=None, _num_nans=on_device, _num_nans_cpu=on_device,
        _model_runner_output=output, _has_fault=None,
    )  # fmt: skip
    with all_lines(get):
        get(ready)
    assert [hooks.must_end(output, request) for request in "ab"] == [None, "non_finite"]
    assert watching.report()["violations"]["by_reason"] == {"non_finite": 1}


def test_v1_dispatch_reaches_the_guard(watching: guard.Guard) -> None:
    class Enough(Exception):
        pass

    def stop(*args: Any) -> None:
        raise Enough

    no = lambda: False  # noqa: E731
    execute = Patched(
        V1, "GPUModelRunner.execute_model", has_kv_transfer_group=no, has_ec_transfer=no, maybe_create_ubatch_slices=stop
    )
    batch = MagicMock(num_reqs=2, req_ids=["a", "b"])
    self = runner(execute_model_state=None, speculative_config=None, input_batch=batch)
    self.cache_config.kv_sharing_fast_prefill = False
    self._prepare_inputs.return_value = (None, None, 1)
    descriptor = SimpleNamespace(num_tokens=4, num_reqs=None, uniform=False)
    self._determine_batch_execution_and_padding.return_value = (Mode.PIECEWISE, descriptor, False, None, None)
    scheduled = SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 2}, total_num_scheduled_tokens=3, scheduled_encoder_inputs={})
    with all_lines(execute), pytest.raises(Enough):
        execute(self, scheduled)
    assert watching._open == guard.BatchFacts("piecewise", 3, 4, 2, 2, False, ("a", "b"))


def test_v1_copies_of_recurrent_state_are_told(watching: guard.Guard) -> None:
    watching.slots_changed([("allocated", "a", [7])])
    collect = Patched(MAMBA, "collect_mamba_copy_meta")
    state = SimpleNamespace(req_id="a", block_ids={0: [5, 7]})
    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=[])])
    with all_lines(collect):
        collect(MagicMock(), caches, {}, [0], 0, 1, 0, state, {})
    assert watching.report()["counters"]["slots_copied"] == 1
    state.req_id = "b"
    collect(MagicMock(), caches, {}, [0], 0, 1, 0, state, {})
    assert watching.report()["violations"]["by_reason"] == {"slot_not_owned": 1}


def test_the_functions_above_hold_every_inserted_line_of_their_files() -> None:
    """But for the imports at module level, and the mark of V1's `sample_tokens`, which the engine's tests run on CPUs."""
    tried: dict[str, tuple[str, ...]] = {
        V1: ("GPUModelRunner.execute_model", "GPUModelRunner._bookkeeping_sync", "AsyncGPUModelRunnerOutput.get_output"),
        V2: ("GPUModelRunner.execute_model", "GPUModelRunner.sample_tokens"),
        OUTPUT: ("AsyncOutput.get_output",),
        SAMPLER: ("Sampler.__init__",),
        LOGITS: ("get_num_nans",),
        MAMBA: ("collect_mamba_copy_meta",),
    }
    for target, names in tried.items():
        lines = ledger.insert((ROOT / target).read_text(), target)
        tree = ast.parse("\n".join(line.text for line in lines))
        starts = {n.lineno for n in ast.walk(tree) if isinstance(n, ast.stmt)}
        all_of_them = {n for n, line in enumerate(lines, 1) if line.patch and n in starts and not line.text.startswith("from ")}
        left = all_of_them - set().union(*(Patched(target, name).inserted for name in names))
        assert [lines[n - 1].text.strip() for n in sorted(left)] == (
            ["k3fast_hooks.mark(output, self.use_async_scheduling)"] if target == V1 else []
        ), target
