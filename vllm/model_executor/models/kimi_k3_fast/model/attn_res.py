"""AttnRes: K3's residual stream, a softmax mixture over closed blocks of layers instead of one running sum.

The stream keeps the bare sums: `blocks` (closed) and `prefix` (being accumulated). Before every attention and MLP the layer's
input is a mixture of them, weighted by a learned score of each.
"""

from __future__ import annotations

import torch
from torch import nn

from .config import K3Config
from .layers import RMSNorm, Slots, parameter, slot


def mix(sources: torch.Tensor, norm_weight: torch.Tensor, proj_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """sources [..., n, D] -> [..., D] in fp32 (float64 stays).

    logit_j = rsqrt(mean_d s_j^2 + eps) sum_d s_j[d] w_n[d] w_p[d], p = softmax(logit), result = sum_j p_j s_j with the raw s_j.
    A single source is returned as it is.
    """
    wide = sources.to(torch.promote_types(sources.dtype, torch.float32))
    if wide.shape[-2] == 1:
        return wide.squeeze(-2)
    score = norm_weight.to(wide.dtype) * proj_weight.to(wide.dtype).reshape(-1)
    logit = (wide @ score) * torch.rsqrt(wide.square().mean(dim=-1) + eps)
    return torch.einsum("...n,...nd->...d", torch.softmax(logit, dim=-1), wide)


class Mixer(nn.Module):
    """One learned mixture: a norm weight [D] and a projection [1, D], named `<stem>_norm` and `<stem>_proj` in the checkpoint."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.norm_weight = parameter(config.hidden_size)
        self.proj_weight = parameter(1, config.hidden_size)
        self.eps = config.rms_norm_eps

    def forward(self, sources: torch.Tensor) -> torch.Tensor:
        return mix(sources, self.norm_weight, self.proj_weight, self.eps)

    def slots(self, stem: str) -> Slots:
        yield f"{stem}_norm.weight", slot(self.norm_weight)
        yield f"{stem}_proj.weight", slot(self.proj_weight)


class AttnResStream:
    """The stream of one forward pass. `sources` [T, blocks + 1, D] holds the closed blocks and, after them, the prefix."""

    def __init__(self, embedding: torch.Tensor, config: K3Config) -> None:
        assert config.attn_res_block is not None
        self.block = config.attn_res_block
        self.closed = 0
        self.sources = embedding.new_empty(embedding.shape[0], config.num_attn_res_blocks + 1, embedding.shape[1])
        self.prefix = embedding
        self.delta: torch.Tensor | None = None

    def _current(self) -> torch.Tensor:
        self.sources[:, self.closed] = self.prefix
        return self.sources[:, : self.closed + 1]

    def _settle(self) -> None:
        if self.delta is not None:
            self.prefix, self.delta = self.prefix + self.delta, None

    def before_attention(self, layer: int, mixer: Mixer, norm: RMSNorm) -> torch.Tensor:
        """The attention input of `layer`, [T, D]. Adds the pending MLP output first."""
        self._settle()
        return norm(mixer(self._current()))

    def after_attention(self, layer: int, output: torch.Tensor, mixer: Mixer, norm: RMSNorm) -> torch.Tensor:
        """Account for the attention output and return the MLP input, [T, D].

        The first layer of a block closes the previous one: the prefix becomes a block and the accumulation starts anew.
        """
        if layer % self.block == 0:
            self.closed += 1  # the prefix already stands at this place
            self.prefix = output
        else:
            self.prefix = self.prefix + output
        return norm(mixer(self._current()))

    def after_mlp(self, output: torch.Tensor) -> None:
        self.delta = output

    def finish(self, mixer: Mixer, dtype: torch.dtype) -> torch.Tensor:
        """The model's hidden state [T, D]: a last mixture without a norm."""
        self._settle()
        return mixer(self._current()).to(dtype)
