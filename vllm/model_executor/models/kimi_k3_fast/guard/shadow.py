"""Shadow: a fast step against the same step on the standard path, by what it returned and every state it wrote.

The bar is PyTorch's own error in the tensor's dtype. Each matrix product rounds its result; `own_error` measures by how much,
against float64 on the same rounded inputs. A tensor behind n such roundings may differ between two correct implementations by
the square root of n as much, times a margin. Some requests amplify what they are given (a near-cancellation, a steep gate): the
standard path run once more with its input changed by one such rounding shows by how much, row by row, and lifts the bar there.
One draw of that noise may miss what amplifies: where a near-tie hangs on a single number, chance makes a draw small, and some
places feel no noise on the input. So a step past its bar gets up to `DRAWS` more, with `NUDGES` roundings at every place.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..reasons import Reason

SCHEMA = 1
MARGIN = 3.0
NUDGES = 2.0  # a step's roundings at all places, in nudges of its input: measured 2.0 (fp32) and 1.4 (bfloat16) at most
DRAWS = 256
"""The fast side's own roundings are one more draw. Where rows amplify with a heavy tail (1 / x) it is past three times the
furthest of n others once in 3 (n + 1). Of the trained checkpoint in bfloat16 some nine steps in 150 of a busy server want any;
with 32 one was past its bar for which 8 draws of 200 would have done."""
ROUNDINGS_PER_LAYER = 4  # projection, recurrence or attention, output, feed-forward
KEPT_FILES = 8

Tensors = Mapping[str, torch.Tensor]


@cache
def own_error(dtype: torch.dtype, width: int = 1024) -> float:
    """Relative RMS error of one product [64, width] x [width, 64] in `dtype` on the CPU, against float64 on the same inputs."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(64, width, generator=generator).to(dtype)
    right = torch.randn(width, 64, generator=generator).to(dtype)
    exact = left.double() @ right.double()
    return relative_rms((left @ right).double(), exact)


def relative_rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    """sqrt(mean |found - expected|^2 / mean |expected|^2); infinite where only one of them is not finite."""
    return _distances(found[None], expected[None])[0]


@dataclass(frozen=True)
class Difference:
    """One tensor: the relative RMS distance of the row that is furthest for its bar, that bar, and whether it stays within."""

    name: str
    distance: float
    bar: float
    row: int

    @property
    def within(self) -> bool:
        return self.distance <= self.bar

    @property
    def ratio(self) -> float:
        """Above 1 it is a violation."""
        return self.distance / self.bar if self.bar else 0.0

    @property
    def kind(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def reason(self) -> Reason:
        """Of the violation, if it is one."""
        kinds = {"logits": Reason.SHADOW_LOGITS, "hidden": Reason.SHADOW_LOGITS, "choice": Reason.SHADOW_CHOICE}
        return kinds.get(self.kind, Reason.SHADOW_STATE)

    def __str__(self) -> str:
        return f"{self.name}: relative distance {self.distance:.3g}, bar {self.bar:.3g}"


def compare(
    fast: Tensors, standard: Tensors, depth: Mapping[str, int], nudged: Tensors | None = None, drawn: Tensors | None = None
) -> list[Difference]:
    """Every named tensor [rows, ...], row by row: a fault in one request must not drown in the others.

    depth: layers before the tensor (0: none). nudged: the standard side again from an input that `own_error` was added to; drawn:
    with `NUDGES` of it at every place. Raises ValueError unless both sides hold the same names and shapes.
    """
    if set(fast) != set(standard):
        raise ValueError(f"shadow: fast and standard hold different tensors: {sorted(set(fast) ^ set(standard))}")
    found = []
    for name, ours in fast.items():
        theirs = standard[name]
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise ValueError(
                f"shadow {name}: expected {theirs.dtype} {tuple(theirs.shape)}, found {ours.dtype} {tuple(ours.shape)}"
            )
        distances = _distances(ours, theirs)
        own = own_error(_computed_in(ours.dtype, fast))
        expected = own * math.sqrt(1 + ROUNDINGS_PER_LAYER * depth.get(name, 0))
        amplified = _distances(nudged[name], theirs) if nudged else [0.0] * len(distances)
        moved = _distances(drawn[name], theirs) if drawn else [0.0] * len(distances)
        bars = [MARGIN * max(expected, NUDGES * a, m) for a, m in zip(amplified, moved, strict=True)]
        row = max(range(len(distances)), key=lambda i: distances[i] / bars[i], default=None)
        found.append(Difference(name, distances[row], bars[row], row) if row is not None else Difference(name, 0.0, expected, 0))
    return found


def furthest(standard: Tensors, sides: Iterable[Tensors]) -> Iterator[dict[str, torch.Tensor]]:
    """After each of the sides: of every row of every tensor the one among them so far that is furthest from `standard`."""
    kept: dict[str, torch.Tensor] = {}
    for side in sides:
        for name, tensor in side.items():
            if name not in kept:
                kept[name] = tensor.clone()
                continue
            further = [new > old for new, old in zip(*(_distances(t, standard[name]) for t in (tensor, kept[name])), strict=True)]
            rows = torch.tensor(further, device=tensor.device)
            kept[name][rows] = tensor[rows]
        yield kept


def first_past(found: Sequence[Difference], depth: Mapping[str, int]) -> Difference | None:
    """The first tensor past its bar, in the order in which a step computes them: layer by layer its states, then its choice of
    experts, at the end the hidden states and the logits. Which is furthest past it depends on how the layers behind amplify."""
    late = {"choice": 1, "hidden": 2, "logits": 3}
    return min((d for d in found if not d.within), key=lambda d: (depth.get(d.name, 0), late.get(d.kind, 0)), default=None)


def _distances(ours: torch.Tensor, theirs: torch.Tensor) -> list[float]:
    """`relative_rms` of each row of [rows, ...]."""
    found, expected = _rows(ours), _rows(theirs)
    finite = torch.isfinite(expected)
    alike = (torch.isfinite(found) == finite).all(1)
    error = torch.where(finite, found - expected, 0.0).square().sum(1)
    scale = torch.where(finite, expected, 0.0).square().sum(1)
    distance = torch.where(error == 0.0, 0.0, (error / scale).sqrt())
    return torch.where(alike, distance, math.inf).tolist()


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float64).reshape(tensor.shape[0], math.prod(tensor.shape[1:]))


