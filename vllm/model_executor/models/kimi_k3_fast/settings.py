"""The fork's settings: one frozen object from `additional_config["kimi_k3_fast"]` and the environment, read once at start.

`vllm serve MODEL --additional-config '{"kimi_k3_fast": {"mode": "require", "shadow": {"every": 100}}}'`

An unknown key, a wrong type or a value out of range is an error that names what was found and lists what is known: a setting
that is quietly ignored is worse than a server that does not start. Nothing else in the package reads the environment.
"""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .reasons import Level, Reason

KEY = "kimi_k3_fast"
ENVIRONMENT = "VLLM_KIMI_K3_FAST"  # the same JSON object; `--additional-config` wins key by key


class SettingsError(ValueError):
    """The settings cannot be used; the message says what was expected and found."""


@dataclass(frozen=True)
class Sampling:
    """Do something on every N-th fast step; 0 is never."""

    every: int = field(default=0, metadata={"low": 0})


@dataclass(frozen=True)
class Events:
    """The JSONL event file: empty path, no file. Rotated at `max_mib`, `keep` old files stay."""

    path: str = ""
    max_mib: int = field(default=64, metadata={"low": 1})
    keep: int = field(default=3, metadata={"low": 0})


@dataclass(frozen=True)
class Settings:
    """Everything an operator can set.

    mode: `auto` takes the fast path where it can; `require` refuses to start, and fails requests, where it cannot; `off` never.
    policy: what a violation does: `report` counts it, `quarantine` also retires the plan key to the standard path, `stop` ends
        the server.
    allow: step-level reason codes that `require` accepts for a decode step.
    max_tokens: largest decode step (tokens, padding included) that is planned.
    audit, shadow: sampled checks of the state outside a step's write-set, and of a fast step against the standard path.
    agree_every: steps between comparisons of the ranks' decisions.
    summary_seconds: interval of the log line; 0 is never.
    allow_unvalidated: take the fast path also where recorded runs do not carry it: kernels that have run on no such GPU, or a
        deployment beyond `scope.rules.EVIDENCE`.
    exchange: how ranks sum on GPUs: `stock`, vLLM's all-reduce; `mailbox`, over NVLink memory inside our launches (2, 4 or 8
        ranks of one host); `auto`, mailboxes where NVLink joins such ranks, else stock's (`fast/cuda_exchange.py`).
    posted_tokens: largest batch whose sums of o_proj and MoE are posted to mailboxes and added up by AttnRes behind them, where
        one trip over the link is enough; beyond it they are added up where they are made. On two H200s it cost a microsecond a
        layer at batch 1 and 8 and gained three at 64.
    cpu_kernels: operators of the fast path on CPUs: `auto` takes C++ on the machine's best instruction set, or PyTorch where
        there is no library; `torch` is PyTorch; an instruction set's name forces that one.
    """

    mode: Literal["auto", "require", "off"] = "auto"
    policy: Literal["report", "quarantine", "stop"] = "quarantine"
    allow: tuple[str, ...] = ()
    max_tokens: int = field(default=64, metadata={"low": 1, "high": 64})
    audit: Sampling = Sampling()
    shadow: Sampling = Sampling()
    events: Events = Events()
    agree_every: int = field(default=256, metadata={"low": 1})
    summary_seconds: float = field(default=60.0, metadata={"low": 0})
    allow_unvalidated: bool = False
    exchange: Literal["auto", "stock", "mailbox"] = "auto"
    posted_tokens: int = field(default=0, metadata={"low": 0, "high": 64})
    cpu_kernels: Literal["auto", "torch", "portable", "avx2", "avx512", "avx512bf16"] = "auto"

    def __post_init__(self) -> None:
        known = sorted(r.code for r in Reason if r.level is Level.STEP)
        for code in self.allow:
            if code not in known:
                raise SettingsError(f"{KEY}.allow: expected step-level reason codes, found {code!r}; known: {', '.join(known)}")


def _read(kind: Any, value: Any, where: str, bounds: Mapping[str, float]) -> Any:
    """`value` checked against the annotated type `kind`; raises SettingsError naming `where`."""
    if dataclasses.is_dataclass(kind):
        return _read_object(typing.cast(type, kind), value, where)
    origin = typing.get_origin(kind)
    if origin is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise SettingsError(f"{where}: expected one of {', '.join(map(repr, choices))}, found {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise SettingsError(f"{where}: expected a list of strings, found {value!r}")
        return tuple(value)
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
        raise SettingsError(f"{where}: expected {kind.__name__}, found {type(value).__name__} {value!r}")
    for name, sign in (("low", 1), ("high", -1)):
        if name in bounds and sign * value < sign * bounds[name]:
            limit = "at least" if name == "low" else "at most"
            raise SettingsError(f"{where}: expected {limit} {bounds[name]}, found {value!r}")
    return kind(value)


def _read_object(kind: type, value: Any, where: str) -> Any:
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if not isinstance(value, Mapping):
        raise SettingsError(f"{where}: expected an object with keys {', '.join(fields)}, found {type(value).__name__} {value!r}")
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise SettingsError(f"{where}: unknown key {', '.join(map(repr, unknown))}; known keys: {', '.join(fields)}")
    hints = typing.get_type_hints(kind)
    read = {name: _read(hints[name], item, f"{where}.{name}", fields[name].metadata) for name, item in value.items()}
    return kind(**read)


def from_object(value: Mapping[str, Any]) -> Settings:
    """Settings from the value of `additional_config["kimi_k3_fast"]`. Raises SettingsError."""
    return _read_object(Settings, value, KEY)


def load(additional_config: Any, environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from vLLM's `additional_config` (a mapping or None) over the JSON in VLLM_KIMI_K3_FAST. Raises SettingsError."""
    text = (os.environ if environ is None else environ).get(ENVIRONMENT, "")
    base: Any = {}
    if text:
        try:
            base = json.loads(text)
        except json.JSONDecodeError as error:
            raise SettingsError(f"{ENVIRONMENT}: expected a JSON object, found {text!r} ({error})") from None
        if not isinstance(base, dict):
            raise SettingsError(f"{ENVIRONMENT}: expected a JSON object, found {text!r}")
    given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise SettingsError(f"{KEY}: expected an object, found {type(given).__name__} {given!r}")
    return from_object({**base, **given})


def as_dict(settings: Settings) -> dict[str, Any]:
    """Plain JSON form, for reports."""
    return dataclasses.asdict(settings)
