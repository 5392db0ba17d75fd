"""`K3Config`: every fact of a Kimi K3 or Kimi-Linear configuration that the model uses, read once and validated.

The Hugging Face config is an open bag of attributes, and most mistakes in it would surface as wrong numbers, not as errors. So it
is read in one place into a frozen dataclass, and everything wrong with it is reported together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

MLA_LATENT_NORM_EPS: Final[float | None] = None
"""Epsilon of the two MLA latent norms; None means `rms_norm_eps`, as in vLLM. transformers' kimi_linear uses 1e-6 there."""

KDA_OUTPUT_NORM_EPS: Final[float] = 1e-5
"""Epsilon of KDA's gated output norm: a constant of the released model, not `rms_norm_eps` (K3 has the same value in both)."""

MIN_GATE_LOWER_BOUND: Final[float] = -5.0
ACTIVATIONS: Final = ("silu", "situ")
MXFP4_FORMAT: Final = "mxfp4-pack-quantized"
MXFP4_GROUP: Final = 32


class ConfigError(ValueError):
    """The model configuration cannot be served. The message lists every problem found, each as expected, found, what to do."""


@dataclass(frozen=True)
class K3Config:
    """Kimi K3's (or Kimi-Linear's) text configuration. Layer indices are 0-based; sizes count elements over all ranks.

    `None` switches a feature off: `attn_res_block` (ordinary residuals), `latent_size` (experts at model width), `q_lora_rank`
    (full-rank query), `gate_lower_bound` (unbounded KDA decay), `num_experts` (dense layers only).
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    rms_norm_eps: float
    max_position_embeddings: int
    kda_layers: frozenset[int]
    # KDA
    kda_heads: int
    kda_head_dim: int
    conv_width: int
    full_rank_gate: bool
    gate_lower_bound: float | None
    # MLA
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_head_dim: int
    mla_output_gate: bool
    latent_norm_eps: float
    # feed-forward
    intermediate_size: int
    hidden_act: str
    situ_beta: float
    situ_linear_beta: float | None
    num_experts: int | None
    experts_per_token: int
    moe_intermediate_size: int
    num_shared_experts: int
    renormalize: bool
    routed_scaling_factor: float
    first_moe_layer: int
    moe_layer_freq: int
    latent_size: int | None
    latent_norm: bool
    mxfp4_experts: bool
    # residual stream and head
    attn_res_block: int | None
    num_mtp_layers: int
    logit_scale: float

    def is_kda(self, layer: int) -> bool:
        return layer in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        return self.num_experts is not None and layer >= self.first_moe_layer and layer % self.moe_layer_freq == 0

    @property
    def num_attn_res_blocks(self) -> int:
        """ceil(layers / block): how many closed blocks the final mixture sees."""
        return 0 if self.attn_res_block is None else -(-self.num_layers // self.attn_res_block)

    @property
    def expert_input_size(self) -> int:
        return self.latent_size if self.latent_size is not None else self.hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def mla_row_size(self) -> int:
        """Elements of one MLA cache row: the normalised latent, then the shared key part."""
        return self.kv_lora_rank + self.rope_dim

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Refuse a tensor-parallel size that does not divide what is sharded. Raises ConfigError with every reason."""
        sharded = {"linear_attn_config.num_heads": self.kda_heads, "num_attention_heads": self.num_heads}
        if any(not self.is_moe(i) for i in range(self.num_layers)):
            sharded["intermediate_size"] = self.intermediate_size
        if self.num_experts is not None:
            sharded["moe_intermediate_size"] = self.moe_intermediate_size
        problems = [
            f"{name}: expected a multiple of the tensor-parallel size {tp_size}, found {value}. Choose a size that divides it."
            for name, value in sharded.items()
            if value % tp_size
        ]
        if self.num_experts is not None and self.mxfp4_experts and not problems:
            width = self.moe_intermediate_size // tp_size
            if width % MXFP4_GROUP:
                problems.append(
                    f"moe_intermediate_size per rank must be a multiple of the MXFP4 group {MXFP4_GROUP}: found {width} with "
                    f"tensor-parallel size {tp_size}. Choose a smaller tensor-parallel size."
                )
        _raise_if(problems)

    @classmethod
    def from_hf(cls, hf_config: Any) -> K3Config:
        """Read and validate a Hugging Face config, given as an object or as the dict of config.json.

        A `kimi_k3` config is unwrapped to its `text_config`. Raises ConfigError listing every problem.
        """
        return _Reader(hf_config).read()


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise ConfigError("the model configuration cannot be served:\n" + "\n".join(f"  - {p}" for p in problems))


