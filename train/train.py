"""Train the tiny Kimi K3 on generated retrieval and arithmetic, for a given number of minutes on one device.

    python train.py --minutes 9 --out OUT [--resume EARLIER_OUT]

Everything scales with the clock: curriculum, learning rate and auxiliary loss are functions of the share of the time that has
passed, so a run always ends annealed. Written to OUT: `checkpoint/` (released format), `resume.safetensors` (the experts before
quantisation and the auxiliary head; no optimiser state), `metrics.json` (held-out scores with the exported weights, loss curve,
seed, versions).
"""

import argparse
import json
import math
import multiprocessing as mp
import os
import platform
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import tasks
import torch
import torch.nn.functional as F
import vocabulary as vb
from export import EXPERTS, load_checkpoint, save_checkpoint
from kda import kda_chunk, pick_kda
from model import Shapes, TinyConfig, TinyK3, positions
from muon import Muon
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HELD_OUT_SEED = 2**31  # training rows come from seeds below it
AUX_SIZES = (8, len(vb.GENRES), len(vb.TOPICS))

MICRO = TinyConfig(
    hidden_size=64, num_hidden_layers=4, full_attn_layers=(2, 4), kda_head_dim=32, num_attention_heads=2, q_lora_rank=32,
    kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, intermediate_size=128, num_experts=4,
    num_experts_per_token=2, moe_intermediate_size=32, routed_expert_hidden_size=32, attn_res_block_size=2, )  # fmt: skip


def produce(seed: int, stretch: int, longest: int, progress, out) -> None:
    """A worker: batches for the progress of the moment, for ever."""
    rng = np.random.default_rng(seed)
    while True:
        batch = tasks.training_batch(rng, progress.value, stretch, longest)
        out.put((batch.shapes, batch.tokens.astype(np.int16), batch.target, batch.labels.astype(np.int8)))


