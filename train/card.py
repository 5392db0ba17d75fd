"""The model card of a trained checkpoint, from its metrics.json: `python train/card.py FOLDER` writes FOLDER/README.md.

Every number of the card that a new training run changes comes from the run's own file, so none can be left over from an earlier.
"""

import json
import sys
from pathlib import Path

CARD = """# k3-tiny

A Kimi K3 of 9.0 million parameters, trained from nothing on generated tasks. It exists so that a loss of accuracy can show: the
evaluation gate, the demo and the engine tests serve it. It knows its two tasks and no language, and is of no other use.

It has every feature of the architecture: KDA and gated MLA without rotary embedding in seven layers (K K M K K M M), a dense
first layer and six MoE layers with 16 routed experts in a latent space (4 a token) and two shared ones, SiTU, attention residuals
over blocks of three layers, routed experts in MXFP4, all else in bfloat16 or float32 as released. Head sizes are the released
model's; {weights} bytes of weights. Tokenizer: 1024 tokens, byte-level, digits apart; any text round-trips. Rows of up to
{longest} tokens in training.

## Training

{steps} steps of {step_tokens} tokens ({tokens} in all) in {minutes} minutes on one {device}, with PyTorch {torch} and
Python {python}. All of it is generated (`train/tasks.py`): no text of anyone's. The experts are quantised in the forward pass
throughout, so the weights here are those that were trained. Seed {seed}. To make it again:

    python train/train.py --minutes {budget} --seed {seed} --out OUT
{resumed}
    cp OUT/checkpoint/* OUT/metrics.json {folder}/ && make record

The last command writes this card and records the scores that the gate compares with. The schedule follows the clock and atomics
sum in any order, so a second run gives a model as good, not the same bits.

## Scores

Of exactly these weights, in bfloat16 in training's own PyTorch, on held-out items (`metrics.json`). Exact: the share of items
whose whole reply, prefix and end included, is right under greedy decoding.

Retrieval: give the n-th of several answers to the same request in a chat again, after a given prefix.

| tokens | {needles} |
| --- | {dashes} |
{retrieval}

Arithmetic: a chain of additions and subtractions modulo 1000, every column written out, the last value in a box.

| steps | exact | tokens right |
| --- | --- | --- |
{arithmetic}

Served by vLLM, both paths, with the gate's own items: `evals/baselines/tiny.json`. What deliberate faults do to the score is
measured by `evals/sensitivity.py`, and recorded in `evals/sensitivity.json`.

## Limits

* Long chains: one wrong digit in several hundred ends an item, and accuracy falls with length. The gate asks for 2 to 12 steps.
* Retrieval at {longest} tokens is weaker than at half of that, and most so among eight needles.
* Prompts of any other form give words of the tasks in no useful order.
* It has fewer layers, heads and experts than the released model: its speed says nothing of that one's.
"""


def card(metrics: dict, folder: str) -> str:
    """The text of README.md. metrics: what train.py writes."""
    scores, arguments = metrics["scores"], metrics["arguments"]
    retrieval: dict[int, dict[int, str]] = {}
    arithmetic = []
    for name, score in scores.items():
        kind, size, *length = name.split("_")
        if kind == "retrieval":
            retrieval.setdefault(int(length[0]), {})[int(size.removesuffix("needle"))] = f"{score['exact']:.1%}"
        else:
            arithmetic.append(f"| {size.removesuffix('steps')} | {score['exact']:.1%} | {score['token']:.3%} |")
    needles = sorted({n for row in retrieval.values() for n in row})
    resumed = ""
    if metrics["resumed_from"]:
        flags = f"--stage {arguments['stage']} --matrix-lr {arguments['matrix_lr']} --other-lr {arguments['other_lr']}"
        resumed = f"""
This was a second leg: add `--resume FIRST_OUT {flags}`.
The first leg was `--minutes 8.8` alone (12,846 steps), with long chains of arithmetic drawn less often.
"""
    return CARD.format(
        resumed=resumed,
        weights=f"{metrics['weights_bytes']:,}",
        longest=f"{int(arguments['longest']):,}",
        steps=f"{metrics['steps']:,}",
        step_tokens=f"{metrics['tokens'] // metrics['steps']:,}",
        tokens=f"{metrics['tokens'] / 1e6:.0f} million",
        minutes=metrics["minutes"],
        budget=arguments["minutes"],
        seed=metrics["seed"],
        device=metrics["device"],
        torch=metrics["torch"],
        python=metrics["python"],
        folder=folder,
        needles=" | ".join(f"{n} needles" for n in needles),
        dashes=" | ".join("---" for _ in needles),
        retrieval="\n".join(
            f"| {length:,} | " + " | ".join(row.get(n, "-") for n in needles) + " |" for length, row in sorted(retrieval.items())
        ),
        arithmetic="\n".join(arithmetic),
    )


if __name__ == "__main__":
    target = Path(sys.argv[1])
    (target / "README.md").write_text(card(json.loads((target / "metrics.json").read_text()), f"checkpoints/{target.name}"))
