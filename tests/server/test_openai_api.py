"""What a client of the OpenAI API may ask of a served Kimi K3. The weights are random: the tests hold the server to the rules of
each parameter, never to words."""

from __future__ import annotations

import json
import math
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from transformers import AutoTokenizer

MODEL = "tiny-k3"
MAX_MODEL_LEN = 512  # as the fixture sets it
QUESTION = [{"role": "user", "content": "Name a layer of Kimi K3."}]


def chat(client, **kwargs):
    return client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, "max_tokens": 12, "temperature": 0, **kwargs})


def complete(client, **kwargs):
    return client.completions.create(**{"model": MODEL, "prompt": "K3 decodes", "max_tokens": 12, "temperature": 0, **kwargs})


@pytest.fixture(scope="session")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny)


def test_chat_counts_the_tokens_of_the_template(client, tokenizer) -> None:
    answer = chat(client)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert answer.usage.prompt_tokens == len(tokenizer(prompt, add_special_tokens=False).input_ids)
    assert answer.usage.completion_tokens <= 12
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_greedy_answers_repeat(client) -> None:
    assert chat(client).choices[0].message.content == chat(client).choices[0].message.content


@pytest.mark.parametrize("ask", [chat, complete], ids=["chat", "completions"])
def test_a_stream_adds_up_to_the_whole_answer(client, ask) -> None:
    whole = ask(client, seed=3, temperature=1.0).choices[0]
    parts, finish = [], None
    for chunk in ask(client, seed=3, temperature=1.0, stream=True):
        for choice in chunk.choices:
            parts.append((choice.delta.content if ask is chat else choice.text) or "")
            finish = choice.finish_reason or finish
    assert "".join(parts) == (whole.message.content if ask is chat else whole.text)
    assert finish == whole.finish_reason


def test_stream_usage_is_given_when_asked(client) -> None:
    last = list(chat(client, stream=True, stream_options={"include_usage": True}))[-1]
    assert last.choices == []
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_n_gives_independent_samples(client) -> None:
    answer = chat(client, n=4, temperature=1.0, seed=7)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(set(texts)) > 1
    assert answer.usage.completion_tokens <= 4 * 12


def test_seed_repeats_a_sample_and_another_seed_does_not(client) -> None:
    first, again, other = (complete(client, temperature=1.0, seed=s).choices[0].text for s in (11, 11, 12))
    assert first == again
    assert first != other


def test_a_seed_holds_for_a_prompt_that_comes_in_chunks(client) -> None:
    prompt = [20 + i % 200 for i in range(400)]
    first, again, other = (complete(client, prompt=prompt, temperature=1.0, seed=s).choices[0].text for s in (11, 11, 12))
    assert first == again
    assert first != other


@pytest.mark.parametrize("narrow", [{"extra_body": {"top_k": 1}}, {"top_p": 1e-6}], ids=["top_k", "top_p"])
def test_a_single_candidate_is_the_greedy_choice(client, narrow) -> None:
    greedy = complete(client).choices[0].text
    assert complete(client, temperature=1.0, **narrow).choices[0].text == greedy


def test_top_k_keeps_to_its_candidates(client) -> None:
    sampled = {"temperature": 2.0, "seed": 5, "max_tokens": 24, "extra_body": {"top_k": 3}}
    content = chat(client, logprobs=True, top_logprobs=5, **sampled).choices[0].logprobs.content
    ranks = [sum(c.logprob > position.logprob for c in position.top_logprobs) for position in content]
    assert set(ranks) <= {0, 1, 2}
    assert len(set(ranks)) > 1, "expected a hot sample to take other candidates than the first"


def test_logprobs_are_those_of_a_distribution(client) -> None:
    content = chat(client, logprobs=True, top_logprobs=5).choices[0].logprobs.content
    assert content
    for position in content:
        top = [candidate.logprob for candidate in position.top_logprobs]
        assert top == sorted(top, reverse=True)
        assert position.logprob == max(top)  # greedy
        assert sum(math.exp(value) for value in top) <= 1 + 1e-5


def test_echo_gives_logprobs_of_the_prompt(client) -> None:
    answer = complete(client, echo=True, logprobs=1, max_tokens=1).choices[0]
    assert answer.text.startswith("K3 decodes")
    assert answer.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in answer.logprobs.token_logprobs[1:])