class AuxiliaryHead(nn.Module):
    """Reads which piece a token belongs to (ordinal, genre, topic) off a middle layer. Only training sees it: it makes the
    model learn to count recurrences early, which the retrieval loss alone teaches late."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, sum(AUX_SIZES))

    def forward(self, tapped: Tensor, labels: Tensor) -> Tensor:
        parts = self.proj(tapped.float()).split(AUX_SIZES, -1)
        return sum(F.cross_entropy(p, labels[:, i], ignore_index=-1) for i, p in enumerate(parts)) / len(AUX_SIZES)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True, help="wall time, evaluation and writing included")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="OUT of an earlier run, to start from its weights")
    parser.add_argument("--begin", type=float, default=0.0, help="progress to start the curriculum at (with --resume, say 0.5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stretch", type=int, default=16384, help="tokens of each of the four stretches of a step")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 3)))
    parser.add_argument("--matrix-lr", type=float, default=0.02)
    parser.add_argument("--other-lr", type=float, default=3e-3)
    parser.add_argument("--micro", action="store_true", help="a model and rows small enough for a CPU")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--profile-steps", type=int, default=0, help="stop after this many steps and print where the time goes")
    args = parser.parse_args()
    begun = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    cfg = MICRO if args.micro else TinyConfig()
    if args.micro:
        args.stretch, args.longest = min(args.stretch, 2048), min(args.longest, 256)
    args.out.mkdir(parents=True, exist_ok=True)

    # Workers are forked before CUDA starts.
    progress = mp.Value("d", args.begin)
    batches: mp.Queue = mp.Queue(maxsize=8)
    workers = [
        mp.Process(target=produce, args=(args.seed * 1000 + w, args.stretch, args.longest, progress, batches), daemon=True)
        for w in range(args.workers)
    ]
    for w in workers:
        w.start()

    backend, kda = pick_kda(device, cfg.kda_head_dim)
    model = TinyK3(cfg, kda, torch.bfloat16 if device == "cuda" else torch.float32).to(device)
    aux = AuxiliaryHead(cfg.hidden_size).to(device)
    if args.resume:
        load_all(model, aux, args.resume)
    matrices, rest = split_parameters(model)
    optimizers = [
        Muon(matrices, args.matrix_lr),
        torch.optim.AdamW([*rest, *aux.parameters()], args.other_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=device == "cuda"),
    ]
    base_lr = (args.matrix_lr, args.other_lr)
    eager_parts = {name: getattr(model, name) for name in ("_into_attention", "_mlp")}
    compiled = device == "cuda" and not args.eager
    if compiled:
        model.compile_parts()
    tap = cfg.full_attn_layers[0] + (0 if args.micro else 1)
    biases = [
        layer.block_sparse_moe.gate.e_score_correction_bias for layer in model.model.layers if hasattr(layer, "block_sparse_moe")
    ]

    def losses(shapes: Shapes, tokens: Tensor, target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden, loads, tapped = model(tokens, positions(shapes, device), shapes, tap)
        index = target.nonzero().squeeze(1)
        logits = model.logits(hidden[index])
        answers = tokens[index + 1]
        retrieval = index < 3 * args.stretch  # the last stretch is arithmetic
        right = (logits.detach().argmax(-1) == answers).float()
        accuracy = torch.stack([(right * part).sum() / part.sum() for part in (retrieval, ~retrieval)])
        return F.cross_entropy(logits, answers), aux(tapped, labels), loads, accuracy

    reserve = 45 if device == "cuda" else 5  # seconds kept for evaluation and writing
    deadline = begun + args.minutes * 60 - reserve
    started = None  # the clock of the schedule starts when the first step, compilation included, is through
    step, seen, curve, mark = 0, 0, [], time.monotonic()
    profiler = torch.profiler.profile() if args.profile_steps else nullcontext()
    while time.monotonic() < deadline:
        shapes, tokens, target, labels = batches.get()
        data = [torch.from_numpy(x).to(device, non_blocking=True) for x in (tokens, target, labels)]
        data[0], data[2] = data[0].long(), data[2].long()
        if args.profile_steps and step == 20:
            profiler.__enter__()
        now = time.monotonic()
        done = 0.0 if started is None else (now - started) / (deadline - started)
        progress.value = args.begin + (1 - args.begin) * done
        warm = min(1.0, (step + 1) / 100)
        rate = warm * (1.0 if done < 0.3 else 0.5 * (1 + math.cos(math.pi * min(1.0, (done - 0.3) / 0.7))) + 0.005)
        for optimizer, lr in zip(optimizers, base_lr, strict=True):
            optimizer.param_groups[0]["lr"] = lr * rate
        try:
            main_loss, aux_loss, loads, accuracy = losses(shapes, *data)
            (main_loss + 0.3 * max(0.0, 1 - progress.value / 0.8) * aux_loss).backward()
        except Exception as error:
            if step or not compiled:
                raise
            print(f"compilation failed ({type(error).__name__}: {str(error)[:300]}); continuing without", flush=True)
            compiled = False
            for name, fn in eager_parts.items():
                setattr(model, name, fn)
            for layer in model.model.layers:
                for name in ("before", "after"):
                    layer.self_attn.__dict__.pop(name, None)
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            continue
        nn.utils.clip_grad_norm_(rest, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():  # load balancing without a loss: raise the bias of starved experts, lower that of crowded ones
            for bias, load in zip(biases, loads, strict=True):
                bias += 2e-3 * rate * torch.sign(load.mean() - load)
        step, seen = step + 1, seen + tokens.size
        if started is None:
            main_loss.item()
            started = mark = time.monotonic()
            seen = 0
            print(f"{backend} kda, compiled={compiled}, first step {started - begun:.1f} s after the start", flush=True)
        if args.profile_steps and step == args.profile_steps:
            profiler.__exit__(None, None, None)
            print(
                profiler.key_averages().table(sort_by="cuda_time_total" if device == "cuda" else "cpu_time_total", row_limit=40)
            )
            sys.exit(0)
        if step % (50 if device == "cuda" else 20) == 0:
            point = {
                "step": step,
                "progress": round(progress.value, 4),
                "loss": round(main_loss.item(), 4),
                "aux": round(aux_loss.item(), 4),
                "retrieval": round(accuracy[0].item(), 4),
                "arithmetic": round(accuracy[1].item(), 4),
                "tokens_per_s": round(seen / (time.monotonic() - mark)),
                "busiest_expert": round((loads.max() / loads.mean()).item(), 2),
                "queue": batches.qsize(),
            }
            curve.append(point)
            if step % 200 == 0 or device == "cpu":
                print(json.dumps(point), flush=True)
            if not math.isfinite(point["loss"]):
                raise RuntimeError(f"the loss is {point['loss']} at step {step}; lower --matrix-lr or --other-lr and start again")
            if point["progress"] < 1 and step % 1000 == 0:
                save_all(model, aux, args.out, {"seed": str(args.seed), "steps": str(step)})

    for w in workers:
        w.terminate()
    size = save_all(model, aux, args.out, {"seed": str(args.seed), "steps": str(step)})
    # Scores are of the exported weights in a fresh, uncompiled model.
    final = TinyK3(cfg, kda if device == "cuda" else kda_chunk, model.dtype)
    load_checkpoint(args.out / "checkpoint", cfg, final)
    scores = evaluate(final.to(device), device, 128 if device == "cuda" else 16, args.longest, 4 * args.stretch)
    metrics = {
        "scores": scores, "weights_bytes": size, "steps": step, "tokens": step * 4 * args.stretch, "seed": args.seed,
        "minutes": round((time.monotonic() - begun) / 60, 2), "kda_backend": backend, "compiled": compiled,
        "resumed_from": args.resume.name if args.resume else None, "arguments": {k: str(v) for k, v in vars(args).items()},
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
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
    aux.load_state_dict({k.removeprefix("aux."): tensors.pop(k) for k in list(tensors) if k.startswith("aux.")})
    model.load_state_dict(tensors, strict=False)


if __name__ == "__main__":
    main()
