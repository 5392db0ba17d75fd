"""A deployment's life on CUDA, without a GPU: what is refused and when, which graphs hold which plan, what records say."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
from types import SimpleNamespace as Module

import numpy as np
import pytest
import torch
from cuda_fakes import BF16, caches, replace_kernels, step_tensors, stock, weights

import vllm.model_executor.models.kimi_k3_fast as package
from vllm.model_executor.models.kimi_k3_fast import guard as guards
from vllm.model_executor.models.kimi_k3_fast.comm import Box, PeerLost
from vllm.model_executor.models.kimi_k3_fast.comm.layout import Layout
from vllm.model_executor.models.kimi_k3_fast.fast import cuda_executor, cuda_path, metadata
from vllm.model_executor.models.kimi_k3_fast.fast.cuda_path import CudaPath, FastPathRequired, caches_of, check_caches
from vllm.model_executor.models.kimi_k3_fast.fast.cuda_views import KeptExperts
from vllm.model_executor.models.kimi_k3_fast.fast.plan import StepKey
from vllm.model_executor.models.kimi_k3_fast.guard import BatchFacts
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason, Refusal
from vllm.model_executor.models.kimi_k3_fast.scope import Deployment
from vllm.model_executor.models.kimi_k3_fast.settings import Events, Settings

HOPPER = Deployment(
    platform="cuda", device_arch="sm_90a", attention_heads=2, kda_heads=2, runner="v2", cudagraph="full_and_piecewise"
)
LIFTED = Settings(allow_unvalidated=True)
SLOTS = [3, 1, 0, 0]


@pytest.fixture(autouse=True)
def own_guard(monkeypatch):
    monkeypatch.setattr(guards, "_guard", guards.Guard())
    guards.current().opens_expected = True


def make(settings: Settings = LIFTED, deployment: Deployment = HOPPER, packs: bool = False, **more) -> tuple[CudaPath, Module]:
    model, kept = stock(weights(), packs=packs)
    size = (1 << 30, 0) if packs else (0, 1 << 30)
    return CudaPath(deployment, settings, [1, 2, 4, 128], lambda: kept, size, device="cpu", **more), model


def bind(path: CudaPath, model: Module) -> None:
    path.loaded(model)
    held = caches()
    path.bound(lambda: held)


def capture(path: CudaPath, model: Module, tokens: int = 4, step=None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The runner's warm-up and capture of one size: what each returned."""
    tensors = step or (lambda: step_tensors(SLOTS[:tokens], 5))
    found = []
    for capturing in (False, True):
        path.stage(tokens, tokens, uniform=True)
        found.append(path.forward(lambda: model.embed_input_ids(torch.arange(tokens)), tensors, capturing))
    return found[0], found[1]


def dispatch(mode: str, tokens: int, padded: int, uniform: bool = True) -> None:
    requests = tuple(f"r{i}" for i in range(tokens))
    guards.current().open_step(BatchFacts(mode, tokens, padded, tokens, padded, uniform, requests))


def steps() -> dict:
    return guards.current().report()["steps"]


@pytest.mark.parametrize("packs", [False, True])
def test_a_captured_size_is_fast_and_its_replays_say_so(monkeypatch, packs):
    launched = replace_kernels(monkeypatch)
    path, model = make(packs=packs)
    bind(path, model)
    warm, captured = capture(path, model)
    assert warm.shape == captured.shape == (4, model.config.hidden_size) and torch.isfinite(captured).all()
    count = len(launched)
    dispatch("full", 3, 4)
    path.replayed()
    assert len(launched) == count, "a replay runs no Python of ours"
    fast = steps()["fast"]
    assert (fast["steps"], fast["requests"], fast["tokens"]) == (1, 3, 3)
    report = guards.current().report()
    assert report["deployment"]["selected"] and "decode/4/cute" in str(report)
    names = [m["name"] for m in report["deployment"]["mutations"]]
    assert names == ["CudaGraphManager.dispatch", *([] if packs else ["memory for routed experts"])]


