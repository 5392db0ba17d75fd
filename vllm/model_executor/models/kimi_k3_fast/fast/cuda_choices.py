"""Expert choices of the fast graph, imposed on stock's layers: what `model.moe.imposed` is on CPUs.

Where two experts nearly tie, rounding decides between them; either is right, and what follows differs by a whole expert. So a
step of stock's can be compared with the fast one only behind the same choices, and the choices by their scores. A captured graph
runs no Python: while stock's graphs are captured for checking, each layer's router gets a `_compute_routing` of the instance's
own, which is then taken away again. What it launches stays in the graph: it reads the fast side's ids from the executor's
buffers, which the fast replay before has filled, weighs them by stock's own logits, and keeps these logits. Nothing in it waits
for the host, and no rank asks another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..model import moe
from ..model.moe import Judged
from .cuda_views import Model, Moe


@dataclass
class Choice:
    """Of one layer. ids [64, k] int32: the fast side's, in its executor's buffer. logits [64, E] fp32: stock's, of its last
    replay. reached: a router of stock's was asked while its graph was made."""

    layer: int
    moe: Moe
    ids: torch.Tensor
    logits: torch.Tensor
    reached: bool = False

    def route(
        self,
        own: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        hidden: torch.Tensor,
        logits: torch.Tensor,
        *args: Any,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In the place of a router's `_compute_routing`, which is `own`: weights [T, k] fp32 and ids [T, k]. A row in which the
        fast side left no k different experts keeps stock's choice: a padded one, which holds zeros, and a faulty one, whose ids
        could lie outside every weight."""
        weights, chosen = own(hidden, logits, *args, **more)
        tokens = logits.shape[0]
        if tokens > self.ids.shape[0]:
            return weights, chosen  # no fast graph is as wide
        self.reached = True
        self.logits[:tokens].copy_(logits)
        ids, sound = self._sound(tokens)
        shares = moe.shares(torch.sigmoid(logits.float()), ids, self.moe.renormalise, self.moe.scaling)
        return torch.where(sound, shares, weights), torch.where(sound, ids.to(chosen.dtype), chosen)

    def judged(self, rows: torch.Tensor) -> Judged:
        """Scores [real, k] on stock's side; NaN where no k different experts were imposed. rows: [T] bool, the real ones."""
        ids, sound = self._sound(rows.shape[0])
        imposed, best = moe.judge(self.logits[: rows.shape[0]], self.moe.bias, ids)
        return Judged(imposed.masked_fill(~sound, torch.nan)[rows], best[rows])

    def _sound(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids int64 [T, k], zeros in rows that do not name k different experts, and which rows do: [T, 1]. Multiplied, not
        selected: a scalar on the host as an operand of `torch.where` would be copied to the device, which a capture forbids."""
        ids = self.ids[:tokens].long()
        ordered = ids.sort(dim=-1).values
        inside = (ordered[:, :1] >= 0) & (ordered[:, -1:] < self.logits.shape[1])
        sound = inside & (ordered.diff(dim=-1) > 0).all(dim=-1, keepdim=True)
        return ids * sound, sound


class Choices:
    """Of all MoE layers of a model, by the names that the shadow check has for them. ids: of the executor, by the identity of the
    layer's view. Takes 64 rows of logits for each layer."""

    def __init__(self, model: Model, ids: Mapping[int, torch.Tensor]) -> None:
        self.layers: dict[str, Choice] = {}
        for layer in model.layers:
            if isinstance(layer.mlp, Moe):
                held = ids[id(layer.mlp)]
                logits = torch.zeros(held.shape[0], layer.mlp.router.shape[0], device=held.device)
                self.layers[f"layers.{layer.index}.choice"] = Choice(layer.index, layer.mlp, held, logits)

    @property
    def depth(self) -> dict[str, int]:
        """Layers before each choice."""
        return {name: choice.layer for name, choice in self.layers.items()}

    @contextmanager
    def imposed(self) -> Iterator[None]:
        """While this lasts, stock's routers are captured with the fast side's choices."""
        try:
            for choice in self.layers.values():
                router = choice.moe.stock_router
                router._compute_routing = partial(choice.route, router._compute_routing)
            yield
        finally:
            for choice in self.layers.values():
                vars(choice.moe.stock_router).pop("_compute_routing", None)  # the class's own is seen again

    def check_reached(self) -> None:
        """Raises ValueError where a layer of stock's chose in another place than its router, so that nothing was imposed."""
        missed = [name for name, choice in self.layers.items() if not choice.reached]
        if missed:
            raise ValueError(
                f"shadow compares stock's step behind the fast path's experts: expected stock to ask the router of every layer, "
                f"found {len(missed)} that did not ({missed[0]}): their experts may be chosen in a kernel of their own. "
                "Leave `shadow` out of the settings."
            )

    def judged(self, rows: torch.Tensor) -> dict[str, Judged]:
        """After a replay of stock's graph: by name, `Choice.judged`."""
        return {name: choice.judged(rows) for name, choice in self.layers.items()}
