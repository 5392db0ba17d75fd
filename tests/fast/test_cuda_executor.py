"""The CUDA executor's chain, on PyTorch forms in the kernels' places: views of stock's layout, AttnRes blocks, padding, ranks."""

from __future__ import annotations

import functools
import sys
import threading
from types import SimpleNamespace as Module

import pytest
import torch
from cuda_fakes import BF16, CLOSES, KINDS, Meeting, backbone, caches, replace_kernels, step_tensors, stock, weights

from vllm.model_executor.models.kimi_k3_fast.comm import Box
from vllm.model_executor.models.kimi_k3_fast.comm.layout import Layout
from vllm.model_executor.models.kimi_k3_fast.fast import cuda_executor
from vllm.model_executor.models.kimi_k3_fast.fast import executor as cpu_executor
from vllm.model_executor.models.kimi_k3_fast.fast.backend import Backend, TorchForms
from vllm.model_executor.models.kimi_k3_fast.fast.cuda_executor import Caches, Executor
from vllm.model_executor.models.kimi_k3_fast.fast.cuda_views import LayoutError, view_model
from vllm.model_executor.models.kimi_k3_fast.fast.plan import Plan
from vllm.model_executor.models.kimi_k3_fast.ops import build, experts

ARCH, STEPS, FIRST = "sm_90a", 3, 63  # the second step begins a new block of the latent cache
SLOTS = [3, 1, 0, -1]


def cpu(dtype: torch.dtype) -> tuple[list[torch.Tensor], Caches]:
    """Hidden states of the real rows and the caches after, by the CPU executor."""
    bound, found = caches(dtype), []
    run = cpu_executor.Executor(backbone(weights(), bound, dtype), Backend(TorchForms()), 8)
    for step in range(STEPS):
        t = step_tensors(SLOTS, FIRST + step)
        slots, rows, table, lengths = (next(iter(x.values())) for x in (t.slots, t.rows, t.tables, t.lengths))
        where = {"kda": cpu_executor.StateSlots(slots[:, 0].long()), "mla": cpu_executor.CacheRows(rows, table, lengths, 99)}
        found.append(run.run(Plan("decode", len(SLOTS), 1, "torch", 1), torch.arange(len(SLOTS)) + step, where)[:2])
    return found, bound


def cuda(world: int, mailbox: bool = False, packs: bool = False, posted: int = 0) -> list[tuple[list[torch.Tensor], Caches]]:
    """The same by the CUDA executor on every rank."""
    meeting, found = Meeting(world), {}

    def rank(r: int) -> None:
        reduce = meeting.reduce(r) if world > 1 else lambda x: x
        model, kept = stock(weights(), r, world, reduce, packs)
        bound = caches(BF16, r, world)
        run = Executor(view_model(model, kept), lambda: bound, {"layers.2": 2}, ARCH, world, reduce, mailbox, "cpu", r, posted)
        run.prepare([len(SLOTS)])
        run.box = Module(layout=Module(words=run.words), reduce=reduce, rank=r) if mailbox else None
        hidden = []
        for step in range(STEPS):
            embedded = model.embed_input_ids(torch.arange(len(SLOTS)) + step)
            hidden.append(run.run(len(SLOTS), embedded, step_tensors(SLOTS, FIRST + step))[:2].clone())
        found[r] = hidden, bound

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[r] for r in range(world)]