def test_vllms_warm_up_before_the_capture_is_no_step(monkeypatch):
    """It dispatches requests of its own; none of them falls back, which `require` would end it for."""
    replace_kernels(monkeypatch)
    path, model = make(dataclasses.replace(LIFTED, mode="require"))
    bind(path, model)
    key = StepKey(2, 2, 2, 0, 1, path.generation, "none")
    dispatch("none", 2, 2)
    path.record(key)
    counters = guards.current().report()["counters"]
    assert counters["warm_up_steps"] == 1 and "require_failed_steps" not in counters
    assert steps()["standard"]["steps"] == steps()["fallback"] == 0
    capture(path, model)
    dispatch("none", 2, 2)
    path.record(key)
    counters = guards.current().report()["counters"]
    assert (counters["warm_up_steps"], counters["require_failed_steps"]) == (1, 1)
    assert steps()["standard"]["steps"] == steps()["fallback"] == 1


def test_steps_behind_captures_that_are_all_stocks_are_counted(monkeypatch):
    """No size is the fast path's, so nothing was prepared: that is no warm-up."""
    replace_kernels(monkeypatch)
    path, model = make()
    bind(path, model)
    capture(path, model, 128, lambda: step_tensors([1] * 128, 5))
    assert path.executor is None
    dispatch("piecewise", 2, 2)
    path.record(StepKey(2, 2, 2, 0, 1, path.generation, "piecewise"))
    assert steps()["standard"]["steps"] == steps()["fallback"] == 1


def test_every_captured_size_is_made_ready_in_the_first_warm_up(monkeypatch):
    replace_kernels(monkeypatch)
    path, model = make()
    bind(path, model)
    capture(path, model)
    assert sorted(path.executor.ready) == [1, 2, 4], "128 is past the largest batch of the kernels"
    monkeypatch.setattr(cuda_executor.Executor, "prepare", lambda *_: pytest.fail("prepared again"))
    capture(path, model, tokens=2)
    assert guards.current().report()["gauges"]["startup_prepared_bytes"] > 0


def test_sizes_that_were_not_prepared_stay_stocks(monkeypatch):
    replace_kernels(monkeypatch)
    path, model = make()
    bind(path, model)
    for tokens in (3, 128):
        slots = [1] * tokens
        assert capture(path, model, tokens, lambda slots=slots: step_tensors(slots, 5)) == (None, None)
    dispatch("full", 128, 128)
    reasons = steps()["by_reason"]
    assert reasons == {"step_too_many_tokens": 1}


def test_caches_bound_anew_make_a_new_generation(monkeypatch):
    replace_kernels(monkeypatch)
    path, model = make()
    bind(path, model)
    capture(path, model)
    first = path.executor
    again = caches()
    path.bound(lambda: again)
    assert path.executor is None and path.generation == 2
    capture(path, model)
    assert path.executor is not first and path.executor.bound() is again


def test_eager_and_piecewise_steps_are_standard_and_say_why(monkeypatch):
    replace_kernels(monkeypatch)
    path, model = make()
    bind(path, model)
    capture(path, model)
    for mode, tokens, prompt in (("none", 3, 0), ("piecewise", 40, 38)):
        dispatch(mode, tokens, tokens, uniform=False)
        path.record(StepKey(2, tokens, tokens, prompt, 0 if prompt else 1, path.generation, mode))
    report = guards.current().report()
    assert report["steps"]["by_reason"] == {"step_not_captured": 2, "step_prefill": 1}
    assert report["steps"]["standard"]["steps"] == 2 and not report["violations"]["by_reason"]
    assert report["steps"]["standard"]["decode_tokens"] == 3 + 2


def test_a_retired_plan_turns_its_batches_away_from_the_graph(monkeypatch):
    replace_kernels(monkeypatch)
    path, model = make()
    bind(path, model)
    capture(path, model)
    assert not path.turn_away(4)
    guards.current().quarantine("decode/4/cute", Reason.NON_FINITE)
    assert path.turn_away(4) and not path.turn_away(2) and path.turn_away(4)
    dispatch("none", 3, 3)
    path.record(StepKey(3, 3, 3, 0, 1, path.generation, "none"))
    assert steps()["by_reason"] == {"plan_quarantined": 1, "step_not_captured": 1}
    dispatch("none", 3, 3)
    path.record(StepKey(3, 3, 3, 0, 1, path.generation, "none"))
    assert steps()["by_reason"]["plan_quarantined"] == 1, "only the batch that was turned away"