def _computed_in(dtype: torch.dtype, tensors: Tensors) -> torch.dtype:
    """FP32 state of a bfloat16 model carries the error of its bfloat16 inputs: the coarsest dtype of the step counts."""
    return max((dtype, *(t.dtype for t in tensors.values() if t.is_floating_point())), key=lambda d: torch.finfo(d).eps)


@dataclass(frozen=True)
class Step:
    """A saved step: what went in, what came out on both sides, and `origin`: which model, in which setting, it is a step of."""

    plan_key: str
    step: int
    inputs: dict[str, torch.Tensor]
    fast: dict[str, torch.Tensor]
    standard: dict[str, torch.Tensor]
    nudged: dict[str, torch.Tensor]
    depth: dict[str, int]
    settings: dict[str, Any]
    origin: dict[str, Any]
    drawn: dict[str, torch.Tensor] = field(default_factory=dict)

    def save(self, folder: Path) -> Path | None:
        """Write it as plain tensors; None once enough steps of this process are kept."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{os.getpid()}-{self.step}.pt"
        if len(list(folder.glob(f"step-{os.getpid()}-*.pt"))) >= KEPT_FILES:
            return None
        sides = {
            side: {name: tensor.detach().to("cpu").clone() for name, tensor in getattr(self, side).items()}
            for side in ("inputs", "fast", "standard", "nudged", "drawn")
        }
        torch.save({"schema": SCHEMA, **{**asdict_shallow(self), **sides}}, path)
        return path

    @classmethod
    def load(cls, path: Path) -> Step:
        """Read a saved step; tensors and plain values only. Raises ValueError for anything else."""
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            if saved.pop("schema") != SCHEMA:
                raise ValueError(f"expected schema {SCHEMA}")
            return cls(**saved)
        except (OSError, RuntimeError, KeyError, TypeError, ValueError, AttributeError, EOFError) as error:
            raise ValueError(f"{path}: expected a step saved by the shadow check: {error}") from None
        except Exception as error:  # the unpickler's own error type is not public
            raise ValueError(f"{path}: expected a step saved by the shadow check: {type(error).__name__}") from None


def asdict_shallow(step: Step) -> dict[str, Any]:
    return {name: getattr(step, name) for name in step.__dataclass_fields__}


@dataclass(frozen=True)
class Replay:
    """A saved step run again. `saved`: fast against standard as the server saw it; `again`: the same two anew; `reproduced`: the
    standard path anew against the server's, which tells whether this is the same model with the same inputs."""

    saved: list[Difference]
    again: list[Difference]
    reproduced: list[Difference]

    @property
    def within(self) -> bool:
        return all(difference.within for difference in (*self.again, *self.reproduced))


class Rerun(NamedTuple):
    """What the sides of a saved step come to on a loaded model; `reproduced` is the standard side with the discrete choices that
    the fast side made then, the others follow its choices of now."""

    fast: Tensors
    standard: Tensors
    nudged: Tensors
    drawn: Tensors
    reproduced: Tensors


def replay(path: Path, run: Callable[[Step], Rerun]) -> Replay:
    """Run a saved step again with `run`, and compare."""
    step = Step.load(path)
    now = run(step)
    return Replay(
        compare(step.fast, step.standard, step.depth, step.nudged, step.drawn),
        compare(now.fast, now.standard, step.depth, now.nudged, now.drawn),
        compare(now.reproduced, step.standard, step.depth, step.nudged, step.drawn),
    )


def folder_for(events_path: str) -> Path:
    """Where steps are saved: beside the event file, or in the system's temporary folder."""
    return Path(events_path).parent / "k3fast-steps" if events_path else Path(tempfile.gettempdir()) / "k3fast-steps"


def as_rows(found: list[Difference]) -> list[dict[str, Any]]:
    return [{**asdict(difference), "within": difference.within} for difference in found]
