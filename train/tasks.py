"""Generated tasks, as chat messages and as token ids.

Retrieval: multi-round coreference. A user asks for many short pieces; some requests recur word for word, each time with a
different answer. The last request names one of them by its ordinal and asks for it again after a given prefix. Twin of OpenAI's
MRCR. Arithmetic: a chain of additions and subtractions modulo 1000, every column written out; the last value goes in a box.

A training row holds several retrieval questions at its end; an evaluation item holds one. Every supervised token is predictable
from what precedes it, so greedy decoding is right on an item exactly when each of its answer tokens is the arg-max under
teacher forcing.
"""

from dataclasses import dataclass, field

import numpy as np
import vocabulary as vb

NEEDLES = (2, 4, 8)
PREFIX_ALPHABET = "bcdfghjklmnpqrstvwxz0123456789"  # no vowel: no run of it is a vocabulary word
PREFIX_LENGTH = 10
CONTENT_LENGTHS = (8, 16)
ROUND_COST, QUESTION_COST = 9, 22 + PREFIX_LENGTH
CONTENT_IDS = np.array([vb.word(w) for w in vb.CONTENT])

Message = dict[str, str]


@dataclass
class Row:
    """One training or evaluation sequence.

    tokens: ids. target: what the *next* token is to the loss: NOTHING, FRAME (a reply's prefix and end), FIRST (a retrieved
    piece's first word), PIECE (its other words) or WORK (arithmetic). labels: the auxiliary head's targets, per token (ordinal,
    genre, topic, offset) or -1. In a piece: which one it is, and how many words of it came before. In a reply: the same of the
    word to be given *next*. So the place to read from and the place that reads carry one label. answer: (start, end) of the
    last reply, its <|end|> included.
    """

    tokens: list[int]
    target: list[int]
    labels: list[tuple[int, int, int, int]]
    answer: tuple[int, int]
    meta: dict = field(default_factory=dict)


NOTHING, FRAME, FIRST, PIECE, WORK = range(5)
NO_LABEL = (-1, -1, -1, -1)


def _request(pair: int) -> list[int]:
    genre, topic = divmod(pair, len(vb.TOPICS))
    return [vb.start("Write"), vb.word("a"), vb.word(vb.GENRES[genre]), vb.word("about"), vb.word(vb.TOPICS[topic])]


def _question(prefix: str, pair: int, ordinal: int) -> list[int]:
    genre, topic = divmod(pair, len(vb.TOPICS))
    words = ("to", "the", vb.ORDINALS[ordinal], vb.GENRES[genre], "about", vb.TOPICS[topic])
    return [vb.start("Prepend"), *vb.chars(" " + prefix), *(vb.word(w) for w in words)]


def _groups(rng: np.random.Generator, rounds: int, needles: int | None) -> list[int]:
    """A shuffled list of `rounds` request kinds. `needles`: one kind recurs that often and all others once (an evaluation item);
    None: about half the rounds belong to kinds that recur 2 to 8 times."""
    kinds = rng.permutation(len(vb.GENRES) * len(vb.TOPICS)).tolist()
    if needles is not None:
        return rng.permutation([kinds[0]] * needles + kinds[1 : rounds - needles + 1]).tolist()
    out: list[int] = []
    while len(out) < rounds:
        size = int(rng.choice((1, 2, 3, 4, 6, 8), p=(0.45, 0.25, 0.08, 0.12, 0.03, 0.07)))
        out += [kinds.pop()] * min(size, rounds - len(out))
    return rng.permutation(out).tolist()