def test_a_stop_string_ends_the_answer_before_it(client) -> None:
    full = complete(client, max_tokens=40).choices[0].text
    printable = [i for i in range(4, len(full)) if full[i].isascii() and full[i].isprintable()]
    assert printable, f"expected a printable character to stop at in {full!r}"
    stop = full[printable[0]]
    cut = complete(client, max_tokens=40, stop=[stop]).choices[0]
    assert cut.text == full[: full.index(stop)]
    assert cut.finish_reason == "stop"


SCHEMA = {
    "type": "object",
    "properties": {
        "layers": {"type": "array", "items": {"enum": ["kda", "mla"]}, "minItems": 2, "maxItems": 3},
        "experts": {"type": "integer", "minimum": 1, "maximum": 99},
        "gated": {"type": "boolean"},
    },
    "required": ["layers", "experts", "gated"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_json_schema_is_kept(client, seed) -> None:
    import jsonschema

    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    answer = chat(client, response_format=form, max_tokens=120, temperature=1.0, seed=seed).choices[0]
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)


def test_regex_is_kept(client) -> None:
    pattern = r"(kda|mla)-[0-9]{2}(, (kda|mla)-[0-9]{2}){2}"
    answer = complete(client, max_tokens=60, temperature=1.0, seed=1, extra_body={"structured_outputs": {"regex": pattern}})
    assert re.fullmatch(pattern, answer.choices[0].text)


def test_choice_is_kept(client) -> None:
    words = ["recurrent", "latent", "routed"]
    answer = chat(client, max_tokens=20, temperature=1.0, extra_body={"structured_outputs": {"choice": words}})
    assert answer.choices[0].message.content in words


def test_structured_and_free_requests_share_a_batch(client) -> None:
    free = complete(client, max_tokens=24).choices[0].text
    form = {"structured_outputs": {"regex": "[ab]{20}"}}
    with ThreadPoolExecutor(4) as pool:
        constrained = [pool.submit(complete, client, max_tokens=30, extra_body=form) for _ in range(2)]
        unconstrained = [pool.submit(complete, client, max_tokens=24) for _ in range(2)]
    assert all(re.fullmatch("[ab]{20}", future.result().choices[0].text) for future in constrained)
    assert {future.result().choices[0].text for future in unconstrained} == {free}


TOOL = {
    "type": "function",
    "function": {
        "name": "set_expert",
        "description": "Choose an expert.",
        "strict": True,  # without it vLLM holds a call's arguments to JSON, not to their schema
        "parameters": {
            "type": "object",
            "properties": {"index": {"type": "integer", "minimum": 0, "maximum": 895}, "side": {"enum": ["left", "right"]}},
            "required": ["index", "side"],
            "additionalProperties": False,
        },
    },
}


def called(answer, stream: bool) -> tuple[str, str, str]:
    """Name and arguments of the first tool call of an answer, and the finish reason."""
    if not stream:
        call = answer.choices[0].message.tool_calls[0]
        return call.function.name, call.function.arguments, answer.choices[0].finish_reason
    parts = [part for chunk in answer for part in chunk.choices]
    pieces = [call for part in parts for call in part.delta.tool_calls or []]
    name = next(piece.function.name for piece in pieces if piece.function.name)
    finish = next(part.finish_reason for part in parts if part.finish_reason)
    return name, "".join(piece.function.arguments or "" for piece in pieces), finish


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "set_expert"}}], ids=["required", "named"]
)
def test_a_demanded_tool_is_called(client, tokenizer, choice, stream) -> None:
    # The grammar of a tool call allows white space anywhere, and a random model never tires of it.
    spaces = {str(token): -100.0 for token in tokenizer.convert_tokens_to_ids(["Ġ", "Ċ", "ĉ", "č"])}
    sampled = {"max_tokens": 160, "temperature": 1.0, "seed": 2, "logit_bias": spaces, "parallel_tool_calls": False}
    answer = chat(client, tools=[TOOL], tool_choice=choice, stream=stream, **sampled)
    name, arguments, _ = called(answer, stream)
    assert name == "set_expert"
    parsed = json.loads(arguments)
    assert 0 <= parsed["index"] <= 895
    assert parsed["side"] in ("left", "right")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_tool_that_the_model_chooses_is_found_by_the_parser(client, stream) -> None:
    """With `auto` the call is part of the text, in the form of the parser's model; here a grammar writes it."""
    call = r'<tool_call>\n\{"name": "set_expert", "arguments": \{"index": [1-9][0-9], "side": "(left|right)"\}\}\n</tool_call>'
    free = {**TOOL, "function": {key: value for key, value in TOOL["function"].items() if key != "strict"}}
    sampled = {"max_tokens": 160, "temperature": 1.0, "seed": 4, "extra_body": {"structured_outputs": {"regex": call}}}
    answer = chat(client, tools=[free], tool_choice="auto", stream=stream, **sampled)
    name, arguments, finish = called(answer, stream)
    assert (name, finish) == ("set_expert", "tool_calls")
    assert 10 <= json.loads(arguments)["index"] <= 99