@pytest.mark.parametrize("mode", ["auto", "require"])
def test_a_deployment_that_is_refused(mode):
    refused = dataclasses.replace(HOPPER, lora=True, cudagraph="none")
    settings = Settings(mode=mode, allow_unvalidated=True)
    if mode == "require":
        with pytest.raises(FastPathRequired, match=r"cuda_graphs: .*\n.*lora: LoRA is enabled"):
            make(settings, refused)
        return
    path, model = make(settings, refused)
    bind(path, model)
    assert capture(path, model) == (None, None)
    dispatch("full", 4, 4)
    dispatch("none", 2, 2)
    path.record(StepKey(2, 2, 2, 0, 1, 0, "none"))
    assert steps()["by_reason"] == {"lora": 2, "cuda_graphs": 2} and not guards.current().report()["violations"]["by_reason"]


def test_nothing_is_copied_for_a_deployment_that_is_refused():
    def kept():
        pytest.fail("experts kept for nothing")

    CudaPath(dataclasses.replace(HOPPER, eplb=True), LIFTED, [1], kept, 0, device="cpu")


def test_weights_that_lie_otherwise_are_a_refusal_with_the_layer(monkeypatch):
    replace_kernels(monkeypatch)
    path, model = make()
    model.layers[3].self_attn.dt_bias = model.layers[3].self_attn.dt_bias.to(BF16)
    bind(path, model)
    assert [r.reason for r in path.refusals] == [Reason.WEIGHTS_LAYOUT] and "layer 3 attention: dt_bias" in path.refusals[
        0
    ].detail
    assert capture(path, model) == (None, None)
    path, model = make(Settings(mode="require", allow_unvalidated=True))
    del model.layers[3].self_attn.dt_bias
    with pytest.raises(FastPathRequired, match=r"weights_layout: .*dt_bias"):
        path.loaded(model)


def test_a_kernel_that_fails_in_the_warm_up_leaves_stocks_path(monkeypatch):
    replace_kernels(monkeypatch)
    path, model = make()
    bind(path, model)
    monkeypatch.setattr(cuda_executor.kda, "run", lambda *_: (_ for _ in ()).throw(ValueError("argument slots: stride")))
    assert capture(path, model) == (None, None)
    assert "warm-up of 4 rows: ValueError: argument slots: stride" in path.refusals[0].detail
    dispatch("full", 4, 4)
    assert steps()["by_reason"] == {"not_prepared": 1}


def test_a_kernel_that_does_not_compile_leaves_stocks_path_and_stops_require(monkeypatch):
    replace_kernels(monkeypatch)

    def fail(specs, arch, say):
        raise RuntimeError("a kernel for sm_90a does not compile: no space left")

    monkeypatch.setattr(cuda_executor, "compile_missing", fail)
    path, model = make()
    bind(path, model)
    assert capture(path, model) == (None, None) and "no space left" in path.refusals[0].detail
    path, model = make(Settings(mode="require", allow_unvalidated=True))
    bind(path, model)
    with pytest.raises(FastPathRequired, match="no space left"):
        capture(path, model)


def test_one_ranks_refusal_is_everyones(monkeypatch):
    replace_kernels(monkeypatch)
    path, model = make(all_gather=lambda mine: [mine, [1]])
    bind(path, model)
    assert "rank 1 refused" in path.refusals[0].detail and capture(path, model) == (None, None)


# -- ranks that exchange through mailboxes ----------------------------------------