def retrieval_row(rng: np.random.Generator, length: int, questions: int, needles: int | None = None) -> Row:
    """A chat of at most `length` tokens, filled as far as whole rounds allow. With one question about one of the needles it is an
    evaluation item."""
    mean = sum(CONTENT_LENGTHS) / 2
    longest = CONTENT_LENGTHS[1]
    budget = length - 1 - questions * (QUESTION_COST + longest)
    rounds = int(budget / (ROUND_COST + mean))
    sizes = rng.integers(CONTENT_LENGTHS[0], longest + 1, rounds)
    while rounds > (needles or 1) and int(sizes[:rounds].sum()) + rounds * ROUND_COST > budget:
        rounds -= 1
    words = CONTENT_IDS[rng.integers(0, len(CONTENT_IDS), (rounds, longest))].tolist()
    kinds = _groups(rng, rounds, needles)

    tokens, labels = [vb.BEGIN], [NO_LABEL]
    seen: dict[int, int] = {}
    pieces: list[tuple[int, int, list[int]]] = []
    for kind, size, piece in zip(kinds, sizes.tolist(), words, strict=False):
        ordinal = seen.get(kind, 0)
        seen[kind] = ordinal + 1
        piece = piece[:size]
        pieces.append((kind, ordinal, piece))
        tokens += [vb.USER, *_request(kind), vb.END, vb.ASSISTANT, *piece, vb.END]
        which = (ordinal, *divmod(kind, len(vb.TOPICS)))
        labels += [NO_LABEL] * 7 + [(*which, offset) for offset in range(-1, size + 1)]
    target = [NOTHING] * len(tokens)

    recurring = [i for i, (kind, _, _) in enumerate(pieces) if seen[kind] > 1] or list(range(rounds))
    if needles is not None and questions == 1:
        chosen = [int(rng.choice(recurring))]
    else:  # without repetition, three quarters of the weight on what recurs
        weight = np.full(rounds, 0.25 / rounds)
        weight[recurring] += 0.75 / len(recurring)
        chosen = rng.choice(rounds, min(questions, rounds), replace=False, p=weight).tolist()
    answer = (0, 0)
    for index in chosen:
        kind, ordinal, piece = pieces[index]
        prefix = "".join(rng.choice(list(PREFIX_ALPHABET), PREFIX_LENGTH))
        tokens += [vb.USER, *_question(prefix, kind, ordinal), vb.END, vb.ASSISTANT]
        reply = [*vb.chars(prefix), *piece, vb.END]
        answer = (len(tokens), len(tokens) + len(reply))
        target += [NOTHING] * (len(tokens) - 1 - len(target))
        target += [FRAME] * PREFIX_LENGTH + [FIRST] + [PIECE] * (len(piece) - 1) + [FRAME, NOTHING]
        labels += [NO_LABEL] * (len(tokens) - 1 - len(labels))
        which = (ordinal, *divmod(kind, len(vb.TOPICS)))
        labels += [(*which, -1)] * PREFIX_LENGTH + [(*which, offset) for offset in range(len(piece) + 1)] + [NO_LABEL]
        tokens += reply
    return Row(tokens, target, labels, answer, {"task": "retrieval", "needles": needles, "prefix": prefix, "ordinal": ordinal})


def _number(value: int) -> list[int]:
    return vb.chars(f"{value:03d}")


_ASK = [
    vb.start("Work"), vb.word("step"), vb.word("by"), vb.word("step"), vb.word("modulo"), *vb.chars(" 1000"), vb.word("and"),
    vb.word("put"), vb.word("the"), vb.word("last"), vb.word("value"), vb.word("in"), *vb.chars(" \\"), vb.start("boxed"),
    *vb.chars("{}.\n"), vb.start("Start"), vb.word("with"), *vb.chars(" "),
]  # fmt: skip


def column_work(value: int, operand: int, sign: str) -> tuple[str, int]:
    """One step written out from the units up, as `a+b+carry=CD` (C the carry or borrow, D the digit), and its result modulo
    1000."""
    carry, digits, parts = 0, [], []
    for place in (1, 10, 100):
        a, b = value // place % 10, operand // place % 10
        raw = a + b + carry if sign == "+" else a - b - carry
        digit, after = raw % 10, int(not 0 <= raw <= 9)
        parts.append(f"{a}{sign}{b}{sign}{carry}={after}{digit}")
        digits.append(digit)
        carry = after
    result = digits[0] + 10 * digits[1] + 100 * digits[2]
    return f"{value:03d}{sign}{operand:03d};" + ";".join(parts) + f";{result:03d}", result


