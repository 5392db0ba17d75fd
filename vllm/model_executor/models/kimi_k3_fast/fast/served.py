"""The model class that vLLM serves on CPUs: the standard path's model, with the path of each step chosen and recorded."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from .. import settings
from ..guard import Mutation, current
from ..model.causal_lm import KimiK3ForCausalLM
from ..model.moe import SparseMoE, imposed
from ..model.platform import MUTATIONS
from ..scope import deployment
from . import replay, standard
from .metadata import bind_ranks
from .path import FastPath


class ServedKimiK3ForCausalLM(KimiK3ForCausalLM):
    """Kimi K3 with the fast path in front. Raises FastPathRequired before any weight is loaded where `require` cannot be kept."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        bind_ranks(current())
        layers = self.model.layers
        sparse = {f"layers.{i}.choice": layer.mlp for i, layer in enumerate(layers) if isinstance(layer.mlp, SparseMoE)}
        self.fast = FastPath(
            deployment.read(vllm_config),
            settings.load(vllm_config.additional_config),
            [(layer.self_attn.prefix, layer.self_attn) for layer in self.model.layers],
            lambda generation, group_of: standard.backbone(self, generation, group_of),
            [Mutation(*row) for row in vllm_config.additional_config.get(MUTATIONS, ())],
            self.compute_logits,
            replay.origin(vllm_config),
            lambda choices: imposed(sparse, choices),
        )

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
        **unused: object,
    ) -> torch.Tensor:
        """Token ids [T] (or embeddings [T, D]) -> hidden states [T, D] before the final norm."""
        ids = input_ids if inputs_embeds is None else None
        return self.fast.forward(ids, lambda *noise: self.forward_standard(input_ids, inputs_embeds, *noise))

    def forward_standard(
        self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None = None, nudge: float = 0.0, draw: int = 0
    ) -> torch.Tensor:
        """The same on the standard path, whatever was planned. nudge: relative size of noise on the embeddings, alike on all
        ranks; with a draw's number, which seeds it, also on what each attention and MLP gives."""
        assert input_ids is not None or inputs_embeds is not None
        embedded = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        if not nudge:
            return self.model(embedded)
        generator = torch.Generator().manual_seed(draw)

        def noisy(module: nn.Module | None, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return (output * (1 + nudge * torch.randn(output.shape, generator=generator))).to(output.dtype)

        places = [place for layer in self.model.layers for place in (layer.self_attn, layer.mlp)] if draw else []
        with ExitStack() as stack:
            for place in places:
                stack.callback(place.register_forward_hook(noisy).remove)
            return self.model(noisy(None, None, embedded))
