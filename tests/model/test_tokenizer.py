"""Text goes in and out unchanged, and the chat template writes what vLLM's hermes parser reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from vllm.model_executor.models.kimi_k3_fast.model.tokenizer import SPECIAL_TOKENS, byte_tokenizer, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, byte_tokenizer(), 4096)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "text", ["plain", "  spaces\n\ttabs  ", "Grüße, 世界 🌍", '{"a": [1, 2]}', "".join(map(chr, range(1, 300)))]
)
def test_every_text_has_an_encoding(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text


def test_special_tokens_come_first_and_are_one_token(tokenizer: Any) -> None:
    assert [tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "[PAD]" and tokenizer.bos_token == "[BOS]"
    assert len(tokenizer("<tool_call>x</tool_call>")["input_ids"]) == 3


def test_a_conversation(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_system|>Be brief.<|im_end|><|im_user|>Hi<|im_end|><|im_assistant|>"


def test_tools_and_calls_are_in_the_hermes_style(tokenizer: Any) -> None:
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert text.startswith('<|im_system|>Tools:\n{"name": "add"')
    assert '<|im_assistant|><tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|im_end|>' in text
    assert text.endswith("<|im_tool|>2<|im_end|><|im_assistant|>")
