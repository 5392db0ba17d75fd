"""The whole model in float64, token by token, from the equations alone: no caches, no chunks, nothing shared with the package.

Weights are a checkpoint's tensors under their released names. It is the yardstick of the numeric tests and of the engine tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def decode_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, half = packed.shape
    out = torch.empty(rows, 2 * half, dtype=torch.float64)
    values = torch.tensor(E2M1 + [-v for v in E2M1], dtype=torch.float64)
    out[:, 0::2] = values[(packed % 16).long()]
    out[:, 1::2] = values[(packed // 16).long()]
    return out * (2.0 ** (scale.double() - 127)).repeat_interleave(32, dim=1)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def situ(g: torch.Tensor, u: torch.Tensor, beta: float, linear_beta: float | None) -> torch.Tensor:
    up = u if linear_beta is None else linear_beta * (u / linear_beta).tanh()
    return beta * (g / beta).tanh() / (1 + (-g).exp()) * up


def mixture(sources: Sequence[torch.Tensor], norm: torch.Tensor, proj: torch.Tensor, eps: float) -> torch.Tensor:
    if len(sources) == 1:
        return sources[0]
    logits = [(s / (s.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm * proj).sum(-1, keepdim=True) for s in sources]
    weights = torch.cat(logits, -1).softmax(-1)
    return sum(weights[:, j : j + 1] * s for j, s in enumerate(sources))


class Reference:
    """`config` as in config.json, `tensors` as stored; `latent_eps` replaces the epsilon of the two MLA latent norms.

    In another `dtype` it shows PyTorch's own error: every operation rounds to it.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        *,
        latent_eps: float | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.dtype = dtype
        self.c = config
        self.raw = {name.removeprefix("language_model."): t for name, t in tensors.items()}
        self.eps = config["rms_norm_eps"]
        self.latent_eps = self.eps if latent_eps is None else latent_eps
        self.cache: dict[str, torch.Tensor] = {}

    def w(self, name: str) -> torch.Tensor:
        if name not in self.cache:
            stem = name.removesuffix(".weight")
            if f"{stem}.weight_packed" in self.raw:
                weight = decode_mxfp4(self.raw[f"{stem}.weight_packed"], self.raw[f"{stem}.weight_scale"])
            else:
                weight = self.raw[name]
            self.cache[name] = weight.to(self.dtype)
        return self.cache[name]

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[T, V] for one sequence."""
        c, layers = self.c, self.c["num_hidden_layers"]
        x = self.w("model.embed_tokens.weight")[torch.tensor(tokens)]
        size = c.get("attn_res_block_size")
        if size is None:
            for i in range(layers):
                x = x + self.attention(i, rms(x, self.w(f"model.layers.{i}.input_layernorm.weight"), self.eps))
                x = x + self.feed_forward(i, rms(x, self.w(f"model.layers.{i}.post_attention_layernorm.weight"), self.eps))
        else:
            blocks: list[torch.Tensor] = []
            for i in range(layers):
                name = f"model.layers.{i}."
                a = self.mix([*blocks, x], name + "self_attention_res")
                y = self.attention(i, rms(a, self.w(name + "input_layernorm.weight"), self.eps))
                if i % size == 0:
                    blocks.append(x)
                    x = y
                else:
                    x = x + y
                m = self.mix([*blocks, x], name + "mlp_res")
                x = x + self.feed_forward(i, rms(m, self.w(name + "post_attention_layernorm.weight"), self.eps))
            x = self.mix([*blocks, x], "model.output_attn_res")
        return rms(x, self.w("model.norm.weight"), self.eps) @ self.w("lm_head.weight").T

    def mix(self, sources: list[torch.Tensor], stem: str) -> torch.Tensor:
        return mixture(sources, self.w(stem + "_norm.weight"), self.w(stem + "_proj.weight")[0], self.eps)

    def attention(self, layer: int, a: torch.Tensor) -> torch.Tensor:
        kda = layer + 1 in self.c["linear_attn_config"]["kda_layers"]
        return (self.kda if kda else self.mla)(a, f"model.layers.{layer}.self_attn.")

    def kda(self, a: torch.Tensor, name: str) -> torch.Tensor:
        linear = self.c["linear_attn_config"]
        heads, d = linear["num_heads"], linear["head_dim"]

        def conv(part: str) -> torch.Tensor:
            x, taps = a @ self.w(f"{name}{part}_proj.weight").T, self.w(f"{name}{part}_conv1d.weight")[:, 0]
            padded = torch.cat((x.new_zeros(taps.shape[1] - 1, x.shape[1]), x))
            y = sum(padded[j : j + len(x)] * taps[:, j] for j in range(taps.shape[1]))
            return (y * torch.sigmoid(y)).view(len(x), heads, d)

        q, k, v = conv("q"), conv("k"), conv("v")
        q = q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() / math.sqrt(d)
        k = k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
        z = (a @ self.w(name + "f_a_proj.weight").T @ self.w(name + "f_b_proj.weight").T + self.w(name + "dt_bias")).view(
            -1, heads, d
        )
        rate = self.w(name + "A_log").flatten()[:heads].exp().view(1, heads, 1)
        bound = linear.get("gate_lower_bound")
        g = -rate * torch.log1p(z.exp()) if bound is None else bound * torch.sigmoid(rate * z)
        beta = torch.sigmoid(a @ self.w(name + "b_proj.weight").T)
        state = a.new_zeros(heads, d, d)  # [head, K, V]
        out = []
        rows = (x.unsqueeze(-2) for x in (q, k, v))  # a token's [head, 1, d]
        for query, key, value, decay, step in zip(*rows, g.exp().unsqueeze(-1), beta[..., None, None], strict=True):
            state = state * decay
            error = value - key @ state
            state = state + step * (key.mT * error)
            out.append((query @ state).squeeze(-2))
        gate_input = a @ self.w(name + "g_proj.weight").T if linear.get("use_full_rank_gate") else None
        if gate_input is None:
            gate_input = a @ self.w(name + "g_a_proj.weight").T @ self.w(name + "g_b_proj.weight").T
        y = rms(torch.stack(out), self.w(name + "o_norm.weight"), 1e-5) * torch.sigmoid(gate_input).view(-1, heads, d)
        return y.flatten(1) @ self.w(name + "o_proj.weight").T

    def mla(self, a: torch.Tensor, name: str) -> torch.Tensor:
        c = self.c
        heads, nope, rope, rank = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
        if c.get("q_lora_rank"):
            q = rms(a @ self.w(name + "q_a_proj.weight").T, self.w(name + "q_a_layernorm.weight"), self.latent_eps)
            q = q @ self.w(name + "q_b_proj.weight").T
        else:
            q = a @ self.w(name + "q_proj.weight").T
        q = q.view(len(a), heads, nope + rope)
        row = a @ self.w(name + "kv_a_proj_with_mqa.weight").T
        latent = rms(row[:, :rank], self.w(name + "kv_a_layernorm.weight"), self.latent_eps)
        kv = (latent @ self.w(name + "kv_b_proj.weight").T).view(len(a), heads, -1)
        key = torch.cat((kv[..., :nope], row[:, None, rank:].expand(-1, heads, -1)), -1)
        score = torch.einsum("thd,shd->hts", q, key) / math.sqrt(nope + rope)
        score = score + torch.full_like(score[0], float("-inf")).triu(1)
        y = torch.einsum("hts,shv->thv", score.softmax(-1), kv[..., nope:]).flatten(1)
        if c.get("mla_use_output_gate"):
            y = y * torch.sigmoid(a @ self.w(name + "g_proj.weight").T)
        return y @ self.w(name + "o_proj.weight").T

    def feed_forward(self, layer: int, m: torch.Tensor) -> torch.Tensor:
        moe = self.c.get("num_experts") and layer >= self.c["first_k_dense_replace"] and layer % self.c["moe_layer_freq"] == 0
        if not moe:
            return self.mlp(m, f"model.layers.{layer}.mlp.", ("gate_proj", "up_proj", "down_proj"))
        return self.moe(m, f"model.layers.{layer}.block_sparse_moe.")

    def mlp(self, m: torch.Tensor, name: str, parts: tuple[str, str, str]) -> torch.Tensor:
        gate, up, down = (self.w(f"{name}{part}.weight") for part in parts)
        g, u = m @ gate.T, m @ up.T
        if self.c["hidden_act"] == "situ":
            return situ(g, u, self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]) @ down.T
        return (g * torch.sigmoid(g) * u) @ down.T

    def moe(self, m: torch.Tensor, name: str) -> torch.Tensor:
        score = torch.sigmoid(m @ self.w(name + "gate.weight").T)
        chosen = score + self.w(name + "gate.e_score_correction_bias")
        latent = self.c.get("routed_expert_hidden_size") is not None
        z = m @ self.w(name + "routed_expert_down_proj.weight").T if latent else m
        best = (-chosen).argsort(dim=-1, stable=True)[:, : self.c["num_experts_per_token"]]  # of equals, the lower expert
        weights = torch.zeros_like(score).scatter(1, best, score.gather(1, best))
        if self.c["moe_renormalize"]:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * self.c["routed_scaling_factor"]
        outputs = (self.mlp(z, f"{name}experts.{e}.", ("w1", "w3", "w2")) for e in range(self.c["num_experts"]))
        r = sum(weights[:, e : e + 1] * y for e, y in enumerate(outputs))
        if self.c.get("latent_moe_use_norm"):
            r = rms(r, self.w(name + "routed_expert_norm.weight"), self.eps)
        if latent:
            r = r @ self.w(name + "routed_expert_up_proj.weight").T
        if self.c["num_shared_experts"]:
            r = r + self.mlp(m, name + "shared_experts.", ("gate_proj", "up_proj", "down_proj"))
        return r