def close(ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    """About as far from fp32 as PyTorch's own BF16 chain is. A few roundings decide both distances, which differ by their luck;
    a wrong tensor anywhere in the chain moves the result by a third and more."""
    error, own = ((x.float() - exact.float()).norm() / exact.float().norm() for x in (ours, plain))
    assert error <= 2 * own + 0.05, f"{what}: relative error {error:.4f}, PyTorch's {own:.4f}"


@pytest.mark.parametrize(
    ("world", "mailbox", "packs", "posted"),
    [
        (1, False, False, 0),
        (2, False, False, 0),
        (2, True, False, 0),
        (2, True, False, 64),
        (1, False, True, 0),
        (2, False, True, 0),
    ],
)
def test_steps_equal_the_cpu_executors(monkeypatch, world, mailbox, packs, posted):
    replace_kernels(monkeypatch)
    (exact, exact_caches), (plain, plain_caches) = cpu(torch.float32), cpu(BF16)
    for r, (hidden, bound) in enumerate(cuda(world, mailbox, packs, posted)):
        for step in range(STEPS):
            close(hidden[step], plain[step], exact[step], f"rank {r} of {world}, step {step}")
        for name, ours in bound.state.items():
            theirs = [held.state[name].chunk(world, 1)[r] for held in (plain_caches, exact_caches)]
            close(ours[1], theirs[0][1], theirs[1][1], f"state of {name}")
            untouched = [s for s in range(len(ours)) if s not in SLOTS[:2]]
            assert torch.equal(ours[untouched], caches(BF16, r, world).state[name][untouched])
        for name, ours in bound.latent.items():
            close(ours[3, -1], plain_caches.latent[name][3, -1], exact_caches.latent[name][3, -1], f"rows of {name}")
            assert torch.equal(ours[0], caches().latent[name][0]), "the null block was written"


def test_one_rank_launches_what_the_architecture_says(monkeypatch):
    launched = replace_kernels(monkeypatch)
    cuda(1)
    step = [name for name, _ in launched[: len(launched) // STEPS]]
    expected = []
    for i, kind in enumerate(KINDS):
        expected += ["attn_res.run", "projection.run", f"{kind}.run", "oproj.run", "attn_res.run"]
        expected += ["moe_front.run", "moe_front.run_topk", "experts.run", "moe_tail.run"] if i else []
    assert step == [*expected, "attn_res.run"]
    updates = [plan.config.update for name, plan in launched[: len(step)] if name == "oproj.run"]
    assert updates == ["add" if i % CLOSES else "write" for i in range(len(KINDS))]


@pytest.mark.parametrize("mailbox", [True, False])
def test_through_mailboxes_no_rank_reads_what_all_hold(monkeypatch, mailbox):
    """Rows of router and down-projection and columns of the up-projection are divided, and the tail sums in its own launch."""
    launched = replace_kernels(monkeypatch)
    cuda(2, mailbox)
    front, topk, tail = (
        [plan.config for name, plan in launched if name == wanted]
        for wanted in ("moe_front.run", "moe_front.run_topk", "moe_tail.run")
    )
    parts = 2 if mailbox else 1
    assert {(c.experts, c.latent, c.shared) for c in front} == {(8 // parts, 256 // parts, 64)}
    assert {(c.world, c.latent) for c in topk} == {(parts, 256 if mailbox else 0)}
    assert {(c.world, c.latent, c.pitch, c.normed) for c in tail} == {(parts, 256 // parts, 256 if mailbox else 0, mailbox)}
    assert ("all_reduce.run_norm" in dict(launched)) is mailbox and "all_reduce.run" not in dict(launched)


@pytest.mark.parametrize("posted", [len(SLOTS), len(SLOTS) - 1])
def test_what_is_posted_is_added_up_by_the_next_launch(monkeypatch, posted):
    """Up to so many tokens, behind every o_proj and every tail; a dense layer gives a tensor."""
    launched = replace_kernels(monkeypatch)
    cuda(2, mailbox=True, posted=posted)
    posts = [plan.config.posts for name, plan in launched if name in ("oproj.run", "moe_tail.run")]
    adds = [plan.config for name, plan in launched if name == "attn_res.run" and plan.config.world > 1]
    closing, ranks = len(KINDS) // CLOSES, 2
    if posted < len(SLOTS):
        assert not any(posts) and not adds
    else:
        assert all(posts) and len(adds) == len(posts)
        assert sum(c.replaces for c in adds) == ranks * STEPS * closing, "behind the o_proj of a layer that closes a block"


@pytest.mark.parametrize(("world", "mailbox"), [(1, False), (2, True)])
def test_every_kernel_is_known_before_it_runs(monkeypatch, world, mailbox):
    """`prepare` has asked for each kernel of a step: a capture finds it loaded."""
    launched = replace_kernels(monkeypatch)
    asked = []
    monkeypatch.setattr(cuda_executor, "compile_missing", lambda specs, arch, say: asked.extend(specs) or 0)
    cuda(world, mailbox)
    for _, plan in launched:
        specs = plan.specs.values() if isinstance(getattr(plan, "specs", None), dict) else getattr(plan, "specs", None)
        assert set(specs or (plan.spec,)) <= set(asked)


def test_views_are_stocks_memory_and_what_is_made_is_counted():
    model, kept = stock(weights())
    view = view_model(model, kept)
    for layer, theirs in zip(view.layers, model.layers, strict=True):
        ours, attention = layer.attention, theirs.self_attn
        packed = attention.in_proj_qkvgfab if hasattr(attention, "in_proj_qkvgfab") else attention.fused_qkv_a_g_proj
        assert ours.in_proj.data_ptr() == packed.weight.data_ptr()
        assert ours.o_proj.data_ptr() == attention.o_proj.weight.data_ptr()
    mla = view.layers[2].attention
    assert mla.w_uk.data_ptr() == model.layers[2].self_attn.W_UK_T.data_ptr()
    assert mla.w_uv.stride() == (256 * 512, 512, 1)
    assert view.prepared.bytes == 4 * (2 * len(KINDS) + 1) * view.hidden, "score rows and nothing else"
    model.layers[1].mlp_res_proj.weight.mul_(2)
    before = view.layers[1].mlp_mix.score.clone()
    view.prepared.rebuild()
    assert torch.equal(view.layers[1].mlp_mix.score, 2 * before)


def test_experts_are_kept_as_the_checkpoint_has_them():
    w = weights()
    model, kept = stock(w)
    ours, routed = kept[1].weights, model.layers[1].mlp.experts.routed_experts
    assert torch.equal(ours.w13, torch.cat([w["1.w1"], w["1.w3"]], 1)) and torch.equal(ours.w2, w["1.w2"])
    assert routed.w13_weight.dtype == torch.int32, "stock went on to repack"
    with pytest.raises(RuntimeError, match="expected one load of weights, found a second"):
        routed.quant_method.process_weights_after_loading(routed)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda m: setattr(m.layers[1].self_attn.f_b_proj, "weight", torch.zeros(256, 128)), "layer 1 attention: f_b"),
        (lambda m: setattr(m.layers[2].self_attn, "v_head_dim", 64), "layer 2 attention: expected nope"),
        (lambda m: setattr(m.layers[3].mlp_res_norm, "variance_epsilon", 1e-6), "layer 3: expected one epsilon"),
        (lambda m: setattr(m.layers[1].mlp.gate, "weight", m.layers[1].mlp.gate.weight.float()), "layer 1 experts: router"),
    ],
)
def test_another_layout_is_named(spoil, said):
    model, kept = stock(weights())
    spoil(model)
    with pytest.raises(LayoutError, match=said):
        view_model(model, kept)


def test_experts_that_cannot_be_kept_do_not_stop_the_load():
    model, kept = stock(weights())
    kept[1].weights = None
    routed = model.layers[1].mlp.experts.routed_experts
    routed.quant_method.process_weights_after_loading(routed)  # already repacked: int32
    with pytest.raises(LayoutError, match=r"layer 1 experts: .*w13_weight: expected the checkpoint's MXFP4"):
        view_model(model, kept)


# -- against the kernels' own parameters ----------------------------------------


class Launch:
    """A compiled kernel that checks its arguments as the generated launcher does, and launches nothing."""

    def __init__(self, spec: build.KernelSpec, done: list[str]) -> None:
        self.spec, self.done = spec, done

    def __call__(self, *args: torch.Tensor | int, stream: int | None = None) -> None:
        sizes: dict[str, int] = {}
        for param, tensor in zip(self.spec.params, args, strict=True):
            if param.access is build.SCALAR:
                assert isinstance(tensor, int)
                continue
            where = f"{self.spec.name}.{param.name}"
            assert tensor.dtype == build.DTYPES[param.dtype][1], f"{where}: {tensor.dtype}"
            assert not tensor.requires_grad and tensor.data_ptr() % param.align == 0, where
            strides = param.strides or build._row_major(param)
            dims = zip((*param.shape, *strides), (*tensor.shape, *tensor.stride()), strict=True)
            for at, (wanted, found) in enumerate(dims):
                if isinstance(wanted, build.Sym):
                    assert sizes.setdefault(wanted.name, found) == found and found % wanted.divisible_by == 0, where
                elif not (at >= tensor.dim() and tensor.shape[at - tensor.dim()] == 1):  # a stride nobody takes
                    assert wanted == found, f"{where}: expected {param.shape} {strides}, found {tensor.shape} {tensor.stride()}"
        self.done.append(self.spec.name)


@pytest.mark.parametrize(("world", "posted"), [(1, 0), (2, 0), (2, 64)])
@pytest.mark.parametrize("tokens", [1, 8, 16, 64])
def test_every_launch_fits_its_kernels_parameters(monkeypatch, tokens, world, posted):
    """The operators' own host halves, with the kernels behind them replaced."""
    done: list[str] = []
    launch = functools.cache(lambda spec, arch=None: Launch(spec, done))
    room, get = build.__name__.rpartition(".")[0], build.get
    for name, module in list(sys.modules.items()):
        if name.startswith(room) and getattr(module, "get", None) is get:
            monkeypatch.setattr(module, "get", launch)
    monkeypatch.setattr(cuda_executor, "compile_missing", lambda specs, arch, say: 0)
    experts.plan.cache_clear()
    model, kept = stock(weights(), 1, world) if world > 1 else stock(weights())
    bound = caches(BF16, world - 1, world)

    there = {"ranks": world, "mailbox": world > 1, "device": "cpu", "rank": world - 1, "posted": posted}
    run = Executor(view_model(model, kept), lambda: bound, {"layers.2": 2}, ARCH, **there)
    run.prepare([tokens])
    if world > 1:
        layout, zeros = Layout(world, run.words), functools.partial(torch.zeros, dtype=torch.int32)
        run.box = Box(world - 1, layout, zeros(layout.bytes // 4), torch.zeros(world, dtype=torch.int64), zeros(2))
    run.run(tokens, torch.zeros(tokens, run.model.hidden, dtype=BF16), step_tensors([1] * tokens, 5))
    experts.plan.cache_clear()
    received = done.count("bf16_attn_res_received")
    assert received == (2 * len(KINDS) - 1 if posted else 0), "behind every o_proj and all MoE layers"
    assert received == sum(name in ("bf16_oproj_posted", "bf16_tail_posted") for name in done)
    assert done.count("bf16_attn_res") == 2 * len(KINDS) + 1 - received and done.count("bf16_kda_decode") == KINDS.count("kda")
    assert sum(name.startswith("mxfp4") for name in done) == 2 * (len(KINDS) - 1)
