"""The scope rules: each is a pure function `(Deployment, Settings) -> Refusal | None`, and every one of them is asked.

To allow something that is refused today, bring its evidence (a test on CPU, a recorded run on a GPU) and delete its rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..reasons import Reason, Refusal
from ..settings import Settings
from .deployment import K3_ARCHITECTURES, Deployment

Rule = Callable[[Deployment, Settings], Refusal | None]
RULES: list[Rule] = []


@dataclass(frozen=True)
class Evidence:
    """How far the recorded runs of a GPU architecture carry. docs/support.md shows it to readers, and
    `tests/scope/test_evidence.py` holds it, and the kernels, to `benchmarks/results/`.

    devices: their names. ranks: tensor-parallel sizes at which 64 clients were served for ten minutes, every eighth step audited
    and every sixteenth shadowed. most: of the model on one rank, the sizes up to which no measured point is slower than stock.
    """

    devices: tuple[str, ...]
    ranks: tuple[int, ...]
    most: Mapping[str, int]

    def missing(self, d: Deployment) -> list[str]:
        """What of a deployment they do not carry."""
        found = []
        if d.device not in self.devices:
            found.append(f"expected a run on {d.device}, found runs on {', '.join(self.devices)} alone")
        if d.tensor_parallel not in self.ranks:
            ranks = ", ".join(map(str, self.ranks))
            found.append(f"expected clients served for ten minutes at TP {d.tensor_parallel}, found that at TP {ranks} alone")
        for name, size in d.sizes:
            if size > self.most.get(name, size):
                found.append(f"expected {name} to {self.most[name]} on a rank, above which stock has been faster, found {size}")
        return found


CPUS = ("cpu",)
COMPILED_FOR = ("sm_90a", "sm_100a", "sm_103a")
EVIDENCE = {"sm_90a": Evidence(("NVIDIA H200",), (1,), {"MLA heads": 12, "expert width": 384})}
DTYPES = {"cpu": ("bfloat16", "float32"), "cuda": ("bfloat16",)}
CACHE_DTYPES = {"cpu": ("auto", "bfloat16", "float32"), "cuda": ("auto", "bfloat16")}
# Size of the model on one rank -> least, most, multiple of: what the C++ operators take, and PyTorch's forms of a few.
CPU_SIZES = {
    "KDA head width": (16, 256, 16),
    "KDA conv width": (4, 4, 1),
    "MLA heads": (1, 128, 1),
    "MLA key width": (1, 512, 1),
    "AttnRes sources": (1, 64, 1),
    "experts of a token": (1, 512, 1),
    "expert input": (32, 2**31, 32),
    "expert width": (32, 2**30, 32),
}
PYTORCH_SIZES = ("KDA conv width", "expert input", "expert width")
DECODE_GRAPHS = ("full", "full_decode_only", "full_and_piecewise")


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def refusals(deployment: Deployment, settings: Settings) -> tuple[Refusal, ...]:
    """All reasons for which this deployment cannot take the fast path, in the order of the rules; empty if it can."""
    return tuple(found for r in RULES if (found := r(deployment, settings)) is not None)


@rule
def mode(_: Deployment, settings: Settings) -> Refusal | None:
    return Refusal(Reason.MODE_OFF, "mode is 'off'") if settings.mode == "off" else None


@rule
def architecture(d: Deployment, _: Settings) -> Refusal | None:
    if d.architecture in K3_ARCHITECTURES:
        return None
    return Refusal(Reason.MODEL_NOT_K3, f"expected one of {', '.join(K3_ARCHITECTURES)}, found {d.architecture}")


@rule
def model_features(d: Deployment, _: Settings) -> Refusal | None:
    if not d.features:
        return None
    return Refusal(Reason.MODEL_FEATURES, f"expected Kimi K3's features, found {', '.join(d.features)}")


@rule
def device(d: Deployment, settings: Settings) -> Refusal | None:
    if d.device_arch in CPUS:
        return None
    if d.device_arch not in COMPILED_FOR:
        return Refusal(Reason.OP_ARCH, f"expected one of {', '.join(CPUS + COMPILED_FOR)}, found {d.device_arch}")
    known = EVIDENCE.get(d.device_arch)
    missing = known.missing(d) if known else [f"expected a run on {d.device_arch}, found that no kernel has run there"]
    if settings.allow_unvalidated or not missing:
        return None
    return Refusal(
        Reason.UNVALIDATED, f"{'; '.join(missing)} (see docs/support.md); `allow_unvalidated` takes the fast path all the same"
    )


@rule
def dtype(d: Deployment, _: Settings) -> Refusal | None:
    known = DTYPES.get(d.platform, DTYPES["cpu"])
    return None if d.dtype in known else Refusal(Reason.DTYPE, f"expected one of {', '.join(known)}, found {d.dtype}")


@rule
def cache_dtype(d: Deployment, _: Settings) -> Refusal | None:
    known = CACHE_DTYPES.get(d.platform, CACHE_DTYPES["cpu"])
    if d.kv_cache_dtype in known:
        return None
    return Refusal(Reason.CACHE_DTYPE, f"expected one of {', '.join(known)}, found {d.kv_cache_dtype}")


@rule
def runner(d: Deployment, _: Settings) -> Refusal | None:
    if d.platform != "cuda" or d.runner == "v2":
        return None
    return Refusal(Reason.RUNNER, f"expected the v2 model runner, found {d.runner}")


@rule
def cuda_graphs(d: Deployment, _: Settings) -> Refusal | None:
    if d.platform != "cuda" or d.cudagraph in DECODE_GRAPHS:
        return None
    return Refusal(Reason.CUDA_GRAPHS, f"expected a cudagraph_mode of {', '.join(DECODE_GRAPHS)}, found {d.cudagraph}")


@rule
def state_layout(d: Deployment, _: Settings) -> Refusal | None:
    if d.state_dtype in ("float32", "auto") and (d.platform != "cuda" or d.conv_layout == "SD"):
        return None
    return Refusal(Reason.STATE_LAYOUT, f"expected fp32 state and SD convolution state, found {d.state_dtype}, {d.conv_layout}")


@rule
def cpu_sizes(d: Deployment, settings: Settings) -> Refusal | None:
    """The C++ operators refuse other sizes at the step, which would end its requests."""
    if d.platform != "cpu":
        return None
    bounds = CPU_SIZES if settings.cpu_kernels != "torch" else {name: CPU_SIZES[name] for name in PYTORCH_SIZES}
    wrong = []
    for name, size in d.sizes:
        low, high, multiple = bounds.get(name, (size, size, 1))
        if not low <= size <= high or size % multiple:
            wrong.append(f"expected {name} from {low} to {high} and a multiple of {multiple}, found {size}")
    return Refusal(Reason.OP_SHAPE, "; ".join(wrong)) if wrong else None


@rule
def heads(d: Deployment, _: Settings) -> Refusal | None:
    if d.platform == "cuda" and d.tensor_parallel & (d.tensor_parallel - 1):
        return Refusal(Reason.OP_SHAPE, f"expected a power of two as TP size on GPUs, found {d.tensor_parallel}")
    if d.kda_heads % d.tensor_parallel == 0 and d.attention_heads % d.tensor_parallel == 0:
        return None
    return Refusal(
        Reason.OP_SHAPE, f"expected heads divisible by TP {d.tensor_parallel}, found KDA {d.kda_heads}, MLA {d.attention_heads}"
    )


def _feature(reason: Reason, found: Callable[[Deployment], str | None]) -> None:
    """A rule that refuses a feature for which there is no evidence yet; `found` says what was found, or None."""

    def refuse(d: Deployment, _: Settings) -> Refusal | None:
        detail = found(d)
        return Refusal(reason, detail) if detail else None

    refuse.__name__ = reason.code
    RULES.append(refuse)


def _above_one(name: str, size: int) -> str | None:
    return f"expected {name} 1, found {size}" if size > 1 else None


_feature(Reason.PIPELINE_PARALLEL, lambda d: _above_one("pipeline parallel size", d.pipeline_parallel))
_feature(Reason.DATA_PARALLEL, lambda d: _above_one("data parallel size", d.data_parallel))
_feature(
    Reason.CONTEXT_PARALLEL,
    lambda d: (
        _above_one("decode context parallel size", d.decode_context_parallel)
        or _above_one("prefill context parallel size", d.prefill_context_parallel)
    ),
)
_feature(Reason.EXPERT_PARALLEL, lambda d: "expert parallel is enabled" if d.expert_parallel else None)
_feature(Reason.EPLB, lambda d: "expert load balancing is enabled" if d.eplb else None)
_feature(Reason.DBO, lambda d: "dual-batch overlap is enabled" if d.dbo else None)
_feature(Reason.LORA, lambda d: "LoRA is enabled" if d.lora else None)
_feature(Reason.SPECULATION, lambda d: f"speculative method {d.speculation}" if d.speculation else None)
_feature(Reason.KV_CONNECTOR, lambda d: f"KV connector {d.kv_connector}" if d.kv_connector else None)
_feature(Reason.SLEEP_MODE, lambda d: "sleep mode is enabled" if d.sleep_mode else None)
_feature(Reason.PROMPT_EMBEDS, lambda d: "prompt embeddings are enabled" if d.prompt_embeds else None)
_feature(Reason.OPTIONS, lambda d: f"asked for {', '.join(d.options)}" if d.options else None)
_feature(Reason.OFFLOAD, lambda d: "weights are offloaded" if d.offload else None)
_feature(Reason.REPLAY_SSM, lambda d: "ReplaySSM is enabled" if d.replay_ssm else None)