class _Reader:
    """Collects problems while it reads, so that the user sees all of them at once."""

    def __init__(self, hf_config: Any) -> None:
        text = _get(hf_config, "text_config")
        self.text = hf_config if text is None else text
        self.quantization = _get(self.text, "quantization_config") or _get(hf_config, "quantization_config")
        self.linear = _get(self.text, "linear_attn_config") or {}
        self.problems: list[str] = []

    def expect(self, condition: bool, name: str, expected: str, found: Any, action: str = "Correct it in config.json.") -> bool:
        if not condition:
            self.problems.append(f"{name}: expected {expected}, found {found!r}. {action}")
        return condition

    def integer(self, name: str, default: int | None = None, minimum: int = 1, source: Any = None) -> int:
        value: Any = _get(self.text if source is None else source, name)
        value = default if value is None else value
        label = name if source is None else f"linear_attn_config.{name}"
        good = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        self.expect(good, label, f"an integer >= {minimum}", value)
        return cast(int, value) if good else minimum

    def optional_integer(self, name: str) -> int | None:
        return None if _get(self.text, name) is None else self.integer(name)

    def positive(self, name: str, default: float | None) -> float:
        value: Any = _get(self.text, name)
        value = default if value is None else value
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        self.expect(good, name, "a positive number", value)
        return float(cast(float, value)) if good else 1.0

    def flag(self, name: str, default: bool, source: Any = None) -> bool:
        value = _get(self.text if source is None else source, name)
        value = default if value is None else value
        self.expect(isinstance(value, bool), name if source is None else f"linear_attn_config.{name}", "true or false", value)
        return bool(value)

    def choice(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        value = _get(self.text, name)
        value = default if value is None else value
        self.expect(value in allowed, name, " or ".join(repr(a) for a in allowed), value)
        return value

    def read(self) -> K3Config:
        num_layers = self.integer("num_hidden_layers", 32)
        num_experts = self.optional_integer("num_experts")
        latent_size = self.optional_integer("routed_expert_hidden_size")
        rms_norm_eps = self.positive("rms_norm_eps", 1e-6)
        linear_beta = _get(self.text, "activation_situ_linear_beta")
        config = K3Config(
            vocab_size=self.integer("vocab_size", 163840),
            hidden_size=self.integer("hidden_size", 4096),
            num_layers=num_layers,
            rms_norm_eps=rms_norm_eps,
            max_position_embeddings=self.integer("max_position_embeddings", 4096),
            kda_layers=self.layer_kinds(num_layers),
            kda_heads=self.integer("num_heads", source=self.linear),
            kda_head_dim=self.integer("head_dim", source=self.linear),
            conv_width=self.integer("short_conv_kernel_size", minimum=2, source=self.linear),
            full_rank_gate=self.flag("use_full_rank_gate", False, source=self.linear),
            gate_lower_bound=self.gate_lower_bound(),
            num_heads=self.integer("num_attention_heads", 32),
            q_lora_rank=self.optional_integer("q_lora_rank"),
            kv_lora_rank=self.integer("kv_lora_rank"),
            nope_dim=self.integer("qk_nope_head_dim"),
            rope_dim=self.integer("qk_rope_head_dim"),
            v_head_dim=self.integer("v_head_dim"),
            mla_output_gate=self.flag("mla_use_output_gate", False),
            latent_norm_eps=rms_norm_eps if MLA_LATENT_NORM_EPS is None else MLA_LATENT_NORM_EPS,
            intermediate_size=self.integer("intermediate_size", 11008),
            hidden_act=self.choice("hidden_act", "silu", ACTIVATIONS),
            situ_beta=self.positive("activation_situ_beta", 1.0),
            situ_linear_beta=None if linear_beta is None else self.positive("activation_situ_linear_beta", None),
            num_experts=num_experts,
            experts_per_token=self.integer("num_experts_per_token") if num_experts else 0,
            moe_intermediate_size=self.integer("moe_intermediate_size") if num_experts else 0,
            num_shared_experts=self.integer("num_shared_experts", 0, minimum=0),
            renormalize=self.flag("moe_renormalize", True),
            routed_scaling_factor=self.positive("routed_scaling_factor", 1.0),
            first_moe_layer=self.integer("first_k_dense_replace", 0, minimum=0),
            moe_layer_freq=self.integer("moe_layer_freq", 1),
            latent_size=latent_size,
            latent_norm=self.flag("latent_moe_use_norm", False),
            mxfp4_experts=self.mxfp4(num_experts),
            attn_res_block=self.optional_integer("attn_res_block_size"),
            num_mtp_layers=self.integer("num_nextn_predict_layers", 0, minimum=0),
            logit_scale=self.positive("logit_scale", 1.0),
        )
        self.check_together(config)
        _raise_if(self.problems)
        return config

    def layer_kinds(self, num_layers: int) -> frozenset[int]:
        """0-based KDA layers from the two 1-based lists, which must partition the layers."""
        kinds: dict[str, list[int]] = {}
        for name in ("kda_layers", "full_attn_layers"):
            value = _get(self.linear, name)
            good = isinstance(value, (list, tuple)) and all(isinstance(i, int) for i in value)
            self.expect(good, f"linear_attn_config.{name}", "a list of 1-based layer numbers", value)
            kinds[name] = list(value) if good else []
        kda, full = kinds["kda_layers"], kinds["full_attn_layers"]
        where = "linear_attn_config.kda_layers and full_attn_layers"
        everything = set(range(1, num_layers + 1))
        fix = "Every layer belongs to exactly one of the two lists."
        overlap = sorted(set(kda) & set(full))
        self.expect(not overlap, where, "no layer in both", overlap, fix)
        gap = sorted(everything - set(kda) - set(full))
        self.expect(not gap, where, f"all layers 1..{num_layers}", f"layers in neither: {gap}", fix)
        outside = sorted((set(kda) | set(full)) - everything)
        self.expect(not outside, where, f"layer numbers within 1..{num_layers}", outside, fix)
        return frozenset(i - 1 for i in kda)

    def gate_lower_bound(self) -> float | None:
        value = _get(self.linear, "gate_lower_bound")
        if value is None:
            return None
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        self.expect(
            number and MIN_GATE_LOWER_BOUND <= value < 0,
            "linear_attn_config.gate_lower_bound",
            f"null, or a number in [{MIN_GATE_LOWER_BOUND:g}, 0)",
            value,
            "It bounds KDA's log decay per token: zero or more would not decay, less overflows the chunk form.",
        )
        return float(value) if number else None

    def mxfp4(self, num_experts: int | None) -> bool:
        """Whether the routed experts are MXFP4. The only quantisation of the released checkpoint is this one."""
        quantization = self.quantization
        if not quantization:
            return False
        method, found_format = _get(quantization, "quant_method"), _get(quantization, "format")
        good = method in ("compressed-tensors", "mxfp4") and found_format == MXFP4_FORMAT
        self.expect(
            good,
            "quantization_config",
            f"quant_method 'compressed-tensors' with format {MXFP4_FORMAT!r}, or no quantization_config",
            {"quant_method": method, "format": found_format},
            "Other quantisations are not served by this model.",
        )
        for group in (_get(quantization, "config_groups") or {}).values():
            size = _get(_get(group, "weights") or {}, "group_size")
            self.expect(size == MXFP4_GROUP, "quantization_config group_size", str(MXFP4_GROUP), size)
        return good and num_experts is not None

    def check_together(self, c: K3Config) -> None:
        """Conditions that involve more than one field, and features of the family that this model does not have."""
        self.expect(
            _get(self.text, "mla_use_nope") is True,
            "mla_use_nope",
            "true",
            _get(self.text, "mla_use_nope"),
            "Kimi K3's MLA has no rotary embedding; a rotary model is served by stock vLLM.",
        )
        self.expect(not _get(self.text, "tie_word_embeddings"), "tie_word_embeddings", "false", True)
        if c.num_experts is None:
            return
        self.choice("moe_router_activation_func", "sigmoid", ("sigmoid",))
        self.choice("topk_method", "noaux_tc", ("noaux_tc",))
        groups = (_get(self.text, "num_expert_group") or 1, _get(self.text, "topk_group") or 1)
        self.expect(groups == (1, 1), "num_expert_group, topk_group", "1, 1", groups, "Grouped routing is not part of Kimi K3.")
        self.expect(
            c.experts_per_token <= c.num_experts,
            "num_experts_per_token",
            f"at most num_experts = {c.num_experts}",
            c.experts_per_token,
        )
        if c.latent_norm:
            self.expect(c.latent_size is not None, "latent_moe_use_norm", "false without routed_expert_hidden_size", True)
        if c.mxfp4_experts:
            for name, size in (("expert input size", c.expert_input_size), ("moe_intermediate_size", c.moe_intermediate_size)):
                self.expect(size % MXFP4_GROUP == 0, name, f"a multiple of the MXFP4 group {MXFP4_GROUP}", size)


def _get(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