def of_two(other: list[int], settings: Settings = LIFTED) -> tuple[CudaPath, Module, list[str]]:
    """One rank of two, whose collectives find what the other says in turn, and what was done in order."""
    done: list[str] = []

    def all_gather(mine: list[int]) -> list[list[int]]:
        done.append(f"agree {mine[0]}")
        return [mine, [other.pop(0)]]

    def post(words: int):
        done.append("room")
        return lambda: done.append("meet") or Module(layout=Layout(2, words), rank=0, reduce=lambda x: x, health=lambda: None)

    path, model = make(settings, ranks=2, all_gather=all_gather, post=post)
    return path, model, done


def facts() -> dict:
    return guards.current().report()["deployment"]["facts"]


def test_ranks_meet_when_all_have_what_they_need(monkeypatch):
    replace_kernels(monkeypatch)
    path, model, done = of_two([0, 0, 0, 0, 0])
    bind(path, model)
    capture(path, model)
    assert done == ["agree 0", "room", "agree 0", "meet", "agree 0", "agree 0"], "load, prepare, mailbox, warm-up"
    assert path.executor.box is path._box is not None and facts()["exchange"] == "mailbox"


@pytest.mark.parametrize("mine", [False, True])
def test_no_rank_meets_the_others_where_one_cannot_prepare(monkeypatch, mine):
    replace_kernels(monkeypatch)
    path, model, done = of_two([0, int(not mine)])
    bind(path, model)
    if mine:
        fail = RuntimeError("a kernel does not compile: no space left")
        monkeypatch.setattr(cuda_executor, "compile_missing", lambda *_: (_ for _ in ()).throw(fail))
    assert capture(path, model) == (None, None) and "meet" not in done
    assert [r.reason for r in path.refusals] == [Reason.NOT_PREPARED]
    assert ("no space left" if mine else "rank 1 refused") in path.refusals[0].detail
    assert facts()["exchange"] == "none"


@pytest.mark.parametrize("mine", [False, True])
@pytest.mark.parametrize("exchange", ["auto", "mailbox"])
def test_ranks_whose_memory_cannot_be_joined(monkeypatch, exchange, mine):
    """They sum by stock's all-reduce, all of them; where mailboxes were asked for by name, there is no fast path."""
    replace_kernels(monkeypatch)
    path, model, _ = of_two([0, 0, int(not mine), 0, 0], dataclasses.replace(LIFTED, exchange=exchange))
    bind(path, model)
    if mine:
        made = path._post

        def post(words: int):
            made(words)
            return lambda: (_ for _ in ()).throw(RuntimeError("no peer access"))

        path._post = post
    warm, _ = capture(path, model)
    if exchange == "auto":
        assert warm is not None and path.executor.box is None and not path.executor.mailbox
        assert facts()["exchange"] == "stock" and not path.refusals
        return
    assert warm is None and [r.reason for r in path.refusals] == [Reason.NOT_PREPARED] and path._box is None
    assert ("no peer access" if mine else "rank 1 has none") in path.refusals[0].detail


def test_a_refused_path_does_not_look_into_its_mailbox(monkeypatch):
    """The ranks' kernels may have waited for each other in vain before the refusal: the health word is sticky."""
    replace_kernels(monkeypatch)
    path, model, _ = of_two([0, 0, 0, 0])
    bind(path, model)
    made = path._post
    path._post = lambda words: made(words) and (lambda: Module(layout=Layout(2, words), health=lost(1).health))
    monkeypatch.setattr(cuda_executor.kda, "run", lambda *_: (_ for _ in ()).throw(ValueError("argument slots: stride")))
    assert capture(path, model) == (None, None)
    for _ in range(2 * cuda_path.HEALTH_EVERY):
        dispatch("full", 4, 4)
        path.replayed()
    assert guards.current().report()["violations"]["by_reason"] == {}


@pytest.mark.parametrize("packs", [False, True])
def test_a_second_loading_of_weights_is_refused(packs):
    path, model = make(packs=packs)
    routed = model.layers[1].mlp.experts.routed_experts
    with pytest.raises(RuntimeError, match="restart the server"):
        routed.quant_method.process_weights_after_loading(routed)
    assert isinstance(path.kept[1], KeptExperts)


