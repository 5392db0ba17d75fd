"""The generated items are what they claim: one right answer, reachable through the chat template, scored as right."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tasks
import vocabulary as vb
from jinja2 import Environment

from vllm.model_executor.models.kimi_k3_fast.evaluation import scorers

TOKENIZER = vb.build_tokenizer()


def decode(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def rows() -> list[tasks.Row]:
    rng = np.random.default_rng(7)
    retrieval = [tasks.retrieval_row(rng, length, 1, needles) for length in (256, 512) for needles in tasks.NEEDLES]
    return [*retrieval, *(tasks.arithmetic_row(rng, steps) for steps in (1, 5, 18))]


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.meta['task']}{row.meta.get('needles') or row.meta.get('steps')}")
def test_the_chat_template_rebuilds_the_row_s_tokens(row: tasks.Row) -> None:
    """What a server tokenises from the messages is what the model was trained on, token for token."""
    messages, reply = tasks.messages(row, decode)
    text = Environment().from_string(vb.CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=True)
    start, end = row.answer
    assert TOKENIZER.encode(text).ids == row.tokens[:start]
    assert TOKENIZER.encode(reply).ids == row.tokens[start : end - 1] and row.tokens[end - 1] == vb.END


def test_any_text_round_trips() -> None:
    for text in ("Write a poem about tapirs", "naïve café — 中文\n\t{}", " leading and trailing ", "a1234b"):
        assert decode(TOKENIZER.encode(text).ids) == text


@pytest.mark.parametrize("needles", tasks.NEEDLES)
def test_a_retrieval_item_names_one_of_its_needles(needles: int) -> None:
    ordinals = set()
    for seed in range(20):
        row = tasks.retrieval_row(np.random.default_rng(seed), 512, 1, needles)
        messages, reply = tasks.messages(row, decode)
        *chat, question = messages
        _, prefix, _, _, ordinal, *what = question["content"].split()
        pairs = list(zip(chat[::2], chat[1::2], strict=True))
        same = [a["content"] for q, a in pairs if q["content"].split()[2:] == what]
        assert len(same) == needles and len({q["content"] for q, _ in pairs}) == len(pairs) - needles + 1
        assert reply == prefix + same[vb.ORDINALS.index(ordinal)]
        doc = {"answer": reply, "random_string_to_prepend": prefix}
        assert scorers.score_mrcr(doc, [reply])["mrcr_official"] == 1.0
        assert all(scorers.score_mrcr(doc, [prefix + other])["mrcr_official"] < 0.9 for other in same if prefix + other != reply)
        ordinals.add(ordinal)
    assert len(ordinals) > 1


def test_the_arithmetic_is_right() -> None:
    for value, operand, sign in ((0, 0, "+"), (999, 1, "+"), (500, 500, "+"), (0, 1, "-"), (123, 987, "-"), (905, 57, "-")):
        work, result = tasks.column_work(value, operand, sign)
        assert result == (value + operand if sign == "+" else value - operand) % 1000
        assert work.endswith(f";{result:03d}")


def test_an_arithmetic_item_follows_from_its_question() -> None:
    for seed in range(20):
        row = tasks.arithmetic_row(np.random.default_rng(seed), 6)
        (question,), reply = tasks.messages(row, decode)
        first, *steps = question["content"].split("\n")[1:]
        value = int(first.removeprefix("Start with ").rstrip("."))
        for step in steps:
            _, verb, operand = step.split()
            value = (value + (1 if verb == "add" else -1) * int(operand)) % 1000
        assert row.meta["result"] == value
        assert scorers.score_aime({"answer": str(value)}, [reply]) == {"aime_official": 1.0, "aime_integer": 1.0}


def test_supervision_covers_the_replies_alone() -> None:
    for row in rows():
        start, end = row.answer
        assert [i + 1 for i, t in enumerate(row.target) if t] == list(range(start, end))
        assert len(row.tokens) == len(row.target) == len(row.labels)


def test_items_of_the_gate_are_repeatable_and_none_is_a_training_row() -> None:
    """Same hash from two generations; seeds differ from training's by construction, prompts in fact."""
    import sys
    from pathlib import Path

    sys.path.append(str(Path(__file__).parents[2] / "evals" / "tasks"))
    import tiny

    first, second = (tiny.retrieval(2, {256: 6})["test"] for _ in range(2))
    assert first["prompt"] == second["prompt"] and len(set(first["prompt"])) == 6
    training = [tasks.retrieval_row(np.random.default_rng(1000 + w), 256, 1) for w in range(50)]
    asked = {json.dumps(tasks.messages(row, decode)[0]) for row in training}
    assert not asked & set(first["prompt"])


def test_the_model_card_is_written_from_the_metrics_beside_it() -> None:
    """A card that an earlier training run left would name other scores than those of the weights it lies with."""
    from pathlib import Path

    import card

    folder = Path(__file__).parents[2] / "checkpoints" / "k3-tiny"
    metrics = json.loads((folder / "metrics.json").read_text())
    assert (folder / "README.md").read_text() == card.card(metrics, "checkpoints/k3-tiny")
    assert metrics["weights_bytes"] == (folder / "model.safetensors").stat().st_size < 16e6
