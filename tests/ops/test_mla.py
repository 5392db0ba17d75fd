"""MLA decode: the reference against unabsorbed attention, every kernel's compilation, and the kernels on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from late_kernel import write_late
from ptx_machine import run as run_ptx
from torch import Tensor

from vllm.model_executor.models.kimi_k3_fast.ops import build, mla
from vllm.model_executor.models.kimi_k3_fast.ops.mla import reference

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "u8": torch.uint8}


def problem(config: mla.Config, lengths: list[int], device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
    """Inputs of one step. Every cached value that no request may see is NaN: the rest of the last pages and all unused pages."""
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    h, block, rank = config.heads, config.block_size, config.q_rank
    page_count = 1 + config.requests * config.pages
    made: dict[str, Tensor] = {
        "x": normal(config.tokens, config.columns).bfloat16(),
        "q_norm": (1 + 0.1 * normal(rank)).bfloat16(),
        "kv_norm": (1 + 0.1 * normal(mla.LATENT)).bfloat16(),
        "q_b": (normal(h * 192, rank) * 2 * rank**-0.5).bfloat16(),
        "scales": torch.tensor([0.75, 0.0625] if config.fp8 else [1.0, 1.0]),
    }
    kv_b = (normal(h, 256, mla.LATENT) * mla.LATENT**-0.5).bfloat16()
    table = (1 + torch.randperm(page_count - 1, generator=g)).view(config.requests, config.pages).int()
    page = torch.full((page_count, block * mla.ROW + 32), float("nan"))
    cache = page[:, : block * mla.ROW].view(page_count, block, mla.ROW)
    slots = torch.full((config.tokens,), -1, dtype=torch.int64)
    for request, length in enumerate(lengths):
        for position in range(length):
            cache[int(table[request, position // block]), position % block] = normal(mla.ROW)
        for i in range(config.queries):
            position = length - config.queries + i
            if position >= 0:
                slots[request * config.queries + i] = int(table[request, position // block]) * block + position % block
    page = (page / made["scales"][1]).to(torch.float8_e4m3fn).view(torch.uint8) if config.fp8 else page.bfloat16()
    made |= {
        "slot_mapping": slots,
        "table": table,
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "page": page,
        "kv_b": kv_b,
    }
    made = {name: tensor.to(device) for name, tensor in made.items()}
    made["cache"] = made.pop("page")[:, : block * mla.ROW].view(cache.shape)
    kv_b = made.pop("kv_b")
    made["w_uk"], made["w_uv"] = kv_b[:, :128], kv_b[:, 128:]
    return made


def numbers(cache: Tensor) -> Tensor:
    """The cached numbers, without scale."""
    return cache.view(torch.float8_e4m3fn).float() if cache.dtype == torch.uint8 else cache.float()


def expected(config: mla.Config, p: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Every stage's result on the CPU; `cache` is the cache with this step's rows written; scales are multiplied out.

    Float64 rounds nothing, whatever the cache's format. The plain form rounds to bf16 where the model does, and with an FP8 cache
    the query and the new rows to E4M3: its error is what that format costs PyTorch.
    """
    p = {name: tensor.cpu() for name, tensor in p.items()}
    q_scale, k_scale = (float(s) for s in p["scales"])
    query, rows = reference.query(p["x"], p["q_norm"], p["kv_norm"], p["q_b"], p["w_uk"], eps=config.norm_eps, dtype=dtype)
    if config.fp8 and dtype != torch.float64:
        query, rows = (reference.to_e4m3(t / scale) * scale for t, scale in ((query, q_scale), (rows, k_scale)))
    flat = (numbers(p["cache"]).to(dtype) * k_scale).reshape(-1, mla.ROW)
    for token, slot in enumerate(p["slot_mapping"].tolist()):
        if slot >= 0:
            flat[slot] = rows[token]
    cache = flat.view(p["cache"].shape)
    latent, lse = reference.attention(
        query, cache, p["table"], p["lengths"], queries=config.queries, scale=config.scale, dtype=dtype
    )
    y = reference.value(p["x"], latent, p["w_uv"], rank=config.q_rank, dtype=dtype)
    return {"query": query, "cache": cache, "latent": latent, "lse": lse, "y": y}


# -- the reference ---------------------------------------------------------------------------------------------------------------


