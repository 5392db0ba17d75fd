"""Does the gate see a fault? The suite's arms with one thing broken on purpose at a time, and the gate's verdict on each.

    python evals/sensitivity.py CHECKPOINT [--out .eval/sensitivity] [--record evals/sensitivity.json]

One server runs the reference arm (mode off), one all others (`faults/k3_faults.py`). Most faults spoil most replies, and a broken
reply is long: a third of the items shows them. Those of WHOLE spoil few and are asked every item. Arms found in --out are not run
again, so that a run that was stopped goes on. Exit status 0: every fault failed and no control did.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from vllm.model_executor.models.kimi_k3_fast.cli.server import Server
from vllm.model_executor.models.kimi_k3_fast.evaluation import arm as arms
from vllm.model_executor.models.kimi_k3_fast.evaluation import gate, output, suites

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "faults")]
import k3_faults  # noqa: E402
from two_arms import SERVE, fast_mode  # noqa: E402

CONTROLS = ("none", "preemption")
WHOLE = ("none", "expert_swapped")  # the control beside it: what passes on every item must pass there, too


def every_nth(arm: arms.Arm, every: int) -> arms.Arm:
    """The items that an arm of every n-th item has, numbered as it numbers them."""
    kept = {t: [replace(i, item=i.item // every) for i in items if i.item % every == 0] for t, items in arm.items.items()}
    return replace(arm, items=kept)


def once(url: str, suite: suites.Suite, label: str, folder: Path, every: int) -> arms.Arm:
    """The arm in `folder`, run now if it is not there."""
    done = folder / "arm.json"
    return arms.Arm.read(done) if done.exists() else arms.run(url, suite, label, folder, every=every)


def row(arm: arms.Arm, reference: arms.Arm, suite: suites.Suite) -> dict[str, object]:
    """One line of the table: scores, what the gate's paired tests and scores say, and the fast share."""
    baseline = output.baseline_record(reference, suite)
    judged = gate.decide(arm, suite, baseline, require_fast=None, against=reference)
    seen = gate.coverage(arm)
    return {
        "items": sum(map(len, arm.items.values())),
        "verdict": judged.verdict.name.lower(),
        "failed": [c.name for c in judged.checks if c.verdict is gate.Verdict.FAIL],
        "scores": {name: t["metrics"][suite.tasks[name].metric] for name, t in output.task_summary(arm, suite).items()},
        "paired": judged.tests["paired all items"].to_json() if "paired all items" in judged.tests else None,
        "fast_share": None if seen is None or not seen.fast + seen.standard else round(seen.share, 4),
    }


def weights_sha256(checkpoint: Path) -> str:
    """One hash over the weights, by which the table says what it is of."""
    digest = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--suite", default="tiny")
    parser.add_argument("--out", type=Path, default=Path(".eval/sensitivity"))
    parser.add_argument("--record", type=Path, help="write the table here as well")
    parser.add_argument("--only", nargs="*", choices=list(k3_faults.FAULTS), default=list(k3_faults.FAULTS))
    parser.add_argument("--every", type=int, default=3, help="ask only every n-th item of a task, but for WHOLE")
    args = parser.parse_args()
    suite = suites.load(args.suite)
    args.out.mkdir(parents=True, exist_ok=True)
    control = (args.out / "fault").resolve()
    control.write_text("none")
    with Server(args.checkpoint, [*SERVE, *fast_mode("off")], log=args.out / "standard.log") as server:
        reference = once(server.url, suite, "standard", args.out / "standard", 1)
    paths = os.pathsep.join(filter(None, (str(HERE / "faults"), os.environ.get("PYTHONPATH"))))
    environ = {"PYTHONPATH": paths, k3_faults.CONTROL: str(control)}
    table: dict[str, object] = {}
    with Server(args.checkpoint, [*SERVE, *fast_mode("auto")], log=args.out / "faults.log", environ=environ) as server:
        for fault in args.only:
            control.write_text(fault)
            every = 1 if fault in WHOLE else args.every
            arm = once(server.url, suite, fault, args.out / fault, every)
            table[fault] = {"what": k3_faults.FAULTS[fault], **row(arm, every_nth(reference, every), suite)}
            print(fault, json.dumps(table[fault]), flush=True)
    scores = {name: t["metrics"][suite.tasks[name].metric] for name, t in output.task_summary(reference, suite).items()}
    items = sum(map(len, reference.items.values()))
    of = {"suite": suite.name, "weights_sha256": weights_sha256(args.checkpoint), "every": args.every, "items": items}
    record = of | {"reference": scores, "faults": table}
    text = json.dumps(record, indent=1) + "\n"
    for path in filter(None, (args.out / "sensitivity.json", args.record)):
        path.write_text(text)
    wrong = [fault for fault, found in table.items() if (found["verdict"] == "fail") == (fault in CONTROLS)]  # type: ignore[index]
    print("as expected" if not wrong else f"not as expected: {', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
