"""KDA in plain PyTorch: a decode step of all requests at once, and prompts: conv, gate, recurrence, gated norm, state in place.

Equations (per request and head, fp32; S is [V, K]):
    c = silu(conv4(x));  q = c_q / ||c_q|| / sqrt(d);  k = c_k / ||c_k||;  v = c_v
    g = lower_bound * sigmoid(exp(A_log) * (f_b f_a + dt_bias));  beta = sigmoid(b)
    S <- S diag(e^g);  S <- S + beta (v - S k) k^T;  o = S q;  y = rms_norm(o) * sigmoid(gate)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

L2_EPS = 1e-6  # under the root of the query and key norms
OUT_NORM_EPS = 1e-5  # of the gated norm; a constant of the architecture, not rms_norm_eps


@dataclass(frozen=True)
class Weights:
    """One layer's local weights: h heads of d channels.

    conv [3*h*d, 4] fp32, taps oldest first, rows q, k, v; f_b [h*d, r]; decay [h, 1] fp32 = exp(A_log); dt_bias [h, d] fp32;
    out_norm [d] fp32; lower_bound < 0.
    """

    conv: torch.Tensor
    f_b: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    out_norm: torch.Tensor
    lower_bound: float


def step(
    packed: torch.Tensor, conv_state: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, w: Weights, dtype: torch.dtype
) -> torch.Tensor:
    """Advance every row's state by one token.

    packed: [T, >= 4*h*d + r + h], the projection's output: q, k, v, gate, f_a, beta. conv_state: [slots, 3, 3*h*d], raw inputs,
    oldest first; state: [slots, h, d, d] fp32; both written in place. slots: [T] int64, distinct where positive; a row with
    slot <= 0 is padding: it writes nothing and its output is zero. Returns [T, h*d] in `dtype`.
    """
    tokens = packed.shape[0]
    heads, dim = w.dt_bias.shape
    width, rank = heads * dim, w.f_b.shape[1]
    live = slots > 0
    if not bool(live.all()):
        out = packed.new_zeros(tokens, width, dtype=dtype)
        if bool(live.any()):
            out[live] = step(packed[live], conv_state, state, slots[live], w, dtype)
        return out
    raw, gate, f_a, beta = packed.split([3 * width, width, rank, packed.shape[1] - 4 * width - rank], dim=1)
    beta = beta[:, :heads]

    window = torch.cat([conv_state[slots], raw.unsqueeze(1).to(conv_state.dtype)], dim=1)
    conv_state[slots] = window[:, 1:]
    mixed = F.silu((window.float() * w.conv.T).sum(1)).to(dtype).float().view(tokens, 3, heads, dim)
    q, k, v = mixed.unbind(1)
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * dim**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)

    z = F.linear(f_a, w.f_b).float().view(tokens, heads, dim) + w.dt_bias
    decay = torch.exp(w.lower_bound * torch.sigmoid(w.decay * z))
    now = state[slots]
    now *= decay.unsqueeze(2)
    error = v - torch.matmul(now, k.unsqueeze(-1)).squeeze(-1)
    now += (beta.float().sigmoid().unsqueeze(-1) * error).unsqueeze(-1) * k.unsqueeze(2)
    state[slots] = now
    out = torch.matmul(now, q.unsqueeze(-1)).squeeze(-1).to(dtype).float()

    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + OUT_NORM_EPS) * w.out_norm
    return (out.view(tokens, width) * gate.float().sigmoid()).to(dtype)


def prompt(
    packed: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    resumed: torch.Tensor,
    w: Weights,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Advance the states of R requests by their prompts' tokens: request r has the rows [starts[r], starts[r + 1]) of `packed`.

    slots: [R], as in `step`; starts: [R + 1] int64 from 0 to T; resumed: [R] bool, False where the slot holds another request's
    leavings and the states start from zero. The rest as in `step`, which takes here the k-th token of every request together.
    """
    out = packed.new_zeros(packed.shape[0], w.dt_bias.numel(), dtype=dtype)
    fresh = slots[~resumed & (slots > 0) & (starts[1:] > starts[:-1])]
    conv_state[fresh], state[fresh] = 0, 0
    for k in range(int(starts.diff().max()) if len(slots) else 0):
        rows = starts[:-1] + k
        now = rows < starts[1:]
        out[rows[now]] = step(packed[rows[now]], conv_state, state, slots[now].long(), w, dtype)
    return out