def test_reference_against_attention_with_expanded_keys() -> None:
    """Absorbed attention equals ordinary attention over keys and values expanded from the latents."""
    config = mla.Config(2, 2, mla.columns(2, 256), 64, 3, queries=2, q_rank=256)
    p = problem(config, [70, 5])
    got = expected(config, p)
    x = p["x"].double()
    q_c = torch.nn.functional.rms_norm(x[:, :256], (256,), p["q_norm"].double(), config.norm_eps)
    q = (q_c @ p["q_b"].double().T).view(-1, 2, 192)
    for request, length in enumerate((70, 5)):
        pages = got["cache"][p["table"][request].long()].reshape(-1, mla.ROW)
        for i in range(2):
            token, rows = request * 2 + i, pages[: length - 1 + i]
            for head in range(2):
                k = torch.cat([rows[:, :512] @ p["w_uk"][head].double().T, rows[:, 512:]], dim=1)
                v = rows[:, :512] @ p["w_uv"][head].double().T
                out = torch.nn.functional.scaled_dot_product_attention(q[token, head][None], k, v, scale=192**-0.5)[0]
                gate = x[token, 256 + 576 + head * 128 : 256 + 576 + (head + 1) * 128]
                torch.testing.assert_close(
                    got["y"][token, head * 128 : (head + 1) * 128], out * gate.sigmoid(), rtol=1e-9, atol=1e-9
                )


def test_reference_merges_over_shards_by_log_sum_exp() -> None:
    """Two shards of a context, one of them empty for the second request, give the whole when weighed by their log-sum-exps."""
    config = mla.Config(2, 2, mla.columns(2, 256), 64, 2, q_rank=256)
    p = problem(config, [100, 64])
    query = torch.randn(2, 2, mla.ROW, dtype=torch.float64)
    cache = numbers(p["cache"]).double()
    whole, lse = reference.attention(query, cache, p["table"], p["lengths"])
    first = reference.attention(query, cache, p["table"][:, :1], torch.tensor([64, 64]))
    second = reference.attention(query, cache, p["table"][:, 1:], torch.tensor([36, 0]))
    assert torch.equal(second[1][1], torch.full((2,), -float("inf"), dtype=torch.float64)) and not second[0][1].any()
    merged = sum(part * torch.exp(part_lse - lse)[..., None] for part, part_lse in (first, second))
    torch.testing.assert_close(merged, whole, rtol=1e-12, atol=1e-12)


# -- plan and compilation --------------------------------------------------------------------------------------------------------


def test_refusals_say_what_was_expected() -> None:
    good = mla.Config(12, 1, mla.columns(12), 768, 16)
    assert mla.unavailable_reason(good, "sm_90a") is None
    assert "sm_80" in mla.unavailable_reason(good, "sm_80").detail
    for change in ({"columns": 3640}, {"queries": 9}, {"block_size": 16}, {"heads": 0}, {"q_rank": 1000}, {"pages": 0}):
        refusal = mla.unavailable_reason(dataclasses.replace(good, **change), "sm_90a")
        assert refusal is not None and "expected" in refusal.detail, change
    with pytest.raises(ValueError, match="columns"):
        mla.plan(dataclasses.replace(good, columns=8), "sm_90a", load=False)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_kernels_compile_without_spills(fp8: bool, arch: str, findings: Callable[[build.KernelSpec, str], list[str]]) -> None:
    config = mla.Config(2, 3, mla.columns(2, 256), 64, 4, queries=3, fp8=fp8, q_rank=256)
    plan = mla.plan(config, arch, load=False)
    assert plan.tactic.splits > 1 and len(plan.specs) == 5
    for spec in plan.specs.values():
        assert not findings(spec, arch), spec.name


# -- on a device -----------------------------------------------------------------------------------------------------------------


def scratch_of(plan: mla.Plan, device: str = "cuda") -> dict[str, Tensor]:
    """Scratch filled with NaN (0xff for bytes)."""
    made = {}
    for name, (shape, dtype) in plan.scratch_shapes().items():
        made[name] = torch.full(shape, 255 if dtype == "u8" else float("nan"), dtype=DTYPES[dtype], device=device)
    return made


def launch(plan: mla.Plan, p: dict[str, Tensor], y: Tensor, scratch: dict[str, Tensor]) -> None:
    """A whole step on the tensors of `problem`."""
    weights = mla.Weights(*(p[name] for name in mla.Weights._fields))
    mla.run(plan, p["x"], weights, mla.Context(*(p[name] for name in mla.Context._fields)), y, scratch)


