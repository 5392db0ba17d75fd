"""Routed MXFP4 experts: the reference against plain PyTorch, every kernel compiled, and on a GPU the kernels against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import bulk_machine
import pytest
import torch
from late_kernel import write_late

from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops import experts as op
from vllm.model_executor.models.kimi_k3_fast.ops.experts import humming, reference, torch_form
from vllm.model_executor.models.kimi_k3_fast.ops.situ.torch_form import situ
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

TINY = replace(op.SMALL, tokens=3, experts=8)
SCHEDULES = [op.PAIRS, op.GROUPED]


def make_weights(
    config: op.Config, device: str = "cpu", seed: int = 0, scales: tuple[int, int] = (118, 124)
) -> torch_form.Weights:
    """Random codes, so all nibbles occur; scales uniform in the given range."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator)

    e, length, width = config.experts, config.hidden, config.width
    return torch_form.Weights(
        draw(0, 256, e, 2 * width, length // 2),
        draw(*scales, e, 2 * width, length // 32),
        draw(0, 256, e, length, width // 2),
        draw(*scales, e, length, width // 32),
    )


def make_routing(
    config: op.Config, device: str = "cpu", seed: int = 0, num_tokens: int | None = None, experts: int | None = None
) -> op.Routing:
    """Distinct experts in a row, drawn from the first `experts`; weights that sum to one."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack(
        [torch.randperm(experts or config.experts, generator=generator)[: config.top_k] for _ in range(config.tokens)]
    )
    weights = torch.rand(config.tokens, config.top_k, generator=generator) + 0.05
    weights /= weights.sum(1, keepdim=True)
    return reference.group(
        config, chosen.int().to(device), weights.to(device), config.tokens if num_tokens is None else num_tokens
    )


def make_input(config: op.Config, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(config.tokens, config.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


# -- without a GPU ---------------------------------------------------------------------------------------------------------------


def test_the_reference_agrees_with_plain_pytorch_in_fp32() -> None:
    weights, routing, z = make_weights(TINY), make_routing(TINY), make_input(TINY)
    plain = torch_form.run(
        z.float(), routing.ids.long(), routing.weights, weights, lambda x: situ(x, TINY.beta, TINY.linear_beta)
    )
    torch.testing.assert_close(reference.experts(TINY, weights, z, routing).float(), plain, rtol=1e-4, atol=1e-4)


def test_every_code_and_scale_decodes_to_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)  # 16 rows of one group
    scales = torch.tensor([0, 1, 64, 100, 110, 118, 120, 122, 124, 126, 127, 128, 200, 254, 255, 3], dtype=torch.uint8).view(
        16, 1
    )
    found = reference.decode(codes, scales)
    for row in range(16):
        for byte in range(16):
            for half in (0, 1):
                nibble = (int(codes[row, byte]) >> 4 * half) & 15
                exponent, mantissa = nibble >> 1 & 3, nibble & 1
                value = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
                want = (-value if nibble & 8 else value) * 2.0 ** (int(scales[row]) - 127)
                got = float(found[row, 2 * byte + half])
                assert got == want or (int(scales[row]) == 255 and got != got)


def test_the_kernels_way_to_decode_is_exact() -> None:
    """Each word's nibbles as bits 15 and 11..9 of an fp16, by the kernel's two selects and four masks, are the values times
    2^-14.
    """
    generator = torch.Generator().manual_seed(0)
    word = torch.randint(0, 1 << 32, (4096,), generator=generator)

    def select(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a & 0x80808080) | (b & 0x7F7F7F7F)

    odd = select(word, word >> 3)
    even = select(word << 4 & 0xFFFFFFFF, word << 1 & 0xFFFFFFFF)
    for first, register in enumerate((even << 8, odd << 8, even, odd)):
        for half in (0, 1):
            bits = (register & 0x8E008E00) >> 16 * half & 0xFFFF
            value = torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.float16).double()
            nibble = word >> 4 * (first + 4 * half) & 15
            assert torch.equal(value * 2.0**14, torch.tensor(torch_form.E2M1, dtype=torch.float64)[nibble])


@pytest.mark.parametrize("groups", [4, 6, 12])
def test_one_product_keeps_four_scale_groups_apart(groups: int) -> None:
    """The round of the kernels for pairs, lane by lane: a lane reads a whole group, the token operand is zero where lane and
    column differ, so that column n of the product is group n mod 4. Groups behind the last one hold anything and count nothing.
    """
    generator = torch.Generator().manual_seed(groups)
    padded = (groups + 3) // 4 * 4
    codes = torch.randint(0, 256, (16, padded * 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 124, (16, padded), dtype=torch.uint8, generator=generator)
    token = torch.randn(padded * 32, dtype=torch.float64, generator=generator)
    values = torch.tensor(torch_form.E2M1, dtype=torch.float64)[torch.stack([codes & 15, codes >> 4], -1).flatten(1).int()]
    lane = torch.arange(32)
    row, quad = lane // 4, lane % 4
    sums = torch.zeros(32, 2, dtype=torch.float64)
    for turn in range(padded // 4):
        product = torch.zeros(16, 8, dtype=torch.float64)
        for word in range(4):
            for i in (0, 2):  # an instruction takes the columns (i, i + 4) and (i + 1, i + 5) of a word's eight
                a, b = torch.zeros(16, 16, dtype=torch.float64), torch.zeros(16, 8, dtype=torch.float64)
                group = turn * 4 + quad
                own = ((row % 4 == quad) & (group < groups)).double()
                for slot, column in ((0, i), (1, i + 4), (8, i + 1), (9, i + 5)):
                    place = group * 32 + word * 8 + column
                    a[row, 2 * quad + slot] = values[row, place]
                    a[row + 8, 2 * quad + slot] = values[row + 8, place]
                    b[2 * quad + slot, row] = own * token[place]
                product += a @ b
        for half in (0, 1):
            for i in (0, 1):
                group = turn * 4 + quad % 2 * 2 + i
                factor = torch.exp2(scales[row + 8 * half, group].double() - 127) * (group < groups)
                sums[:, half] += product[row + 8 * half, 2 * quad + i] * factor
    sums += sums[lane ^ 1]
    wanted = reference.decode(codes, scales)[:, : groups * 32] @ token[: groups * 32]
    for half in (0, 1):
        torch.testing.assert_close(sums[:, half], wanted[row + 8 * half])


def test_grouping_lists_every_pair_once_and_no_padded_row() -> None:
    config = replace(TINY, tokens=5)
    routing = make_routing(config, num_tokens=3)
    listed = []
    for expert in range(config.experts):
        members = routing.pairs[int(routing.offsets[expert]) : int(routing.offsets[expert + 1])].tolist()
        assert members == sorted(members)
        assert all(int(routing.ids.flatten()[pair]) == expert for pair in members)
        assert bool(members) == (expert in routing.active[: int(routing.num_active)])
        listed += members
    assert sorted(listed) == list(range(3 * config.top_k))


@pytest.mark.parametrize("tactic", SCHEDULES, ids=str)
@pytest.mark.parametrize("width", [64, 96])
def test_the_kernels_compile(
    findings: Callable[[build.KernelSpec, str], list[str]], arch: str, tactic: op.Tactic, width: int
) -> None:
    config = replace(op.SMALL, width=width)
    for spec in op.plan(config, arch, tactic, compiled=False).specs:
        assert not findings(spec, arch), spec


ON_MACHINE = op.Config(tokens=3, hidden=256, width=32, experts=6, top_k=2)
FEW = op.Tactic(grouped=False, split=2, teams=2, stages=3, ahead=1, height=16, warps=3, depth=2)
FEW_GROUPED = replace(op.GROUPED, split=4, stages=3, height=16, warps=3, depth=2, slots=2)


def play(
    config: op.Config,
    tactic: op.Tactic | op.PackedTactic,
    routing: op.Routing,
    live: int,
    stored: Callable[[torch_form.Weights], torch_form.Weights],
    rows: int,
) -> None:
    """The kernels of a tactic on the machine of the tests, held to float64. stored: the checkpoint's layout into the kernels'.
    rows: of the output that a block of w2 owns."""
    weights, z = make_weights(config), make_input(config)
    hidden, out = (torch.full(size, torch.nan).bfloat16() for size in ((config.pairs, config.width), z.shape))
    tensors = {**vars(stored(weights)), **vars(routing), "z": z, "hidden": hidden, "out": out}
    for spec in op.specs_for(config, tactic):
        blocks = 3 if spec.config.grid else config.hidden // rows
        small = replace(spec, config=replace(spec.config, grid=3 if spec.config.grid else 0))
        bulk_machine.run(small, {p.name: tensors[p.name] for p in spec.params}, (blocks,), seed=live)
    exact = reference.experts(config, weights, z, routing)
    plain = torch_form.run(
        z[:live], routing.ids[:live].long(), routing.weights[:live], weights, lambda x: situ(x, config.beta, config.linear_beta)
    )
    assert (out[live:] == 0).all()
    ours, theirs = ((x[:live].double() - exact[:live]).abs().max() for x in (out, plain))
    assert ours <= 2 * theirs, (float(ours), float(theirs))


@pytest.mark.parametrize(
    ("config", "tactic", "live", "meet"),
    [
        (ON_MACHINE, FEW, 2, None),  # a padded row
        (replace(ON_MACHINE, width=96), replace(FEW, teams=3, split=1, height=8, depth=1), 3, None),
        (replace(ON_MACHINE, tokens=4), FEW_GROUPED, 4, 3),  # experts with more tokens than slots
        (replace(ON_MACHINE, tokens=9), replace(FEW_GROUPED, padded=True, height=8), 9, 2),  # and than the matrix unit takes
    ],
    ids=["pairs", "three groups", "grouped", "gathered"],
)
def test_the_compiled_kernels_compute_the_reference(
    config: op.Config, tactic: op.Tactic, live: int, meet: int | None, fresh_store: build.Store
) -> None:
    """Their PTX, on the machine of the tests: w13 by a grid of three blocks, then w2; outputs are NaN before."""
    tactic = op.fitted(config, tactic)
    routing = make_routing(config, num_tokens=live, experts=meet)
    play(config, tactic, routing, live, lambda weights: weights, tactic.height)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 65}, "1 to 64 tokens"),
        ({"hidden": 3584 + 32}, "latent width"),
        ({"width": 48}, "expert width"),
        ({"top_k": 0}, "experts for each token"),
    ],
)
def test_a_shape_without_a_kernel_is_refused_with_what_was_expected(change: dict[str, int], words: str) -> None:
    config = replace(op.Config(tokens=8), **change)
    refusal = op.unavailable_reason(config, "sm_90a")
    assert refusal is not None and refusal.reason is Reason.OP_SHAPE and words in refusal.detail
    with pytest.raises(ValueError, match=words):
        op.plan(config, "sm_90a", compiled=False)


def test_an_architecture_without_a_kernel_is_refused() -> None:
    refusal = op.unavailable_reason(op.Config(tokens=8), "sm_80")
    assert refusal is not None and refusal.reason is Reason.OP_ARCH


@pytest.mark.parametrize("width", [384, 192])
@pytest.mark.parametrize("tokens", op.SERVED_TOKENS)
def test_every_tactic_divides_the_served_shapes(tokens: int, width: int) -> None:
    config = op.Config(tokens=tokens, width=width)
    assert op.unavailable_reason(config, "sm_90a") is None
    for tactic in op.tactics(config):
        assert op.fitted(config, tactic) == tactic
        assert config.hidden % tactic.height == 0 and config.hidden // (32 if tactic.grouped else 128) % tactic.split == 0
        assert tactic.stages >= 2 and tactic.depth >= 1 and tactic.split >= 2


def test_a_measured_tactic_serves_its_architecture_and_up_to_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    config = op.Config(tokens=8)
    wide, narrow = op.Tactic(grouped=False, warps=16, depth=1), op.Tactic(grouped=True, split=4, slots=2)
    shape = {name: getattr(config, name) for name in op.SHAPE}
    table = [{"arch": "sm_90a", **shape, "tokens": n, "tactic": asdict(t)} for n, t in ((64, narrow), (8, wide), (2, narrow))]
    monkeypatch.setattr(op, "_measured", lambda: table)
    for tokens, tactic in ((8, wide), (3, wide), (2, narrow), (9, narrow)):
        wanted = op.fitted(replace(config, tokens=tokens), tactic)
        assert op.chosen_tactic(replace(config, tokens=tokens), "sm_90a") == wanted
    for other, arch in ((config, "sm_100a"), (replace(config, width=192), "sm_90a"), (replace(config, experts=40), "sm_90a")):
        assert op.chosen_tactic(other, arch) == op.default_tactic(other)


def test_every_measured_tactic_fits_and_says_where_it_is_from() -> None:
    for row in op._measured():
        kind = op.PackedTactic if row["layout"] == op.HUMMING else op.Tactic
        config = op.Config(**{name: row[name] for name in op.SHAPE})
        assert op.fitted(config, kind(**row["tactic"])) == kind(**row["tactic"])
        assert row["arch"] in build.ARCHS and row["us"] > 0 and all(row[name] for name in ("gpu", "driver", "versions", "date"))


def test_scales_beyond_the_kernels_range_are_refused_when_loaded() -> None:
    scales = torch.full((2, 4), op.LARGEST_SCALE, dtype=torch.uint8)
    op.check_scales(scales, scales)
    scales[1, 2] = 255
    with pytest.raises(ValueError, match="found 255"):
        op.check_scales(scales)


# -- on a GPU --------------------------------------------------------------------------------------------------------------------


def poisoned(config: op.Config) -> tuple[op.Scratch, torch.Tensor]:
    """Buffers full of NaN: whatever a kernel forgets to write, or reads before it is written, shows."""

    def buffer(rows: int, columns: int) -> torch.Tensor:
        return torch.full((rows, columns), torch.nan, dtype=torch.bfloat16, device="cuda")

    return op.Scratch(buffer(config.pairs, config.width)), buffer(config.tokens, config.hidden)


EVERY = [*SCHEDULES, op.PACKED, op.PACKED_GROUPED]


def prepared(
    config: op.Config, tactic: op.Tactic | op.PackedTactic, weights: torch_form.Weights
) -> tuple[op.Plan, torch_form.Weights]:
    """The plan of a tactic, and the weights in the layout that it reads."""
    packed = isinstance(tactic, op.PackedTactic)
    config = replace(config, layout=op.HUMMING if packed else op.RAW)
    return op.plan(config, build.device_arch(), op.fitted(config, tactic)), humming.pack(weights) if packed else weights


def check(
    config: op.Config,
    tactic: op.Tactic | op.PackedTactic,
    weights: torch_form.Weights,
    z: torch.Tensor,
    routing: op.Routing,
) -> None:
    """The kernels' error against float64 is at most twice plain PyTorch's own; padded rows come out as zero."""
    plan, held = prepared(config, tactic, weights)
    scratch, out = poisoned(config)
    op.run(plan, held, z, routing, scratch, out)
    live = int(routing.num_tokens)
    assert torch.equal(out[live:], torch.zeros_like(out[live:]))
    if live == 0:
        return
    exact = reference.experts(config, weights, z, routing)[:live]
    plain = torch_form.run(
        z[:live], routing.ids[:live].long(), routing.weights[:live], weights, lambda x: situ(x, config.beta, config.linear_beta)
    )
    scale = exact.abs().max()
    ours, theirs = (((x[:live].double() - exact).abs() / scale) for x in (out, plain))
    assert torch.isfinite(out).all()
    assert ours.max() <= 2 * theirs.max() + 1e-6, (plan.tactic, float(ours.max()), float(theirs.max()))
    assert ours.pow(2).mean() <= 4 * theirs.pow(2).mean() + 1e-12


GPU_SHAPES = [
    op.SMALL,
    replace(op.SMALL, width=96, top_k=2),
    op.Config(tokens=4, experts=40),
    op.Config(tokens=4, experts=40, width=192),
]


@pytest.mark.gpu
@pytest.mark.parametrize("tactic", EVERY, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 33, 64])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=lambda c: f"L{c.hidden}I{c.width}")
def test_gpu_error_is_within_twice_pytorchs(shape: op.Config, tokens: int, tactic: op.Tactic | op.PackedTactic) -> None:
    config = replace(shape, tokens=tokens)
    if isinstance(tactic, op.PackedTactic) and config.width % 64:
        config = replace(config, width=128)
    check(config, tactic, make_weights(config, "cuda"), make_input(config, "cuda"), make_routing(config, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [384, 192])
@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_gpu_every_tactic_computes_the_same_thing(tokens: int, width: int) -> None:
    config = op.Config(tokens=tokens, width=width, experts=40)
    weights, z, routing = make_weights(config, "cuda"), make_input(config, "cuda"), make_routing(config, "cuda")
    for tactic in (*op.tactics(config), *op.tactics(replace(config, layout=op.HUMMING))):
        check(config, tactic, weights, z, routing)


@pytest.mark.gpu
@pytest.mark.parametrize("tactic", EVERY, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_gpu_padded_rows_are_zero_and_touch_nothing(num_tokens: int, tactic: op.Tactic | op.PackedTactic) -> None:
    config = replace(op.SMALL, tokens=8)
    routing = make_routing(config, "cuda", num_tokens=num_tokens)
    routing.ids[num_tokens:] = -1
    check(config, tactic, make_weights(config, "cuda"), make_input(config, "cuda"), routing)


@pytest.mark.gpu
@pytest.mark.parametrize("tactic", EVERY, ids=str)
def test_gpu_all_tokens_may_meet_in_the_same_experts(tactic: op.Tactic | op.PackedTactic) -> None:
    config = replace(op.SMALL, tokens=64)
    check(
        config,
        tactic,
        make_weights(config, "cuda"),
        make_input(config, "cuda"),
        make_routing(config, "cuda", experts=config.top_k),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tactic", EVERY, ids=str)
@pytest.mark.parametrize("scales", [(1, 4), (100, 129), (60, 129)])
def test_gpu_extreme_scales_are_exact(scales: tuple[int, int], tactic: op.Tactic | op.PackedTactic) -> None:
    config = replace(op.SMALL, tokens=4)
    check(config, tactic, make_weights(config, "cuda", scales=scales), make_input(config, "cuda"), make_routing(config, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("tactic", EVERY, ids=str)
def test_gpu_a_nan_scale_makes_its_rows_not_finite_and_no_others(tactic: op.Tactic | op.PackedTactic) -> None:
    config = replace(op.SMALL, tokens=2)
    weights, z, routing = make_weights(config, "cuda"), make_input(config, "cuda"), make_routing(config, "cuda")
    expert = int(routing.ids[0, 1])
    weights.s2[expert, 5] = 255
    plan, held = prepared(config, tactic, weights)
    scratch, out = poisoned(config)
    op.run(plan, held, z, routing, scratch, out)
    assert not torch.isfinite(out[0, 5]) and torch.isfinite(out[0, :5]).all() and torch.isfinite(out[0, 6:]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tactic", EVERY, ids=str)
def test_gpu_a_captured_graph_follows_new_inputs_and_repeats_bits(tactic: op.Tactic | op.PackedTactic) -> None:
    config = replace(op.SMALL, tokens=8)
    weights, z = make_weights(config, "cuda"), make_input(config, "cuda")
    routing = make_routing(config, "cuda")
    plan, held = prepared(config, tactic, weights)
    scratch, out = poisoned(config)
    op.run(plan, held, z, routing, scratch, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run(plan, held, z, routing, scratch, out)
    for seed in (1, 2, 3):
        fresh, tokens = make_routing(config, "cuda", seed=seed, num_tokens=8 - seed), make_input(config, "cuda", seed=seed)
        for name in ("ids", "weights", "num_tokens", "offsets", "pairs", "active", "num_active"):
            getattr(routing, name).copy_(getattr(fresh, name))
        z.copy_(tokens)
        results = []
        for _ in range(2):
            for buffer in (scratch.hidden, out):
                buffer.fill_(torch.nan)
            graph.replay()
            results.append(out.clone())
        assert torch.equal(*results)
        eager_scratch, eager = poisoned(config)
        op.run(plan, held, z, routing, eager_scratch, eager)
        assert torch.equal(results[0], eager)
        exact = reference.experts(config, weights, z, routing)
        assert torch.isfinite(results[0]).all()
        assert (results[0].double() - exact).abs().max() <= 0.02 * exact.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("magnitude", [1e-2, 1e5, 1e30])
@pytest.mark.parametrize("tactic", EVERY, ids=str)
def test_gpu_inputs_far_outside_fp16_keep_their_precision(tactic: op.Tactic | op.PackedTactic, magnitude: float) -> None:
    """The kernels multiply in fp16; every row of z comes with a power of two of its own."""
    config = replace(op.SMALL, tokens=12 if tactic.grouped else 3)
    z = (make_input(config, "cuda").double() * magnitude).bfloat16()
    check(config, tactic, make_weights(config, "cuda"), z, make_routing(config, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("tactic", EVERY, ids=str)
def test_gpu_kernels_wait_for_a_producer_that_is_late(tactic: op.Tactic | op.PackedTactic) -> None:
    """Each input in turn is poison until 100 us after w13 may start; w2, which reads some of them early, must find them too."""
    config = replace(op.SMALL, tokens=8)
    weights, z, routing = make_weights(config, "cuda"), make_input(config, "cuda"), make_routing(config, "cuda")
    plan, held = prepared(config, tactic, weights)
    scratch, wanted = poisoned(config)
    op.run(plan, held, z, routing, scratch, wanted)
    names = ("offsets", "pairs", "active", "num_active", "weights") if tactic.grouped else ("ids", "num_tokens", "weights")
    inputs = {"z": z, **{name: getattr(routing, name) for name in names}}
    for name, tensor in inputs.items():
        late, (scratch, out) = tensor.clone(), poisoned(config)
        write_late(late, late.clone())  # loads the code
        tensor.fill_(torch.nan if name == "z" else 0)
        torch.cuda.synchronize()
        write_late(late, tensor)
        op.run(plan, held, z, routing, scratch, out)
        torch.cuda.synchronize()
        assert torch.equal(out, wanted), name