def arithmetic_row(rng: np.random.Generator, steps: int) -> Row:
    value = int(rng.integers(1000))
    tokens = [vb.BEGIN, vb.USER, *_ASK, *_number(value), *vb.chars(".")]
    reply: list[int] = []
    for step in range(1, steps + 1):
        operand = int(rng.integers(1000))
        sign = "+" if rng.random() < 0.5 else "-"
        label = f"{step:02d}"
        tokens += [*vb.chars("\n" + label), vb.word("add" if sign == "+" else "subtract"), *vb.chars(f" {operand:03d}")]
        work, value = column_work(value, operand, sign)
        reply += vb.chars(f"{label}:{work}\n")
    reply += [*vb.chars("\\"), vb.start("boxed"), *vb.chars(f"{{{value}}}"), vb.END]
    tokens += [vb.END, vb.ASSISTANT]
    answer = (len(tokens), len(tokens) + len(reply))
    target = [NOTHING] * (len(tokens) - 1) + [WORK] * len(reply) + [NOTHING]
    tokens += reply
    return Row(tokens, target, [NO_LABEL] * len(tokens), answer, {"task": "arithmetic", "steps": steps, "result": value})


def steps_that_fit(length: int) -> int:
    """Steps of which a row of `length` tokens has room: 8 tokens of question, 41 of work each."""
    return (length - 50) // 50


def messages(row: Row, decode) -> tuple[list[Message], str]:
    """The row as chat messages and the expected last reply. `decode` turns ids into text, special tokens kept."""
    roles = {vb.SYSTEM: "system", vb.USER: "user", vb.ASSISTANT: "assistant", vb.TOOL: "tool"}
    out: list[Message] = []
    current: list[int] | None = None
    for token in row.tokens[1 : row.answer[0] - 1]:
        if token in roles:
            out.append({"role": roles[token], "content": ""})
            current = []
        elif token == vb.END:
            out[-1]["content"] = decode(current)
        else:
            current.append(token)
    return out, decode(row.tokens[row.answer[0] : row.answer[1] - 1])


@dataclass
class Batch:
    """Rows padded to common lengths and laid end to end. shapes: (rows, length) of each stretch; tokens int64 [N]; target int64
    [N]; labels int64 [N, 4]."""

    shapes: list[tuple[int, int]]
    tokens: np.ndarray
    target: np.ndarray
    labels: np.ndarray


def lay_out(stretches: list[tuple[int, list[Row]]]) -> Batch:
    total = sum(length * len(rows) for length, rows in stretches)
    tokens = np.full(total, vb.PAD, np.int64)
    target = np.zeros(total, np.int64)
    labels = np.full((total, len(NO_LABEL)), -1, np.int64)
    at = 0
    for length, rows in stretches:
        for row in rows:
            n = len(row.tokens)
            if n > length:
                raise ValueError(f"a row of {n} tokens does not fit {length}")
            tokens[at : at + n], target[at : at + n], labels[at : at + n] = row.tokens, row.target, row.labels
            at += length
    return Batch([(len(rows), length) for length, rows in stretches], tokens, target, labels)


# The stages of the curriculum: (rows' length, units of tokens) of each retrieval stretch. One more unit is arithmetic.
STAGES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((256, 5), (512, 2)),
    ((256, 1), (512, 2), (1024, 4)),
    ((512, 1), (1024, 2), (2048, 4)),
    ((1024, 1), (2048, 2), (4096, 4)),
    ((2048, 1), (4096, 2), (8192, 4)),
)
UNITS = 8


def training_row(rng: np.random.Generator, length: int) -> Row:
    """Questions fill about half of a short row, for more of the loss to be about retrieval, and a quarter of a long one. Some
    rows have the one recurring kind of an evaluation item, most have many."""
    share = 0.6 if length <= 256 else 0.5 if length <= 512 else 0.35 if length <= 1024 else 0.25
    needles = int(rng.choice(NEEDLES, p=(0.5, 0.3, 0.2))) if length >= 512 and rng.random() < 0.3 else None
    return retrieval_row(rng, length, max(1, int(share * length / 44)), needles)


def training_batch(rng: np.random.Generator, stage: int, unit: int, longest: int = 8192) -> Batch:
    """The stage's retrieval stretches, then `unit` tokens of arithmetic: UNITS * unit tokens at every stage.

    Long chains are drawn more often (the larger of two draws): each step is local, but one wrong digit spoils the answer.
    """
    stretches = []
    for length, units in STAGES[stage]:
        length = min(length, longest, unit * units)
        stretches.append((length, [training_row(rng, length) for _ in range(unit * units // length)]))
    length = min(1024, longest, unit)
    most = steps_that_fit(length)
    stretches.append((length, [arithmetic_row(rng, int(rng.integers(1, most + 1, size=2).max())) for _ in range(unit // length)]))
    return lay_out(stretches)