def close(name: str, got: Tensor, want: Tensor, plain: Tensor) -> None:
    got, want, plain = got.double().cpu().flatten(), want.flatten(), plain.double().flatten()
    assert torch.equal(got.isnan(), want.isnan()), f"{name}: NaN where none is expected, or the reverse"
    assert torch.equal(got.isinf(), want.isinf()), name
    finite = want.isfinite()
    error, allowed, scale = (got - want)[finite].abs(), (plain - want)[finite].abs(), want[finite].abs().max()
    assert error.max() <= 2 * allowed.max() + 2e-6 * scale, (name, float(error.max()), float(allowed.max()))
    assert error.mean() <= 2 * allowed.mean() + 2e-7 * scale, (name, float(error.mean()), float(allowed.mean()))


def poisoned(config: mla.Config, device: str = "cuda") -> Tensor:
    return torch.full((config.tokens, config.heads * 128), float("nan"), dtype=torch.bfloat16, device=device)


def compare(
    config: mla.Config,
    p: dict[str, Tensor],
    y: Tensor,
    scratch: dict[str, Tensor],
    want: dict[str, Tensor],
    plain: dict[str, Tensor],
) -> None:
    """Each stage against float64: from the step's inputs, and once more from what the device made before it."""
    q_scale, k_scale = (float(s) for s in p["scales"])
    close("query", numbers(scratch["query"]) * q_scale, want["query"], plain["query"])
    close("cache", numbers(p["cache"]) * k_scale, want["cache"], plain["cache"])
    close("lse", scratch["lse"], want["lse"], plain["lse"])
    close("y", y, want["y"], plain["y"])

    # Attention alone, from the query and cache that the device made: nothing before it can hide or excuse an error.
    query = numbers(scratch["query"]).cpu()
    options = {"queries": config.queries, "scale": config.scale * q_scale * k_scale, "value_scale": k_scale}
    tensors = (query, numbers(p["cache"]).cpu(), p["table"].cpu(), p["lengths"].cpu())
    exact = reference.attention(*tensors, **options)
    coarse = reference.attention(*tensors, **options, dtype=torch.float32)
    close("latent", scratch["latent"], exact[0], coarse[0])
    close("lse", scratch["lse"], exact[1], coarse[1])
    latent = scratch["latent"].view(config.tokens, config.heads, -1).cpu()
    outputs = [
        reference.value(p["x"].cpu(), latent, p["w_uv"].cpu(), rank=config.q_rank, dtype=d)
        for d in (torch.float64, torch.float32)
    ]
    close("y", y, *outputs)


def check(config: mla.Config, p: dict[str, Tensor], tactic: mla.Tactic | None = None) -> None:
    """Run one step on `p` and compare."""
    want, plain = expected(config, p), expected(config, p, torch.float32)
    plan = mla.plan(config, build.device_arch(), tactic)
    scratch, y = scratch_of(plan), poisoned(config)
    launch(plan, p, y, scratch)
    torch.cuda.synchronize()
    compare(config, p, y, scratch, want, plain)


