"""The classes that vLLM makes on CUDA, with stock's own code replaced at its edges: who calls the fast path, and when."""

from __future__ import annotations

from types import SimpleNamespace as Module

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import override_forward_context
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from vllm.model_executor.models.kimi_k3_fast.fast import cuda
from vllm.model_executor.models.kimi_k3_fast.fast.plan import StepKey


class Path:
    """Records what the adapter tells it. `answer`: what a staged forward gives."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.staged = None
        self.model = Module(layers=[Module(attention=Module(name="layers.0"))])
        self.generation = 3
        self.answer: torch.Tensor | None = torch.ones(4, 8)
        self.retired = {8}

    def stage(self, requests, tokens, uniform):
        self.calls.append(("stage", requests, tokens, uniform))
        self.staged = StepKey(requests, tokens, tokens, 0, 1, self.generation, "full")

    def replayed(self):
        self.staged = None
        self.calls.append(("replayed",))

    def record(self, key):
        self.staged = None
        self.calls.append(("record", key))

    def loaded(self, stock):
        self.calls.append(("loaded", stock))

    def bound(self, caches):
        self.calls.append(("bound", caches))

    def turn_away(self, tokens):
        return tokens in self.retired

    def forward(self, embed, step, capturing):
        self.calls.append(("forward", embed(), capturing))
        return self.answer


@pytest.fixture
def model(monkeypatch) -> cuda.FastKimiLinearForCausalLM:
    """A served model without weights; stock's forward answers "stock"."""
    made = cuda.FastKimiLinearForCausalLM.__new__(cuda.FastKimiLinearForCausalLM)
    torch.nn.Module.__init__(made)
    made.fast = Path()
    monkeypatch.setattr(cuda.KimiLinearForCausalLM, "forward", lambda self, *args, **kwargs: "stock")
    monkeypatch.setattr(cuda.KimiLinearForCausalLM, "embed_input_ids", lambda self, ids: ids + 0.5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return made


def call(model, tokens: int = 4, metadata=None, mode=CUDAGraphMode.NONE, given: torch.Tensor | None = None):
    context = Module(
        attn_metadata={"layers.0": None} if metadata is None else metadata, cudagraph_runtime_mode=mode, slot_mapping={}
    )
    with override_forward_context(context):
        return model(input_ids=torch.zeros(tokens), positions=torch.arange(tokens), inputs_embeds=given)


def test_only_the_staged_batch_asks_the_fast_path(model):
    assert call(model) == "stock" and not model.fast.calls, "nothing is staged"
    model.fast.stage(4, 4, True)
    assert torch.equal(call(model), torch.ones(4, 8))
    name, embedded, capturing = model.fast.calls[-1]
    assert name == "forward" and capturing and embedded.tolist() == [0.5] * 4
    call(model, given=torch.full((4, 8), 7.0))
    assert model.fast.calls[-1][1].tolist() == [[7.0] * 8] * 4, "embeddings that were given are taken"
    count = len(model.fast.calls)
    assert call(model, tokens=3) == "stock", "another batch"
    assert call(model, metadata=[]) == "stock", "a dummy run without attention"
    assert call(model, mode=CUDAGraphMode.PIECEWISE) == "stock"
    assert len(model.fast.calls) == count
    model.fast.answer = None
    assert call(model) == "stock", "planned standard"


def test_the_model_names_its_state(model):
    assert model.get_model_state_cls() is cuda.FastModelState
    model.fast = None
    assert model.get_model_state_cls() is MambaHybridModelState and call(model) == "stock"
    wrapper = cuda.FastKimiK3ForConditionalGeneration.__new__(cuda.FastKimiK3ForConditionalGeneration)
    torch.nn.Module.__init__(wrapper)
    wrapper.language_model = model
    assert wrapper.get_model_state_cls() is MambaHybridModelState
    assert wrapper._processor_factory is cuda.KimiK3ForConditionalGeneration._processor_factory, "images stay stock's"


@pytest.fixture
def state(monkeypatch) -> cuda.FastModelState:
    monkeypatch.setattr(MambaHybridModelState, "__init__", lambda self, config, *rest: setattr(self, "vllm_config", config))
    monkeypatch.setattr(MambaHybridModelState, "initialize_kv_cache", lambda self, *args: None)
    monkeypatch.setattr(MambaHybridModelState, "prepare_attn", lambda self, batch, mode, *args, **kwargs: {"of": kwargs})
    monkeypatch.setattr(cuda, "_watch_dispatch", lambda: None)
    monkeypatch.setattr(cuda, "_path", None)
    layer = Module(kv_cache=torch.zeros(2, 64, 576))
    compiling = Module(static_forward_context={"layers.0": layer}, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    text = Module(fast=Path(), model="weights")
    return cuda.FastModelState(Module(compilation_config=compiling), Module(language_model=text), None, torch.device("cpu"))


def batch(requests: int = 2, prefill: bool = False) -> Module:
    scheduled = np.array([1] * requests, dtype=np.int32)
    return Module(
        num_reqs=requests,
        num_tokens=requests,
        num_tokens_after_padding=4,
        num_scheduled_tokens=scheduled,
        is_prefilling_np=np.array([prefill] * requests),
    )


def test_the_state_tells_of_load_and_binding(state):
    assert state.fast.calls == [("loaded", "weights")] and cuda._path is state.fast
    state.initialize_kv_cache(None, None)
    name, caches = state.fast.calls[-1]
    assert name == "bound" and caches().latent["layers.0"].shape == (2, 64, 576)


def test_the_state_tells_captures_from_steps(state):
    found = state.prepare_attn(batch(), CUDAGraphMode.NONE, (), None, [], None, for_capture=True)
    assert found == {"of": {"for_capture": True}}
    assert state.fast.calls[-1] == ("stage", 2, 4, True)
    state.prepare_attn(batch(), CUDAGraphMode.FULL, (), None, [], None)
    assert state.fast.calls[-1] == ("replayed",)
    state.prepare_attn(batch(prefill=True), CUDAGraphMode.PIECEWISE, (), None, [], None)
    assert state.fast.calls[-1] == ("record", StepKey(2, 2, 4, 2, 1, 3, "piecewise"))
    state.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    state.prepare_attn(batch(), CUDAGraphMode.NONE, (), None, [], None, for_capture=True)
    assert state.fast.calls[-1] == ("stage", 2, 4, False), "graphs that also serve prompts"


def test_a_retired_plan_is_not_dispatched(monkeypatch):
    full = BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 8, 1)
    chosen = {"is": full}
    monkeypatch.setattr(ModelCudaGraphManager, "dispatch", lambda self, *args, **kwargs: chosen["is"])
    monkeypatch.setattr(cuda, "_path", Path())
    cuda._watch_dispatch()
    watched = ModelCudaGraphManager.dispatch
    cuda._watch_dispatch()
    assert ModelCudaGraphManager.dispatch is watched, "installed once"
    eager = watched(None, 5, 5, 1, 0)
    assert (eager.cg_mode, eager.num_tokens, eager.num_reqs) == (CUDAGraphMode.NONE, 5, 5)
    cuda._path.retired = set()
    assert watched(None, 5, 5, 1, 0) is full
    cuda._path.retired = {8}
    chosen["is"] = BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 8, None)
    assert watched(None, 5, 5, None, 0) is chosen["is"]


def test_experts_are_found_where_stock_has_them():
    routed = object()
    assert cuda._routed_experts(Module(block_sparse_moe=Module(experts=Module(routed_experts=routed)))) is routed
    assert cuda._routed_experts(Module(mlp=object())) is None