def test_tools_may_be_left_alone(client) -> None:
    answer = chat(client, tools=[TOOL], tool_choice="none").choices[0]
    assert not answer.message.tool_calls
    assert answer.message.content


def test_a_conversation_with_a_tool_result_goes_on(client) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "set_expert", "arguments": '{"index": 5, "side": "left"}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "done"},
    ]
    assert chat(client, messages=messages, tools=[TOOL]).usage.completion_tokens > 0


def test_the_longest_prompt_is_served(client) -> None:
    answer = complete(client, prompt=[20] * (MAX_MODEL_LEN - 1), max_tokens=1)
    assert answer.usage.prompt_tokens == MAX_MODEL_LEN - 1
    assert answer.usage.completion_tokens == 1


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1], ids=["leaves no room", "one over"])
def test_a_longer_prompt_is_refused_and_the_server_lives(client, length) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, prompt=[20] * length, max_tokens=1)
    assert refused.value.status_code == 400
    assert re.search(rf"{MAX_MODEL_LEN}|max_tokens must be at least 1, got 0", str(refused.value))
    assert complete(client, max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 2}, {"n": 0}, {"extra_body": {"structured_outputs": {"regex": "("}}}], ids=str
)
def test_a_wrong_parameter_is_refused_and_the_server_lives(client, wrong) -> None:
    with pytest.raises((openai.BadRequestError, openai.UnprocessableEntityError)):
        complete(client, **wrong)
    assert complete(client, max_tokens=1).usage.completion_tokens == 1


def test_an_unknown_model_is_not_found(client) -> None:
    with pytest.raises(openai.NotFoundError):
        complete(client, model="another")


def test_a_client_that_leaves_frees_the_server(client) -> None:
    before = complete(client).choices[0].text
    stream = complete(client, max_tokens=400, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert complete(client).choices[0].text == before


def test_a_cached_prefix_changes_nothing(client) -> None:
    prompt = "a prefix that fills more than one block of the cache " * 8
    first, again = (complete(client, prompt=prompt, max_tokens=8).choices[0].text for _ in range(2))
    assert first == again


def fetch(server, path: str) -> str:
    with urllib.request.urlopen(server.url + path, timeout=60) as answer:
        return answer.read().decode()


def test_the_report_accounts_for_the_steps(client, server) -> None:
    complete(client, max_tokens=20, extra_body={"ignore_eos": True})
    report = json.loads(fetch(server, "/k3fast/report"))
    (rank,) = report["ranks"]
    assert rank["deployment"]["selected"] is True
    assert rank["deployment"]["refusals"] == []
    steps = rank["steps"]
    assert steps["fast"]["steps"] > 0
    assert steps["standard"]["decode_tokens"] < steps["standard"]["tokens"]
    assert steps["by_reason"]["step_prefill"] == steps["standard"]["steps"], "a step without a prompt was standard"
    assert set(steps["by_reason"]) <= {"step_prefill", "step_too_many_tokens"}
    assert rank["violations"]["by_reason"] == {}


def test_the_series_agree_with_the_report(client, server) -> None:
    complete(client, max_tokens=4)
    metrics = fetch(server, "/metrics")
    assert "vllm:generation_tokens_total" in metrics
    counted = re.search(r'^k3fast_steps_total\{.*path="fast".*\} (\S+)', metrics, flags=re.MULTILINE)
    assert counted is not None
    assert float(counted[1]) > 0


def test_the_server_keeps_to_its_memory(client, server) -> None:
    assert server.memory_bytes() < 4 * 2**30
