"""Kimi Delta Attention for training: a chunk form in plain PyTorch, its token-by-token definition, and an optional Triton
backend.

Per head, with state S [K, V], key k, query q, value v, log decay g (one per key channel, in [-5, 0)) and step size beta:
    S <- diag(e^g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q.
Within a chunk this is one unit-triangular solve. Decays are only ever used as differences from a reference inside the same
sub-chunk of 16 tokens, so no exponent exceeds 5 * 16 = 80 and float32 holds every factor.
"""

import os
import traceback
from collections.abc import Callable

import torch
from torch import Tensor

CHUNK, SUB = 64, 16

Kda = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The definition, one token at a time. q, k, g: [B, T, H, K]; v: [B, T, H, V]; beta: [B, T, H]; returns [B, T, H, V]."""
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1])
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None]
        u = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, ..., None]).sum(-2))
        state = state + k[:, t, ..., None] * u[..., None, :]
        out.append((state * q[:, t, ..., None]).sum(-2))
    return torch.stack(out, 1)


def kda_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """`kda_recurrent` in chunks of 64; any T; computes in float32 and returns v's dtype."""
    batch, length, heads, dim = q.shape
    dtype = v.dtype
    pad = -length % CHUNK

    # [B, T, H, ...] -> [B, H, n, C, ...]. Padded tokens have k = beta = g = 0 and change nothing.
    def chunks(x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, pad))
        return x.unflatten(1, (-1, CHUNK)).movedim(3, 1)

    q, k, v, g, beta = chunks(q), chunks(k), chunks(v), chunks(g), chunks(beta)[..., None]
    total = g.cumsum(-2)
    kk, qk = [], []
    for start in range(0, CHUNK, SUB):
        stop = start + SUB
        ref = total[..., start - 1 : start, :] if start else torch.zeros_like(total[..., :1, :])
        row = (total[..., start:stop, :] - ref).exp()
        cols = (k[..., :stop, :] * (ref - total[..., :stop, :]).exp()).transpose(-1, -2)
        kk.append(torch.nn.functional.pad((k[..., start:stop, :] * row) @ cols, (0, CHUNK - stop)))
        qk.append(torch.nn.functional.pad((q[..., start:stop, :] * row) @ cols, (0, CHUNK - stop)))
    decayed = total.exp()
    lower = beta * torch.cat(kk, -2).tril(-1)
    solved = torch.linalg.solve_triangular(lower, torch.cat((beta * v, beta * k * decayed), -1), upper=False, unitriangular=True)
    u0, w = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    within = torch.cat(qk, -2).tril()
    q_in = q * decayed
    last = total[..., -1:, :]
    k_out = (k * (last - total).exp()).transpose(-1, -2)
    keep = last.exp().transpose(-1, -2)

    state = q.new_zeros(batch, heads, dim, v.shape[-1])
    out = []
    for n in range(q.shape[2]):
        u = u0[:, :, n] - w[:, :, n] @ state
        out.append(q_in[:, :, n] @ state + within[:, :, n] @ u)
        state = keep[:, :, n] * state + k_out[:, :, n] @ u
    return torch.stack(out, 2).movedim(1, 3).flatten(1, 2)[:, :length].to(dtype)


def kda_triton() -> Kda:
    """`chunk_kda` of flash-linear-attention, with its autotuning cut to one configuration a kernel: tuning costs more than it
    returns in a run of minutes. Raises ImportError where the package is absent."""
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
    from triton.runtime.autotuner import Autotuner

    full_init = Autotuner.__init__

    def thin_init(self, fn, arg_names, configs, *args, **kwargs):
        best = sorted(configs or [], key=lambda c: (abs(c.num_warps - 4), c.num_stages))[:1]
        full_init(self, fn, arg_names, best, *args, **kwargs)

    Autotuner.__init__ = thin_init
    try:
        from fla.ops.kda import chunk_kda
    finally:
        Autotuner.__init__ = full_init

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return chunk_kda(q, k, v, g, beta, scale=1.0, safe_gate=True, lower_bound=-5.0)[0]

    return run


def pick_kda(device: str, dim: int) -> tuple[str, Kda]:
    """The Triton backend where it imports, runs forward and backward, and agrees with the PyTorch chunk form; else that form."""
    if device != "cuda":
        return "torch", kda_chunk
    try:
        fast = kda_triton()
        errors = disagreement(fast, device, dim)
        print("kda triton against torch, relative error:", {k: round(e, 5) for k, e in errors.items()}, flush=True)
        if max(errors.values()) < 0.1:  # rounding gives about 0.01; a wrong term gives about 1
            return "triton", fast
    except Exception:  # any failure of an optional backend means the same: use the other one, and say why
        traceback.print_exc()
    print("the PyTorch chunk form of kda runs", flush=True)
    return "torch", kda_chunk


def disagreement(fn: Kda, device: str, dim: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """Relative error (of norms) of `fn` in `dtype` against the chunk form in float32 on the same rounded inputs: of the output
    and of the gradient of each input."""
    gen = torch.Generator(device).manual_seed(0)
    shape = (2, 512, 2, dim)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=gen)

    q, k = (torch.nn.functional.normalize(draw(*shape), dim=-1) for _ in range(2))
    decay = -5 * torch.sigmoid(2 * draw(*shape) - 4)  # stays float32 on both sides
    inputs = [q.to(dtype), k.to(dtype), draw(*shape).to(dtype), decay, torch.sigmoid(draw(*shape[:3])).to(dtype)]
    cotangent = draw(*shape).to(dtype)
    results = []
    for form, cast in ((kda_chunk, torch.float32), (fn, None)):
        leaves = [x.detach().clone().to(cast or x.dtype).requires_grad_() for x in inputs]
        out = form(*leaves)
        grads = torch.autograd.grad(out, leaves, cotangent.to(out.dtype))
        results.append([out.detach().float(), *(g.float() for g in grads)])
    names = ("out", "dq", "dk", "dv", "dg", "dbeta")
    return {n: float((a - b).norm() / a.norm()) for n, a, b in zip(names, *results, strict=True)}