def test_caches_of_another_kind_are_named():
    good = caches()
    check_caches(good)
    state = {**good.state, "layers.1": good.state["layers.1"].to(BF16)}
    with pytest.raises(ValueError, match=r"layers.1: expected recurrent state .*found torch.bfloat16"):
        check_caches(dataclasses.replace(good, state=state))
    dim_first = {**good.conv, "layers.3": good.conv["layers.3"].transpose(1, 2).contiguous()}
    with pytest.raises(ValueError, match=r"layers.3: expected convolution state"):
        check_caches(dataclasses.replace(good, conv=dim_first))
    with pytest.raises(ValueError, match=r"layers.2: expected latent rows .*uint8"):
        check_caches(dataclasses.replace(good, latent={"layers.2": torch.zeros(3, 64, 576, dtype=torch.uint8)}))


def test_caches_are_found_by_the_layers_names():
    path, model = make()
    path.loaded(model)
    held = caches()
    bound = {name: [held.conv[name], held.state[name], "records"] for name in held.conv} | held.latent
    found = caches_of(path.model, bound.__getitem__)
    assert found.conv.keys() == held.conv.keys() and found.latent["layers.2"] is held.latent["layers.2"]


# -- vLLM's metadata ----------------------------------------


def stocks_metadata(tokens: int) -> tuple[dict, dict]:
    """Attention metadata and slot mappings as stock's builders make them of a batch to be captured."""
    starts = torch.arange(tokens + 1, dtype=torch.int32)
    states = torch.zeros(64, dtype=torch.int32)[:tokens]
    table, lengths = torch.zeros(tokens, 6, dtype=torch.int32), torch.ones(tokens, dtype=torch.int32)
    kda = Module(num_prefills=0, num_decodes=tokens, non_spec_state_indices_tensor=states, non_spec_query_start_loc=starts)
    mla = Module(num_prefills=0, num_decodes=tokens, query_start_loc=starts, decode=Module(block_table=table, seq_lens=lengths))
    mapping = torch.full((2, 64), -1, dtype=torch.int64)
    return {"a": kda, "b": mla}, {"a": mapping[0, :tokens], "b": mapping[1, :tokens]}


def test_index_tensors_are_stocks_own_memory():
    step, mapping = stocks_metadata(4)
    found = metadata.cuda_step(["a", "b"], 4, step, mapping)
    kda, mla = step["a"], step["b"]
    assert found.slots["a"].shape == (4, 1) and found.slots["a"].data_ptr() == kda.non_spec_state_indices_tensor.data_ptr()
    assert found.tables["b"] is mla.decode.block_table and found.rows["b"].data_ptr() == mapping["b"].data_ptr()
    assert found.lengths["b"] is mla.decode.seq_lens
    assert found.num_tokens.data_ptr() == kda.non_spec_query_start_loc[4:].data_ptr() and found.num_tokens.tolist() == [4]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda m: setattr(m["a"], "num_prefills", 1), "metadata of a: expected 4 decoding requests"),
        (lambda m: setattr(m["b"], "num_decodes", 3), "metadata of b: expected 4 decoding requests and no prompt, found 3"),
        (lambda m: setattr(m["b"].decode, "block_table", torch.zeros(4, 12, dtype=torch.int32)[:, :6]), "metadata of b"),
        (lambda m: setattr(m["b"].decode, "seq_lens", torch.ones(4, dtype=torch.int64)), "torch.int32"),
    ],
)
def test_other_metadata_is_a_refusal(spoil, said):
    step, mapping = stocks_metadata(4)
    spoil(step)
    found = metadata.cuda_step(["a", "b"], 4, step, mapping)
    assert isinstance(found, Refusal) and found.reason is Reason.CACHES_LAYOUT and said in found.detail


def test_a_runners_batch_in_plain_values():
    batch = Module(
        num_reqs=3,
        num_tokens=9,
        num_tokens_after_padding=16,
        num_scheduled_tokens=np.array([1, 1, 7, 99], dtype=np.int32),
        is_prefilling_np=np.array([False, False, True, True]),
    )
    assert metadata.batch_key(batch, "piecewise", 2) == StepKey(3, 9, 16, 7, 0, 2, "piecewise")
    decoding = Module(**{**vars(batch), "num_reqs": 2, "num_tokens": 2, "num_tokens_after_padding": 2})
    assert metadata.batch_key(decoding, "none", 2) == StepKey(2, 2, 2, 0, 1, 2, "none")


