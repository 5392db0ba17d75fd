"""lm-eval's model for an OpenAI-compatible chat server, with a record of every request.

lm-eval's own client keeps neither finish reasons nor usage, slices prompts to lengths it guesses, sends other stop sequences
when requests are concurrent, gives every repeat the same seed, and loses all results when one request fails. Here a prompt goes
out whole, as messages, and what came back is written down as it arrives; a failed request scores as an empty reply and stays on
record as failed, for the gate to judge.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

PASSED_ON = ("temperature", "top_p", "top_k", "min_p", "presence_penalty")  # generation_kwargs sent as they are
UNSENT = ("until", "do_sample", "max_gen_toks")
FINISHED = ("stop", "tool_calls")


@dataclass(frozen=True)
class Reply:
    """One request's account. `finish` is the server's word, empty when it gave none; `error` is empty when it answered."""

    task: str
    item: int
    seed: int
    prompt_sha256: str
    prompt_characters: int
    text: str
    reasoning: str
    finish: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    error: str

    @property
    def truncated(self) -> bool:
        return self.finish == "length"

    @property
    def unexplained(self) -> bool:
        """Answered, but the server did not say that the reply is complete or that it ran into the limit."""
        return not self.error and self.finish not in (*FINISHED, "length")


def as_messages(prompt: str) -> list[dict[str, Any]]:
    """A prompt that is a JSON list of messages is that chat; any other text is one user message."""
    if prompt.startswith("["):
        try:
            parsed = json.loads(prompt)
        except json.JSONDecodeError:
            parsed = None
        if isinstance(parsed, list) and parsed and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in parsed):
            return parsed
    return [{"role": "user", "content": prompt}]


class RecordedChat(LM):
    """`url`: the server's root, without `/v1`. `seed` goes with every request; distinct runs take distinct seeds.

    `waves`: by task, how many requests go out together. A wave is answered whole before the next one is sent: with requests
    trickling in, most decode steps would also hold some prompt's tokens, and those run on the standard path by design.
    `log`: a JSONL file that gets each `Reply` when it arrives. `extra_body` is merged into every request.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        seed: int,
        waves: Mapping[str, int],
        log: Path,
        timeout: float = 3600.0,
        api_key: str = "none",
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.url, self.model, self.seed, self.waves = url.rstrip("/"), model, seed, waves
        self.log, self.timeout, self.api_key, self.extra_body = log, timeout, api_key, dict(extra_body or {})
        self.replies: list[Reply] = []
        self._lock = threading.Lock()

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        found: list[Reply] = []
        with self.log.open("a", encoding="utf-8") as out, ThreadPoolExecutor(max(self.waves.values())) as pool:
            for task, instances in itertools.groupby(requests, lambda instance: str(instance.task_name)):
                for wave in _chunks(list(instances), self.waves[task]):
                    found += pool.map(lambda instance: self._one(instance, out), wave)
        self.replies += found
        return [reply.text for reply in found]

    def _one(self, instance: Instance, out: Any) -> Reply:
        prompt, options = instance.args
        payload = self._payload(prompt, options)
        begun = time.monotonic()
        answer: dict[str, Any] = {}
        error = ""
        try:
            answer = self._post(payload)
            choice = answer["choices"][0]
            message, finish = choice["message"], choice.get("finish_reason") or ""
        except (OSError, ValueError, KeyError, IndexError, TypeError) as problem:
            message, finish, error = {}, "", _describe(problem)
        usage = answer.get("usage") or {}
        reply = Reply(
            task=str(instance.task_name),
            item=int(instance.doc_id or 0),
            seed=self.seed,
            prompt_sha256=hashlib.sha256(prompt.encode()).hexdigest(),
            prompt_characters=sum(len(str(m["content"])) for m in as_messages(prompt)),
            text=message.get("content") or "",
            reasoning=message.get("reasoning") or message.get("reasoning_content") or "",
            finish=finish,
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
            seconds=round(time.monotonic() - begun, 3),
            error=error,
        )
        with self._lock:
            out.write(json.dumps(asdict(reply)) + "\n")
            out.flush()
        return reply

    def _payload(self, prompt: str, options: Mapping[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(options) - {*PASSED_ON, *UNSENT})
        if unknown:
            raise ValueError(
                f"generation_kwargs: expected {', '.join((*PASSED_ON, *UNSENT))}, found {', '.join(unknown)} as well"
            )
        until = options.get("until") or []
        sampled = options.get("do_sample", False)
        payload = {
            "model": self.model,
            "messages": as_messages(prompt),
            "max_tokens": int(options["max_gen_toks"]),
            "seed": self.seed,
            **{name: options[name] for name in PASSED_ON if name in options},
            **self.extra_body,
        }
        if not sampled:
            payload["temperature"] = 0.0
        if until:
            payload["stop"] = [until] if isinstance(until, str) else list(until)
        return payload

    def _post(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(payload).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self.api_key}"},
        )
        with urllib.request.urlopen(request, timeout=self.timeout) as answer:
            return json.load(answer)

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError("expected a generating task, found one that compares likelihoods: chat servers give none")

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        raise NotImplementedError("expected a generating task, found one that sums likelihoods: chat servers give none")


def _chunks(instances: Sequence[Instance], size: int) -> Iterator[Sequence[Instance]]:
    return (instances[i : i + size] for i in range(0, len(instances), size))


def _describe(problem: BaseException) -> str:
    body = ""
    if isinstance(problem, urllib.error.HTTPError):
        body = ": " + problem.read(500).decode(errors="replace")
    return f"{type(problem).__name__}: {problem}{body}"
