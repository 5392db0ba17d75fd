"""Train the tiny Kimi K3 on generated retrieval and arithmetic, for a given number of minutes on one device.

    python train.py --minutes 9 --out OUT [--resume EARLIER_OUT --stage 4]

Learning rate and auxiliary loss are functions of the share of the time that has passed, so a run always ends annealed; the
curriculum goes on to longer rows as soon as those of the moment are learned. On CUDA a whole step (forward, backward, both
optimisers) is one captured graph per stage. Written to OUT: `checkpoint/` (released format), `resume.safetensors` (the experts
before quantisation and the auxiliary head; no optimiser state), `metrics.json` (held-out scores with the exported weights, loss
curve, seed, versions).
"""

import argparse
import json
import math
import multiprocessing as mp
import os
import platform
import subprocess
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

import model as model_module
import numpy as np
import tasks
import torch
import torch.nn.functional as F
import vocabulary as vb
from export import EXPERTS, load_checkpoint, save_checkpoint
from kda import kda_chunk, pick_kda
from model import TinyConfig, TinyK3, positions
from muon import Muon
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HELD_OUT_SEED = 2**31  # training rows come from seeds below it
AUX_SIZES = (len(vb.ORDINALS), len(vb.GENRES), len(vb.TOPICS), tasks.CONTENT_LENGTHS[1] + 1)
# What a token's loss counts, by class; each class is a mean over its tokens.
CLASS_WEIGHTS = {tasks.FRAME: 0.2, tasks.FIRST: 0.4, tasks.PIECE: 1.0, tasks.WORK: 0.4}
# The share of the time at which a stage is left even if its rows are not learned.
STAGE_ENDS = (0.5, 0.6, 0.7, 0.85, 9.0)

MICRO = TinyConfig(
    hidden_size=64, num_hidden_layers=4, full_attn_layers=(2, 4), kda_head_dim=32, num_attention_heads=2, q_lora_rank=32,
    kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, intermediate_size=128, num_experts=4,
    num_experts_per_token=2, moe_intermediate_size=32, routed_expert_hidden_size=32, attn_res_block_size=2, )  # fmt: skip


def produce(seed: int, unit: int, longest: int, stage, out) -> None:
    """A worker: batches for the stage of the moment, for ever; int16 [2 + labels, N]: tokens, targets, labels."""
    rng = np.random.default_rng(seed)
    while True:
        now = stage.value
        batch = tasks.training_batch(rng, now, unit, longest)
        out.put((now, batch.shapes, np.concatenate((batch.tokens[None], batch.target[None], batch.labels.T)).astype(np.int16)))