# -- registration ----------------------------------------


@pytest.mark.parametrize(("platform", "makes"), [("cpu", "served:Served"), ("cuda", "cuda:Fast"), ("rocm", None)])
def test_each_platform_registers_its_own_classes(monkeypatch, platform, makes):
    from vllm import platforms
    from vllm.model_executor.models import registry

    found = {}
    held = Module(is_cpu=lambda: platform == "cpu", is_cuda=lambda: platform == "cuda", check_and_update_config=None)
    monkeypatch.setattr(platforms, "_current_platform", held)
    monkeypatch.setattr(registry.ModelRegistry, "register_model", lambda name, where: found.update({name: where}))
    monkeypatch.setattr(package, "_register_cpu", lambda: found.update({"cpu": "served:Served"}))
    package.register()
    if makes is None:
        assert found == {}
    else:
        assert found and all(makes in where for where in found.values())


@pytest.mark.parametrize(
    ("architecture", "mode", "runner", "watched"),
    [
        ("KimiLinearForCausalLM", "auto", True, True),
        ("KimiK3ForConditionalGeneration", "require", True, True),
        ("KimiLinearForCausalLM", "off", True, False),
        ("KimiLinearForCausalLM", "require", False, False),
        ("LlamaForCausalLM", "auto", True, False),
    ],
)
def test_the_guard_watches_engines_whose_steps_it_sees(monkeypatch, architecture, mode, runner, watched):
    from vllm import platforms

    monkeypatch.setattr(platforms, "_current_platform", Module(is_cpu=lambda: False, is_cuda=lambda: True))
    config = Module(
        model_config=Module(architecture=architecture),
        additional_config={"kimi_k3_fast": {"mode": mode}},
        use_v2_model_runner=runner,
    )
    assert package._watches(config) is watched


def lost(rank: int) -> Box:
    """A mailbox whose health word says that this rank did not answer."""
    box = Box(0, Layout(2, 64), torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), torch.zeros(2))
    box.memory[0] = 1 + rank
    return box


@pytest.mark.parametrize("policy", ["quarantine", "report", "stop"])
def test_a_lost_peer_ends_the_engine_with_the_first_result_that_is_nan(monkeypatch, tmp_path, policy):
    """The thread that hands out results raises, in the executor's hands, though no step follows; other NaN ends requests only."""
    replace_kernels(monkeypatch)
    settings = Settings(allow_unvalidated=True, policy=policy, events=Events(path=str(tmp_path / "events.jsonl")))
    path, model = make(settings, post=lambda words: lambda: lost(1))
    bind(path, model)
    watching = guards.current()
    watching.post(Reason.NON_FINITE, {"request": "r0"})
    path._box = lost(1)
    path._box.memory[0] = 0
    watching.post(Reason.NON_FINITE, {"request": "r0"})
    path._box = lost(1)
    with concurrent.futures.ThreadPoolExecutor(1) as other_thread, pytest.raises(PeerLost, match="Rank 1"):
        other_thread.submit(watching.post, Reason.NON_FINITE, {"request": "r0"}).result()
    written = [json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert [event["where"]["peer"] for event in written if event.get("reason") == "peer_lost"] == [1], "said once, in the file"
    with pytest.raises(PeerLost, match="Rank 1"):
        watching.post(Reason.NON_FINITE, {"request": "r1"})


def test_a_rank_that_gives_no_results_sees_the_lost_peer_within_some_steps(monkeypatch):
    replace_kernels(monkeypatch)
    path, model = make()
    bind(path, model)
    capture(path, model)
    path._box = lost(1)
    with pytest.raises(PeerLost, match="Rank 1"):
        for _ in range(100):
            dispatch("full", 4, 4)
            path.replayed()
    assert guards.current().step == cuda_path.HEALTH_EVERY
    assert guards.current().report()["violations"]["by_reason"] == {"peer_lost": 1}
