"""The tiny checkpoint's tokenizer: 1024 tokens, any text round-trips.

Byte-level, no merges: a pre-token that is in the vocabulary is one token, anything else falls apart into its bytes. Digits are
always single tokens. So the words of the tasks cost one token each and there is nothing to learn about spelling.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = (
    "<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|unused0|>",
    "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<|unused1|>", "<|unused2|>", "<|unused3|>", "<|unused4|>",
)  # fmt: skip
PAD, BEGIN, END, SYSTEM, USER, ASSISTANT, TOOL = range(7)

GENRES = ("poem", "story", "song", "letter", "riddle", "speech", "recipe", "joke")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
TOPICS = tuple(
    [
        "tapirs",
        "otters",
        "cranes",
        "badgers",
        "foxes",
        "wolves",
        "horses",
        "spiders",
        "turtles",
        "whales",
        "parrots",
        "lizards",
        "beetles",
        "camels",
        "donkeys",
        "eagles",
        "rivers",
        "mountains",
        "deserts",
        "islands",
        "forests",
        "glaciers",
        "volcanoes",
        "meadows",
        "oceans",
        "canyons",
        "caves",
        "rainbows",
        "storms",
        "comets",
        "planets",
        "stars",
        "clocks",
        "bridges",
        "towers",
        "lanterns",
        "violins",
        "drums",
        "trains",
        "boats",
        "kites",
        "mirrors",
        "candles",
        "carpets",
        "windows",
        "gardens",
        "castles",
        "mills",
        "bread",
        "honey",
        "apples",
        "lemons",
        "onions",
        "pepper",
        "cheese",
        "coffee",
        "walnuts",
        "cherries",
        "pumpkins",
        "rice",
        "butter",
        "ginger",
        "olives",
        "tea",
    ]
)
STARTERS = ("Write", "Prepend", "Work", "Start", "boxed")
PLAIN = tuple(
    [
        "a",
        "about",
        "to",
        "the",
        "of",
        "in",
        "and",
        "is",
        "with",
        "add",
        "subtract",
        "step",
        "by",
        "put",
        "last",
        "value",
        "modulo",
        "each",
        "line",
        "answer",
        "give",
        "then",
        "you",
        "are",
        "number",
        "word",
        "not",
        "it",
    ]
)
VOCAB_SIZE = 1024


def _content_words(count: int) -> tuple[str, ...]:
    """Two-syllable pseudo-words, spread evenly over the possible ones, none of them a word of the task."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    pairs = [a + b for a in syllables for b in syllables]
    taken = {*GENRES, *ORDINALS, *TOPICS, *PLAIN}
    stride = 2903  # prime, so the walk visits every pair before it repeats
    walk = (pairs[i * stride % len(pairs)] for i in range(len(pairs)))
    return tuple(word for word, _ in zip((w for w in walk if w not in taken), range(count), strict=False))


def _byte_symbols() -> list[str]:
    """The printable stand-ins of the byte-level alphabet, in byte order (printable bytes stand for themselves)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(shifted)) for b in range(256)]


BYTES = _byte_symbols()
SPACE = BYTES[32]
_FIXED = [*SPECIALS, *BYTES, *STARTERS, *(SPACE + w for w in (*GENRES, *ORDINALS, *TOPICS, *PLAIN))]
CONTENT = _content_words(VOCAB_SIZE - len(_FIXED))
TOKENS: dict[str, int] = {token: i for i, token in enumerate([*_FIXED, *(SPACE + w for w in CONTENT)])}
assert len(TOKENS) == VOCAB_SIZE

CHAT_TEMPLATE = (
    "{{- '<|begin|>' -}}"
    "{%- for message in messages -%}"
    "{%- if message.role not in ('system', 'user', 'assistant', 'tool') -%}"
    "{{- raise_exception('unknown role: ' ~ message.role) -}}"
    "{%- endif -%}"
    "{{- '<|' ~ message.role ~ '|>' ~ (message.content or '') ~ '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def word(text: str) -> int:
    """Id of a word as it stands inside a sentence (with its leading space)."""
    return TOKENS[SPACE + text]


def start(text: str) -> int:
    """Id of a word that begins a text."""
    return TOKENS[text]


def chars(text: str) -> list[int]:
    """Ids of a text of which no part is a vocabulary word."""
    return [TOKENS[BYTES[b]] for b in text.encode()]


def build_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=TOKENS, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return tokenizer


def save_tokenizer(folder: Path, max_length: int) -> None:
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