class AuxiliaryHead(nn.Module):
    """Reads which piece's which word a token is, or is to be followed by (ordinal, genre, topic, offset), off the input of a
    late attention layer. Only training sees it: once the word to be read and the place that reads it carry one label in one
    form, matching them is a small step, which the retrieval loss alone finds late or never."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, sum(AUX_SIZES))

    def forward(self, tapped: Tensor, labels: Tensor, replying: Tensor) -> Tensor:
        """tapped [N, D], labels int64 [4, N], replying bool [N]: mean over the parts, and over pieces and replies."""
        total = tapped.new_zeros((), dtype=torch.float32)
        for part, label in zip(self.proj(tapped.float()).split(AUX_SIZES, -1), labels, strict=True):
            each = F.cross_entropy(part, label, ignore_index=-1, reduction="none")
            for where in (replying, ~replying):
                where = where & (label >= 0)
                total = total + (each * where).sum() / where.sum().clamp_min(1)
        return total / (2 * len(AUX_SIZES))


def split_parameters(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """(hidden matrices for Muon, everything else for AdamW)."""
    matrices, rest = [], []
    for name, p in model.named_parameters():
        inside = (
            name.startswith("model.layers.") and "res_proj" not in name and "conv1d" not in name and "gate.weight" not in name
        )
        (matrices if inside and p.dim() >= 2 else rest).append(p)
    return matrices, rest


def held_out(kind: str, size: int, length: int, count: int) -> list[tasks.Row]:
    """Evaluation rows: `size` is the number of needles, or of steps."""
    rng = np.random.default_rng((HELD_OUT_SEED, sum(kind.encode()), size, length))
    if kind == "arithmetic":
        return [tasks.arithmetic_row(rng, size) for _ in range(count)]
    return [tasks.retrieval_row(rng, length, 1, size) for _ in range(count)]


@torch.no_grad()
def exact_match(model: TinyK3, rows: list[tasks.Row], length: int, device: str, tokens_at_once: int) -> tuple[float, float]:
    """Share of rows whose whole answer greedy decoding gives, and share of right answer tokens."""
    right, hits, total = 0, 0, 0
    per = max(1, tokens_at_once // length)
    for i in range(0, len(rows), per):
        part = rows[i : i + per]
        batch = tasks.lay_out([(length, part)])
        hidden, _, _ = model(torch.from_numpy(batch.tokens).to(device), positions(batch.shapes, device), batch.shapes)
        hidden = hidden.unflatten(0, (len(part), length))
        for row, states in zip(part, hidden, strict=True):
            lo, hi = row.answer
            guess = model.logits(states[lo - 1 : hi - 1]).argmax(-1).cpu()
            same = guess == torch.tensor(row.tokens[lo:hi])
            right, hits, total = right + bool(same.all()), hits + int(same.sum()), total + len(same)
    return right / len(rows), hits / total


def evaluate(model: TinyK3, device: str, count: int, longest: int, tokens_at_once: int) -> dict[str, dict[str, float]]:
    plan = [("retrieval", n, t) for t in (256, 512, 1024, 2048, 4096, 8192) for n in tasks.NEEDLES if t <= longest]
    plan += [("arithmetic", s, 1024) for s in (2, 8, 18)] if longest >= 1024 else [("arithmetic", 2, 256)]
    scores = {}
    for kind, size, length in plan:
        exact, per_token = exact_match(model, held_out(kind, size, length, count), length, device, tokens_at_once)
        name = f"{kind}_{size}needle_{length}" if kind == "retrieval" else f"{kind}_{size}steps"
        scores[name] = {"exact": round(exact, 4), "token": round(per_token, 5), "items": count}
    return scores


class Trainer:
    """The model, what updates it, and one step of both. `controls`: learning rates, the auxiliary loss's weight and the balance's
    rate as device scalars, so that a captured step follows them."""

    def __init__(self, model: TinyK3, aux: AuxiliaryHead, tap: int, matrix_lr: float, other_lr: float, device: str) -> None:
        self.model, self.aux, self.tap, self.device = model, aux, tap, device
        self.base = (matrix_lr, other_lr)
        self.lrs = [torch.zeros((), device=device) for _ in self.base]
        self.aux_weight, self.balance = torch.zeros((), device=device), torch.zeros((), device=device)
        matrices, self.rest = split_parameters(model)
        cuda = device == "cuda"
        self.optimizers = [
            Muon(matrices, self.lrs[0]),
            torch.optim.AdamW(
                [*self.rest, *aux.parameters()], self.lrs[1], betas=(0.9, 0.98), weight_decay=0.0, fused=True, capturable=cuda
            ),
        ]
        moe = [layer.block_sparse_moe for layer in model.model.layers if hasattr(layer, "block_sparse_moe")]
        self.biases = [m.gate.e_score_correction_bias for m in moe]
        self.class_weights = torch.tensor([CLASS_WEIGHTS.get(c, 0.0) for c in range(5)], device=device)
        # Sums since the last report: loss, auxiliary loss, busiest expert's load over the mean, steps; hits and tokens of each
        # class in each stretch.
        self.sums = torch.zeros(4, device=device)
        self.hits = torch.zeros(2, 4, 5, device=device)

    def set_controls(self, rate: float, aux_weight: float) -> None:
        for lr, base in zip(self.lrs, self.base, strict=True):
            lr.fill_(base * rate)
        self.aux_weight.fill_(aux_weight)
        self.balance.fill_(2e-3 * rate)

    def backward(self, packed: Tensor, position: Tensor, shapes: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        """Gradients, from none; returns logits, following tokens, classes [N, 5], loads, loss and auxiliary loss."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        tokens, target, *labels = packed.long().unbind()
        hidden, loads, tapped = self.model(tokens, position, shapes, self.tap)
        logits, following = self.model.logits(hidden), tokens.roll(-1)
        classes = (target[:, None] == torch.arange(5, device=self.device)).float()
        each = F.cross_entropy(logits, following, reduction="none")
        share = classes @ (self.class_weights / classes.sum(0).clamp_min(1))
        loss = (each * share).sum() / self.class_weights.sum()
        aux_loss = self.aux(tapped, labels, target != tasks.NOTHING)
        (loss + self.aux_weight * aux_loss).backward()
        return logits.detach(), following, classes, loads.detach(), loss.detach(), aux_loss.detach()

    def step(self, packed: Tensor, position: Tensor, shapes: list[tuple[int, int]]) -> None:
        logits, following, classes, loads, loss, aux_loss = self.backward(packed, position, shapes)
        nn.utils.clip_grad_norm_(self.rest, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for bias, load in zip(self.biases, loads, strict=True):  # without a loss: help starved experts, hinder crowded ones
                bias += self.balance * torch.sign(load.mean() - load)
            busiest = (loads.amax(-1) / loads.mean(-1)).max()
            self.sums += torch.stack((loss, aux_loss, busiest, torch.ones_like(busiest)))
            right = (logits.argmax(-1) == following).float()[:, None] * classes
            at = 0
            for i, (rows, length) in enumerate(shapes):
                part = slice(at, at + rows * length)
                self.hits[0, i] += right[part].sum(0)
                self.hits[1, i] += classes[part].sum(0)
                at += rows * length

    def warm_up(self, tokens: int) -> None:
        """Compile all that acts per token, forward and backward, with a stand-in for KDA: while another process compiles that."""
        real, self.model.kda = self.model.kda, lambda q, k, v, g, beta: v + q * k + g.to(v.dtype) * beta[..., None]
        shapes = [(tokens // 256, 256)]
        packed = torch.zeros(2 + len(AUX_SIZES), tokens, dtype=torch.int16, device=self.device)
        try:
            self.backward(packed, positions(shapes, self.device), shapes)
        finally:
            self.model.kda = real
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)

    def report(self, stage: int) -> dict[str, float | int]:
        """The means since the last report (synchronises)."""
        loss, aux_loss, busiest, steps = self.sums.tolist()
        hits, total = self.hits.tolist()
        self.sums.zero_()
        self.hits.zero_()
        share = [[h / n if n else None for h, n in zip(*pair, strict=True)] for pair in zip(hits, total, strict=True)]
        out = {"loss": loss / steps, "aux": aux_loss / steps, "busiest_expert": busiest / steps}
        out["frame"] = share[len(tasks.STAGES[stage]) - 1][tasks.FRAME]
        for i, (length, _) in enumerate(tasks.STAGES[stage]):
            out[f"first_{length}"], out[f"piece_{length}"] = share[i][tasks.FIRST], share[i][tasks.PIECE]
        out["arithmetic"] = share[len(tasks.STAGES[stage])][tasks.WORK]
        return {k: round(v, 4) for k, v in out.items() if v is not None}


class GraphedSteps:
    """Steps of a trainer, on CUDA replayed from one captured graph per shape; the first steps of a shape run eagerly, which
    compiles and loads its kernels. A failed capture is printed and everything stays eager."""

    EAGER = 3

    def __init__(self, trainer: Trainer, unit_tokens: int, enabled: bool) -> None:
        self.trainer, self.enabled = trainer, enabled
        self.static = torch.zeros(2 + len(AUX_SIZES), unit_tokens, dtype=torch.int16, device=trainer.device)
        self.places: dict[tuple, Tensor] = {}
        self.runs: dict[tuple, int] = {}
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}

    def __call__(self, shapes: list[tuple[int, int]], packed: np.ndarray) -> None:
        key = tuple(shapes)
        batch = torch.from_numpy(packed)
        self.static.copy_(batch.pin_memory() if self.static.is_cuda else batch, non_blocking=True)
        if key not in self.places:
            self.places[key] = positions(shapes, self.static.device)
        self.runs[key] = self.runs.get(key, 0) + 1
        if self.enabled and key not in self.graphs and self.runs[key] > self.EAGER:
            self.capture(key)
        if key in self.graphs:
            self.graphs[key].replay()
        else:
            self.trainer.step(self.static, self.places[key], shapes)

    def capture(self, key: tuple) -> None:
        begun = time.monotonic()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                self.trainer.step(self.static, self.places[key], list(key))
            self.graphs[key] = graph
            print(f"captured a step of {key} in {time.monotonic() - begun:.1f} s", flush=True)
        except Exception:
            traceback.print_exc()
            print("capture failed; steps stay eager", flush=True)
            self.enabled = False
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True, help="wall time, evaluation and writing included")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="OUT of an earlier run, to start from its weights")
    parser.add_argument("--stage", type=int, default=0, help="stage of the curriculum to begin at (with --resume, say 3)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--unit", type=int, default=2048, help="an eighth of a step's tokens")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=max(1, min(13, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--matrix-lr", type=float, default=0.01)
    parser.add_argument("--other-lr", type=float, default=2e-3)
    parser.add_argument("--reserve", type=float, help="seconds kept for evaluation and writing")
    parser.add_argument("--micro", action="store_true", help="a model and rows small enough for a CPU")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--no-graphs", action="store_true", help="do not capture CUDA graphs")
    parser.add_argument("--profile-steps", type=int, default=0, help="stop after this many steps and print where the time goes")
    args = parser.parse_args()
    begun = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cuda = device == "cuda"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    cfg = MICRO if args.micro else TinyConfig()
    if args.micro:
        args.unit, args.longest = min(args.unit, 256), min(args.longest, 256)
    args.out.mkdir(parents=True, exist_ok=True)

    # Workers are forked before CUDA starts.
    stage = mp.Value("i", args.stage)
    batches: mp.Queue = mp.Queue(maxsize=16)
    workers = [
        mp.Process(target=produce, args=(args.seed * 1000 + w, args.unit, args.longest, stage, batches), daemon=True)
        for w in range(args.workers)
    ]
    for w in workers:
        w.start()

    # The KDA kernels are compiled and checked in another process meanwhile; here they then come from the disk.
    check = f"import kda; kda.pick_kda('cuda', {cfg.kda_head_dim})"
    folder = Path(__file__).parent
    checking = subprocess.Popen([sys.executable, "-c", check], cwd=folder, stdout=subprocess.DEVNULL) if cuda else None
    model = TinyK3(cfg, kda_chunk, torch.bfloat16 if cuda else torch.float32).to(device)
    aux = AuxiliaryHead(cfg.hidden_size).to(device)
    if args.resume:
        load_all(model, aux, args.resume)
    tap = cfg.full_attn_layers[1] - 1  # what the second attention layer sees
    trainer = Trainer(model, aux, tap, args.matrix_lr, args.other_lr, device)
    compiled = cuda and not args.eager
    if compiled:
        try:
            model_module.compile_parts(True)
            trainer.warm_up(tasks.UNITS * args.unit)
            print(f"compiled after {time.monotonic() - begun:.1f} s", flush=True)
        except Exception:
            traceback.print_exc()
            print("compilation failed; continuing without", flush=True)
            compiled = False
            model_module.compile_parts(False)
    if checking:
        checking.wait()
    backend, kda = pick_kda(device, cfg.kda_head_dim)
    model.kda = kda
    print(f"{backend} kda after {time.monotonic() - begun:.1f} s", flush=True)
    steps = GraphedSteps(trainer, tasks.UNITS * args.unit, cuda and not args.no_graphs and not args.profile_steps)

    deadline = begun + args.minutes * 60 - (args.reserve or (40 if cuda else 5))
    started = None  # the clock of the schedule starts when the first step, compilation included, is through
    step, curve, mark, marked = 0, [], time.monotonic(), 0
    profiler = torch.profiler.profile() if args.profile_steps else nullcontext()
    if cuda:
        torch.cuda.synchronize()
    # One stream of our own for all steps: a graph cannot be captured on the default one.
    with torch.cuda.stream(torch.cuda.Stream()) if cuda else nullcontext():
        while time.monotonic() < deadline:
            batch_stage, shapes, packed = batches.get()
            if batch_stage != stage.value and step:
                continue
            if args.profile_steps and step == 20:
                profiler.__enter__()
            done = 0.0 if started is None else (time.monotonic() - started) / (deadline - started)
            rate = min(1.0, (step + 1) / 200) * min(1.0, 0.02 + (1 - done) / 0.5)
            trainer.set_controls(rate, 0.5 * max(0.1, min(1.0, 1.8 - 2 * done)))
            steps(shapes, packed)
            step += 1
            if started is None:
                trainer.report(batch_stage)
                started = mark = time.monotonic()
                marked = step
                print(f"compiled={compiled}, first step {started - begun:.1f} s after the start", flush=True)
            if args.profile_steps and step == args.profile_steps:
                profiler.__exit__(None, None, None)
                print(profiler.key_averages().table(sort_by="cuda_time_total" if cuda else "cpu_time_total", row_limit=40))
                sys.exit(0)
            if step % (100 if cuda else 20):
                continue
            point = {"step": step, "progress": round(done, 4), "stage": batch_stage, **trainer.report(batch_stage)}
            now = time.monotonic()
            point |= {
                "seconds": round(now - begun),
                "steps_per_s": round((step - marked) / (now - mark), 2),
                "queue": batches.qsize(),
            }
            mark, marked = now, step
            curve.append(point)
            print(json.dumps(point), flush=True)
            if not math.isfinite(point["loss"]):
                raise RuntimeError(f"the loss is {point['loss']} at step {step}; lower --matrix-lr or --other-lr and start again")
            length = tasks.STAGES[batch_stage][-1][0]
            enough = 0.93 if length < 4096 else 0.985
            learned = point[f"piece_{length}"] > enough and point[f"first_{length}"] > enough
            if batch_stage + 1 < len(tasks.STAGES) and length < args.longest and (learned or done > STAGE_ENDS[batch_stage]):
                stage.value = batch_stage + 1
            if step % 2000 == 0:
                save_all(model, aux, args.out, {"seed": str(args.seed), "steps": str(step)})

    if cuda:
        torch.cuda.synchronize()
    for w in workers:
        w.terminate()
    size = save_all(model, aux, args.out, {"seed": str(args.seed), "steps": str(step)})
    # Scores are of the exported weights in a fresh, uncompiled model.
    model_module.compile_parts(False)
    final = TinyK3(cfg, kda if cuda else kda_chunk, model.dtype)
    load_checkpoint(args.out / "checkpoint", cfg, final)
    scores = evaluate(final.to(device), device, 128 if cuda else 16, args.longest, 2 ** (17 if cuda else 13))
    metrics = {
        "scores": scores, "weights_bytes": size, "steps": step, "tokens": step * tasks.UNITS * args.unit, "seed": args.seed,
        "minutes": round((time.monotonic() - begun) / 60, 2), "kda_backend": backend, "compiled": compiled,
        "resumed_from": args.resume.name if args.resume else None,
        "arguments": {k: v.name if isinstance(v, Path) else str(v) for k, v in vars(args).items()},
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__, "python": platform.python_version(), "curve": curve,
    }  # fmt: skip
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    print(json.dumps(scores, indent=1), f"{size} bytes of weights, {step} steps", sep="\n", flush=True)


def save_all(model: TinyK3, aux: nn.Module, folder: Path, metadata: dict[str, str]) -> int:
    """The released checkpoint, and beside it what a resumed run needs more: the experts before quantisation and the auxiliary
    head."""
    size = save_checkpoint(model, folder / "checkpoint", metadata)
    tensors = {k: v for k, v in model.state_dict().items() if EXPERTS in k} | {f"aux.{k}": v for k, v in aux.state_dict().items()}
    save_file({k: v.detach().to(torch.bfloat16).cpu().contiguous() for k, v in tensors.items()}, folder / "resume.safetensors")
    return size


def load_all(model: TinyK3, aux: nn.Module, folder: Path) -> None:
    load_checkpoint(folder / "checkpoint", model.cfg, model)
    tensors = {k: v.float() for k, v in load_file(folder / "resume.safetensors").items()}
    head = {k.removeprefix("aux."): tensors.pop(k) for k in list(tensors) if k.startswith("aux.")}
    if all(head[k].shape == v.shape for k, v in aux.state_dict().items()):
        aux.load_state_dict(head)
    else:
        print("the auxiliary head of the earlier run reads other labels; starting a new one", flush=True)
    model.load_state_dict(tensors, strict=False)


if __name__ == "__main__":
    main()
