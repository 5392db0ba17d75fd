"""What vLLM's CPU platform takes away from MLA models, given back to this one, and what that asks of the CPU runner.

The platform switches chunked prefill and prefix caching off for MLA, forces a block of 16 tokens and raises the token budget to
the model length, because its own MLA kernels need it. This model's MLA needs none of it: cache rows are gathered by index.

And the block's size: a hybrid model's block has to hold a KDA slot. vLLM widens it for that in the workers and tells the
scheduler, in another process, whose configuration then goes through the platform once more, which says 16 or 128 tokens again.
The scheduler ends the chunks of a prompt where it takes blocks to end, since a state is kept there for whoever shares the
prefix: so it ended them elsewhere, and the next request went on from a state of other tokens. Here the platform widens the
block whenever it is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

ARCHITECTURES = ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration")
MUTATIONS = "kimi_k3_fast_mutations"
"""Key of `additional_config` under which what was changed travels to the workers: [name, before, after, why] each, as text."""

_MARK = "_kimi_k3_fast_restores_chunking"
_SPARES = "_kimi_k3_fast_spares_generators"


def restore_chunking(inspect: Callable[[Any], object] = lambda vllm_config: None) -> bool:
    """Wrap `CpuPlatform.check_and_update_config` so that the options of this model's deployments survive it.

    `inspect` sees the configuration of such a deployment first, and may raise. Safe to call twice. Returns whether the current
    platform is a CPU, that is, whether the wrapper stands.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    platform = type(current_platform)
    original = platform.check_and_update_config
    if getattr(original, _MARK, False):
        return True

    @classmethod  # type: ignore[misc]
    @wraps(original.__func__)
    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        if not _is_ours(vllm_config):
            original.__func__(cls, vllm_config)
            return
        inspect(vllm_config)
        kept = _options(vllm_config)
        original.__func__(cls, vllm_config)
        for (owner, name), value in kept.items():
            _put_back(vllm_config, owner, name, value)
        _widen_block(cls, vllm_config)

    setattr(check_and_update_config.__func__, _MARK, True)  # type: ignore[attr-defined]
    platform.check_and_update_config = check_and_update_config
    return True


def _put_back(vllm_config: Any, owner: str, name: str, value: Any) -> None:
    taken = getattr(getattr(vllm_config, owner), name)
    if taken == value:
        return
    setattr(getattr(vllm_config, owner), name, value)
    why = "vLLM's CPU platform changes it for its own MLA kernels, which this model does not use"
    _note(vllm_config, f"{owner}.{name}", taken, value, why)


def _widen_block(platform: Any, vllm_config: Any) -> None:
    """The block of the workers, by vLLM's own rule, in this process."""
    from .backend import MLABackend

    before = vllm_config.cache_config.block_size
    platform._align_hybrid_block_size(vllm_config, MLABackend)
    after = vllm_config.cache_config.block_size
    if after != before:
        why = "a block has to hold a KDA slot; else the scheduler ends the chunks of a prompt where no state is kept"
        _note(vllm_config, "cache_config.block_size", before, after, why)


def spare_generators(vllm_config: Any) -> None:
    """Keep the random generators of seeded requests out of steps whose sample is thrown away. Safe to call twice.

    A chunk of a prompt that is not the last one is sampled like any other, and the runner then turns the request's generator back
    by an offset. Generators on CPUs have none: the engine dies of the first seeded request with a prompt in chunks. So such a
    request has no generator in that step, and the sample nobody sees is drawn from the process' own.
    """
    module = sys.modules.get("vllm.v1.worker.cpu_model_runner")
    if module is None or getattr(module.CPUModelRunner.sample_tokens, _SPARES, False):
        return
    original = module.CPUModelRunner.sample_tokens

    @wraps(original)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        spared = {}
        if self.execute_model_state is not None and _is_ours(self.vllm_config):
            batch = self.input_batch
            unfinished = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
            spared = {row: batch.generators.pop(row) for row in unfinished if row in batch.generators}
        try:
            return original(self, grammar_output)
        finally:
            self.input_batch.generators.update(spared)

    setattr(sample_tokens, _SPARES, True)
    module.CPUModelRunner.sample_tokens = sample_tokens
    why = "vLLM turns the generator of a seeded request back after each chunk of its prompt, which CPU generators cannot do"
    after = "leaves out generators of unfinished prompts"
    _note(vllm_config, "CPUModelRunner.sample_tokens", "as released", after, why)


def _note(vllm_config: Any, name: str, before: object, after: object, why: str) -> None:
    additional = getattr(vllm_config, "additional_config", None)
    if isinstance(additional, dict):
        additional.setdefault(MUTATIONS, []).append([name, str(before), str(after), why])


def _is_ours(vllm_config: Any) -> bool:
    model = vllm_config.model_config
    return model is not None and model.architecture in ARCHITECTURES


def _options(vllm_config: Any) -> dict[tuple[str, str], Any]:
    names = [
        ("scheduler_config", "enable_chunked_prefill"),
        ("scheduler_config", "max_num_batched_tokens"),
        ("cache_config", "enable_prefix_caching"),
    ]
    if vllm_config.cache_config.user_specified_block_size:
        names.append(("cache_config", "block_size"))
    return {(owner, name): getattr(getattr(vllm_config, owner), name) for owner, name in names}
