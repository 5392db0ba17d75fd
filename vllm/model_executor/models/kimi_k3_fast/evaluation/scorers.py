"""How a reply is scored. Where two conventions are in use, both are given and named; they are never mixed.

MRCR: the published grade and the one in vLLM's own tests disagree (a reply with one edited sentence: 0.333 and 0.986), so a
number without its name means nothing. AIME: lm-eval's scorer, which is what published AIME numbers use, and beside it the
reading as an integer, which is what the competition asks for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

_SEPARATORS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,|\\!|~|\s)(?=\d{3}(?!\d))")
_UNITS = re.compile(r"\\text(?:rm|bf)?\{[^{}]*\}|\\(?:mathrm|mbox)\{[^{}]*\}|\^?\{?\\circ\}?|\\?%|\\?\$")
_INTEGER = re.compile(r"[+]?0*(\d{1,3})(?:\.0*)?")


def mrcr_official(reply: str, answer: str, prefix: str) -> float:
    """The grade of the dataset's card: 0 without the prefix, else the ratio of reply to answer, both without it.

    Python's difflib with its "autojunk" heuristic, as published: in texts over 200 characters frequent ones do not count.
    """
    if not reply.startswith(prefix):
        return 0.0
    return SequenceMatcher(None, reply.removeprefix(prefix), answer.removeprefix(prefix)).ratio()


def mrcr_vllm(reply: str, answer: str, prefix: str) -> float:
    """The grade of vLLM's tests: only the reply loses the prefix, so that a perfect reply stays below 1; no heuristic."""
    if not reply.startswith(prefix):
        return 0.0
    return SequenceMatcher(None, answer, reply[len(prefix) :], autojunk=False).ratio()


def boxed(reply: str) -> str | None:
    r"""The content of the last \boxed{...} whose braces close; None without one."""
    for start in reversed([m.end() for m in re.finditer(r"\\boxed\s*\{", reply)]):
        depth = 1
        for end in range(start, len(reply)):
            depth += {"{": 1, "}": -1}.get(reply[end], 0)
            if depth == 0:
                return reply[start:end]
    return None


def aime_integer(reply: str, answer: str) -> float:
    """1 if the last box holds an integer from 0 to 999 equal to `answer`; leading zeros, separators and units do not matter.

    Without a box the reply is wrong: an integer somewhere in the text is not an answer.
    """
    content = boxed(reply)
    if content is None:
        return 0.0
    found = _INTEGER.fullmatch(_SEPARATORS.sub("", _UNITS.sub("", content)).strip())
    return float(found is not None and int(found[1]) == int(answer))


def aime_official(reply: str, answer: str) -> float:
    """lm-eval's own AIME score: the last box, else the text between dollar signs, else all of it, compared as a string."""
    from lm_eval.tasks.aime import utils

    return float(utils.process_results({"answer": str(answer)}, [reply])["exact_match"])


def score_mrcr(doc: Mapping[str, Any], results: list[str]) -> dict[str, float]:
    """lm-eval's `process_results` of the retrieval tasks."""
    arguments = results[0], doc["answer"], doc["random_string_to_prepend"]
    return {"mrcr_official": mrcr_official(*arguments), "mrcr_vllm": mrcr_vllm(*arguments)}


def score_aime(doc: Mapping[str, Any], results: list[str]) -> dict[str, float]:
    """lm-eval's `process_results` of the arithmetic tasks."""
    answer = str(doc["answer"])
    return {"aime_official": aime_official(results[0], answer), "aime_integer": aime_integer(results[0], answer)}
