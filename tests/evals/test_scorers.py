"""Scores against values worked out by hand, and against lm-eval's own AIME scorer."""

from __future__ import annotations

import pytest

from vllm.model_executor.models.kimi_k3_fast.evaluation import scorers

# (reply, answer, official, integer): what lm-eval's string comparison says, and whether the box holds that integer.
AIME = [
    (r"\boxed{49}", "49", 1, 1),
    (r"\boxed{049}", "49", 0, 1),  # leading zeros are text to the official scorer
    (r"\boxed{49}", "049", 0, 1),
    (r"\boxed{049}", "049", 1, 1),
    (r"\boxed{0}", "0", 1, 1),
    (r"\boxed{000}", "0", 0, 1),
    (r"First \boxed{12}, then \boxed{49}.", "49", 1, 1),  # the last box counts
    (r"First \boxed{49}, then \boxed{12}.", "49", 0, 0),
    (r"\boxed{\boxed{49}}", "49", 1, 1),
    (r"\boxed{49 }", "49", 1, 1),
    (r"\boxed{ 49}", "49", 1, 1),
    (r"\boxed 49", "49", 1, 0),  # without braces: official reads on to the end
    (r"\boxed{49", "49", 0, 0),  # a box that never closes
    (r"\boxed{1,000}", "1000", 0, 0),  # no answer of the competition has four digits
    (r"\boxed{n = 49}", "49", 1, 0),  # the official scorer drops a left side of at most two characters, spaces counted
    (r"\boxed{a b = 49}", "49", 0, 0),
    (r"\boxed{49\text{ cm}}", "49", 1, 1),
    (r"\boxed{49\text{cm}}", "49", 0, 1),
    (r"\boxed{49^\circ}", "49", 1, 1),
    (r"\boxed{49^{\circ}}", "49", 1, 1),
    (r"\boxed{49\%}", "49", 1, 1),
    (r"\boxed{\$49}", "49", 1, 1),
    (r"\boxed{49.0}", "49", 0, 1),
    (r"\boxed{49.5}", "49", 0, 0),
    (r"\boxed{-49}", "49", 0, 0),
    (r"\boxed{+49}", "49", 0, 1),
    (r"\boxed{\frac{98}{2}}", "49", 0, 0),  # a value, not an integer
    (r"\boxed{98/2}", "49", 0, 0),
    ("The answer is 49.", "49", 0, 0),
    ("49", "49", 1, 0),  # no box: official compares the whole reply
    ("$49$", "49", 1, 0),
    ("So $x=49$ holds.", "49", 1, 0),
    ("$x$ gives $49$", "49", 0, 0),  # between the first and the last dollar sign stands `x$ gives $49`
    ("", "49", 0, 0),
    (r"\boxed{}", "49", 0, 0),
    (r"\boxed{forty-nine}", "49", 0, 0),
    (r"\boxed{4 9}", "49", 1, 0),  # spaces vanish officially; two integers are not one
    ("\\boxed{4\n9}", "49", 1, 0),
    (r"\fbox{49}", "49", 0, 0),
    (r"$\boxed{49}$", "49", 1, 1),
    (r"\boxed{49}\boxed{", "49", 0, 1),  # the last box that closes
    (r"**\boxed{49}**", "49", 1, 1),
]


@pytest.mark.parametrize(("reply", "answer", "official", "integer"), AIME)
def test_aime_scores_are_the_expected_ones(reply: str, answer: str, official: int, integer: int) -> None:
    assert scorers.aime_official(reply, answer) == official
    assert scorers.aime_integer(reply, answer) == integer


def test_thousands_separators_do_not_hide_an_integer() -> None:
    for text in ("1,049", "1{,}049", r"1\,049", "1 049", "1~049"):
        assert scorers._SEPARATORS.sub("", text) == "1049"
    assert scorers._SEPARATORS.sub("", "4, 9") == "4, 9"


def test_the_process_results_of_lm_eval_score_alike() -> None:
    """The task's hook gives both metrics, the official one straight from lm-eval."""
    from lm_eval.tasks.aime import utils

    for reply, answer, official, integer in AIME:
        doc = {"answer": answer}
        assert scorers.score_aime(doc, [reply]) == {"aime_official": official, "aime_integer": integer}
        assert utils.process_results(doc, [reply])["exact_match"] == official


# (reply, official, vllm), answer "zz" + "abcd", worked out by hand: ratio = 2 * matching / (both lengths)
MRCR = [
    ("zzabcd", 1.0, 2 * 4 / (6 + 4)),  # exact: vLLM compares with an answer that keeps its prefix
    ("zzabxd", 2 * 3 / 8, 2 * 3 / 10),
    ("zz", 0.0, 0.0),
    ("abcd", 0.0, 0.0),  # right, but the prefix is missing
    (" zzabcd", 0.0, 0.0),  # a space before the prefix
    ("", 0.0, 0.0),
    ("zzabcdabcd", 2 * 4 / 12, 2 * 4 / 14),
]


@pytest.mark.parametrize(("reply", "official", "vllm"), MRCR)
def test_mrcr_scores_are_the_expected_ones(reply: str, official: float, vllm: float) -> None:
    doc = {"answer": "zzabcd", "random_string_to_prepend": "zz"}
    found = scorers.score_mrcr(doc, [reply])
    assert found["mrcr_official"] == pytest.approx(official)
    assert found["mrcr_vllm"] == pytest.approx(vllm)


def test_one_edited_span_separates_the_two_mrcr_scores() -> None:
    """In a long answer of few distinct characters the published grade's heuristic drops all that are frequent."""
    sentence = "the cat sat on the mat and the dog ran to the far end of the old red barn. "
    answer = "zz" + sentence * 20
    reply = answer.replace("cat", "cow", 1)
    assert scorers.mrcr_official(reply, answer, "zz") < 0.5
    assert scorers.mrcr_vllm(reply, answer, "zz") > 0.95


def test_an_exact_reply_of_2716_characters_scores_below_one_in_vllm() -> None:
    answer = "0123456789" + "".join(chr(0x4E00 + i) for i in range(2706))
    assert scorers.mrcr_official(answer, answer, "0123456789") == 1.0
    assert round(scorers.mrcr_vllm(answer, answer, "0123456789"), 4) == 0.9982
