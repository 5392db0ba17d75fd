"""A byte-level tokenizer and chat template for small checkpoints. Every text has an encoding; tool calls are in the hermes style.

The special tokens stand first, then the 256 bytes, then whatever a trained vocabulary adds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS: Final = (
    "[PAD]",
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_system|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_tool|>",
)
TOOL_CALL_TOKENS: Final = ("<tool_call>", "</tool_call>")

CHAT_TEMPLATE: Final = """\
{%- macro turn(role, text) -%}
<|im_{{ role }}|>{{ text }}<|im_end|>
{%- endmacro -%}
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' -%}
{%- if tools -%}
    {%- set ns = namespace(text=system ~ ('\\n\\n' if system else '') ~ 'Tools:') -%}
    {%- for tool in tools -%}{%- set ns.text = ns.text ~ '\\n' ~ (tool.function | tojson) -%}{%- endfor -%}
    {%- set ns.text = ns.text ~ '\\nTo call one, answer <tool_call>{"name": ..., "arguments": {...}}</tool_call>' -%}
    {{- turn('system', ns.text) -}}
{%- elif system -%}
    {{- turn('system', system) -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' and message.tool_calls -%}
        {%- set ns = namespace(text=message.content or '') -%}
        {%- for call in message.tool_calls -%}
            {%- set arguments = call.function.arguments -%}
            {%- set arguments = arguments if arguments is string else arguments | tojson -%}
            {%- set name = call.function.name | tojson -%}
            {%- set ns.text = ns.text ~ '<tool_call>{"name": ' ~ name ~ ', "arguments": ' ~ arguments ~ '}</tool_call>' -%}
        {%- endfor -%}
        {{- turn('assistant', ns.text) -}}
    {%- elif message.role in ('user', 'assistant', 'tool') -%}
        {{- turn(message.role, message.content or '') -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>{%- endif -%}
"""


def byte_tokenizer() -> Tokenizer:
    """One token a byte, plus the special and tool-call tokens: `tokenizers.Tokenizer`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = (*SPECIAL_TOKENS, *TOOL_CALL_TOKENS, *alphabet)
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    finish_tokenizer(tokenizer)
    return tokenizer


def finish_tokenizer(tokenizer: Tokenizer) -> None:
    """Give a BPE tokenizer whose vocabulary starts as `byte_tokenizer`'s the byte-level stages and the special tokens."""
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in TOOL_CALL_TOKENS])


def write_tokenizer(directory: Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja as transformers and vLLM read them."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": "<|im_end|>",
        "pad_token": "[PAD]",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