def emulate(plan: mla.Plan, p: dict[str, Tensor], y: Tensor, scratch: dict[str, Tensor]) -> None:
    """The step's kernels one after the other on a machine in software, each with the grid of its entry. q_b's plain product,
    `ops/projection`'s kernel, is taken by PyTorch."""
    c, splits = plan.config, plan.tactic.splits
    groups = lambda tokens: min(-(-c.tokens // tokens), 4)  # noqa: E731
    rows = c.tokens * c.heads
    grids = {
        "norms": (c.tokens,),
        "project": (c.heads * 12 + -(-c.tokens // 8), groups(8 if c.tokens <= 8 else 16)),
        "absorb": (c.heads * 8, groups(16)),
        "attend": (splits, -(-c.queries * c.heads // 16), c.requests),
        "merge": (rows, 4),
        "value": (c.heads * 8, groups(8)),
    }
    found = {**p, **scratch, "y": y}
    whole = {"latent": found["latent"][None], "lse": found["lse"][None]} if splits == 1 else {}
    for name, grid in grids.items():
        if name not in plan.specs:
            continue
        tensors, spec = {**found, **(whole if name == "attend" else {})}, plan.specs[name]
        run_ptx(spec, {param.name: tensors[param.name] for param in spec.params}, grid)
        if name == "norms":
            found["q"].copy_(torch.nn.functional.linear(found["normed"], p["q_b"]))


EMULATED = [  # config, lengths, tactic: an empty row and a page boundary; several queries with FP8; norms apart, also with FP8
    (mla.Config(1, 3, mla.columns(1, 256), 64, 2, q_rank=256), [70, 0, 128], mla.Tactic(3, 2)),
    (mla.Config(1, 1, mla.columns(1, 256), 64, 2, queries=3, fp8=True, q_rank=256), [66], mla.Tactic(1, 4)),
    (mla.Config(1, 17, mla.columns(1, 256), 64, 1, q_rank=256), [1 + i % 5 for i in range(17)], mla.Tactic(1, 2)),
    (mla.Config(1, 17, mla.columns(1, 256), 64, 1, fp8=True, q_rank=256), [1 + i % 5 for i in range(17)], mla.Tactic(2, 4)),
]


@pytest.mark.parametrize(("config", "lengths", "tactic"), EMULATED, ids=["split", "fp8-verify", "norms-apart", "fp8-apart"])
def test_ptx_against_float64(config: mla.Config, lengths: list[int], tactic: mla.Tactic) -> None:
    """The compiled kernels, poisoned scratch and output, NaN where the cache may not be read, threads in an order of chance."""
    p = problem(config, lengths)
    want, plain = expected(config, p), expected(config, p, torch.float32)
    plan = mla.plan(config, "sm_90a", tactic, load=False)
    scratch, y = scratch_of(plan, "cpu"), poisoned(config, "cpu")
    emulate(plan, p, y, scratch)
    compare(config, p, y, scratch, want, plain)


SHAPES = [
    # heads, lengths, block, queries: context 1, page and tile boundaries, an empty row between others, more heads than a
    # tensor-core tile
    (12, [1], 128, 1),
    (12, [640], 128, 1),
    (6, [63, 64, 65, 128, 129], 128, 1),
    (12, [1000, 0, 1, 257], 256, 1),
    (24, [130, 3], 128, 1),
    (12, [200, 0, 4], 128, 4),
    (6, [65], 64, 8),
]


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_against_float64(shape: tuple[int, list[int], int, int], fp8: bool) -> None:
    heads, lengths, block, queries = shape
    pages = max(2, -(-max(lengths) // block))
    config = mla.Config(heads, len(lengths), mla.columns(heads), block, pages, queries=queries, fp8=fp8)
    check(config, problem(config, lengths, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_every_tactic(fp8: bool) -> None:
    config = mla.Config(12, 2, mla.columns(12), 128, 8, fp8=fp8)
    for tactic in [*mla.tactics(config), mla.Tactic(7, 2), mla.Tactic(40, 3)]:
        check(config, problem(config, [1024, 300], "cuda"), tactic)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 17, 64])
def test_token_tiles_of_the_projections(tokens: int) -> None:
    config = mla.Config(6, tokens, mla.columns(6), 128, 2)
    check(config, problem(config, [1 + i % 130 for i in range(tokens)], "cuda"))


@pytest.mark.gpu
def test_scores_of_large_magnitude() -> None:
    config = mla.Config(12, 1, mla.columns(12), 128, 4)
    p = problem(config, [400], "cuda")
    p["q_b"].mul_(30)
    check(config, p)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_addresses_beyond_32_bits(fp8: bool) -> None:
    """Pages whose offset exceeds 2^32 elements: the sum of a page and its stride is taken in 64 bits."""
    config = mla.Config(6, 1, mla.columns(6), 128, 2, fp8=fp8)
    stride = 2**31 + 16
    if torch.cuda.mem_get_info()[0] < 5 * stride * (1 if fp8 else 2):
        pytest.skip("needs 22 GB of free device memory")
    p = problem(config, [200], "cuda")
    far = torch.empty(4 * stride, dtype=p["cache"].dtype, device="cuda")
    cache = far.as_strided(p["cache"].shape, (stride, mla.ROW, 1))
    cache.copy_(p["cache"])
    check(config, p | {"cache": cache})


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("size", [0.0, 1e-30])
def test_denormal_and_zero_inputs(size: float, fp8: bool) -> None:
    """Denormal cached latents, with inputs of zero, so that nothing larger hides them; and inputs whose squares vanish."""
    config = mla.Config(6, 2, mla.columns(6), 128, 2, fp8=fp8)
    p = problem(config, [200, 3], "cuda")
    p["x"].mul_(size)
    if fp8:
        p["cache"].copy_(torch.where((p["cache"] & 0x7F) < 0x7F, p["cache"] & 0x87, p["cache"]))  # exponent 0: denormals of E4M3
    else:
        p["cache"].mul_(1e-38)
    check(config, p)


@pytest.mark.gpu
def test_padded_rows_write_nothing() -> None:
    """Rows of a padded batch: no context, no cache row, inputs that are NaN."""
    config = mla.Config(6, 4, mla.columns(6), 128, 2)
    p = problem(config, [130, 0, 7, 0], "cuda")
    want, plain = expected(config, p), expected(config, p, torch.float32)
    before = p["cache"].clone()
    p["x"][1::2] = float("nan")
    plan = mla.plan(config, build.device_arch())
    scratch, y = scratch_of(plan), poisoned(config)
    launch(plan, p, y, scratch)
    torch.cuda.synchronize()
    close("y", y[::2], want["y"][::2], plain["y"][::2])
    latent = scratch["latent"].view(4, 6, -1)
    assert not latent[1::2].any() and (scratch["lse"].view(4, 6)[1::2] == -float("inf")).all()
    changed = (p["cache"].view(torch.int16) != before.view(torch.int16)).any(-1).nonzero().tolist()
    places = sorted([slot // 128, slot % 128] for slot in p["slot_mapping"].tolist() if slot >= 0)
    assert changed == places, "only the live rows' cache rows may change"


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_replay_of_alternating_widths(fp8: bool) -> None:
    """Two captured widths share buffers; pages, lengths and inputs change between replays; equal inputs, equal bits."""
    wide, narrow = (mla.Config(6, r, mla.columns(6), 128, 3, fp8=fp8) for r in (3, 1))
    buffers = problem(wide, [300, 2, 129], "cuda", seed=1)
    shared = {"cache", "q_norm", "kv_norm", "q_b", "w_uk", "w_uv", "scales"}
    views, graphs, scratches, y = {}, {}, {}, poisoned(wide)
    for c in (wide, narrow):
        plan = mla.plan(c, build.device_arch())
        views[c] = {name: tensor if name in shared else tensor[: c.requests] for name, tensor in buffers.items()}
        scratches[c] = scratch_of(plan)
        launch(plan, views[c], y[: c.tokens], scratches[c])
        torch.cuda.synchronize()
        graphs[c] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[c]):
            launch(plan, views[c], y[: c.tokens], scratches[c])
    steps = [(wide, [1, 384, 0]), (narrow, [128, 64, 1]), (wide, [300, 2, 129]), (narrow, [65, 0, 0])]
    for seed, (c, lengths) in enumerate(steps):
        fresh, bits = problem(wide, lengths, "cuda", seed=seed + 5), []
        for _ in range(2):
            for name in ("x", "slot_mapping", "table", "lengths", "cache"):
                buffers[name].copy_(fresh[name])
            want, plain = expected(c, views[c]), expected(c, views[c], torch.float32)
            for tensor in (y, *scratches[c].values()):
                tensor.fill_(255 if tensor.dtype == torch.uint8 else float("nan"))
            graphs[c].replay()
            torch.cuda.synchronize()
            compare(c, views[c], y[: c.tokens], scratches[c], want, plain)
            assert y[c.tokens :].isnan().all(), "the narrow graph wrote rows of the wide one"
            bits.append([t.clone().contiguous().view(torch.uint8) for t in (y, buffers["cache"], scratches[c]["lse"])])
        assert all(torch.equal(first, second) for first, second in zip(*bits, strict=True)), "a race: two replays differ"


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", ["x", "lengths", "table", "cache"])
def test_producer_that_writes_100_us_late(name: str, fp8: bool) -> None:
    """The kernel before lets the step start at once and writes an input 100 us later, over poison."""
    config = mla.Config(6, 3, mla.columns(6), 128, 2, fp8=fp8)
    p = problem(config, [200, 1, 130], "cuda", seed=3)
    p["cache"] = p["cache"].contiguous()
    want, plain = expected(config, p), expected(config, p, torch.float32)
    plan = mla.plan(config, build.device_arch())
    scratch, y = scratch_of(plan), poisoned(config)
    late = p[name].clone()
    launch(plan, {key: tensor.clone() for key, tensor in p.items()}, y.clone(), scratch)  # loads the code
    write_late(late, late.clone())
    for tensor in scratch.values():
        tensor.fill_(255 if tensor.dtype == torch.uint8 else float("nan"))
    p[name].fill_({torch.int32: 0, torch.uint8: 127}.get(p[name].dtype, float("nan")))
    torch.cuda.synchronize()
    write_late(late, p[name])
    launch(plan, p, y, scratch)
    torch.cuda.synchronize()
    compare(config, p, y, scratch, want, plain)
