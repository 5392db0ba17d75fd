"""The server computes what training computed: vLLM's log-probabilities of an exported model against train's own PyTorch model.

The two implementations share no code. Prompts go through the engine's own scheduler with a token budget below their length, so
the recurrent state crosses a chunk boundary and requests share steps; every position of every prompt but its last is compared.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

LENGTHS = (150, 61, 3)
TOKEN_BUDGET = 128


@pytest.fixture(scope="module")
def training():
    """train's modules."""
    import export
    import model

    import train

    return model, export, train


@pytest.fixture(scope="module")
def exported(training, tmp_path_factory: pytest.TempPathFactory):
    """A small model in which every parameter matters, exported, and the float32 model that its files describe."""
    model, export, train = training
    torch.manual_seed(5)
    net = model.TinyK3(train.MICRO)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.dim() == 1 or "res_proj" in name:  # norms, dt_bias, A_log, mixtures: away from their neutral start
                p += 0.3 * torch.randn_like(p)
        for name, buffer in net.named_buffers():
            if name.endswith("correction_bias"):
                buffer += 0.1 * torch.randn_like(buffer)
    folder = tmp_path_factory.mktemp("exported")
    export.save_checkpoint(net, folder, {"seed": "5"})
    reread = model.TinyK3(train.MICRO)
    export.load_checkpoint(folder, train.MICRO, reread)
    return folder, reread


@torch.no_grad()
def train_logprobs(training, net, prompt: list[int]) -> torch.Tensor:
    model, _, _ = training
    shapes = [(1, len(prompt))]
    hidden, _, _ = net(torch.tensor(prompt), model.positions(shapes, "cpu"), shapes)
    return torch.log_softmax(net.logits(hidden), -1)


def served_logprobs(folder: Path, prompts: list[list[int]], dtype: str) -> list[torch.Tensor]:
    """[tokens - 1, vocabulary] per prompt, from the engine: the distribution after each token but the last."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(folder), dtype=dtype, max_model_len=512, max_num_batched_tokens=TOKEN_BUDGET, max_num_seqs=4, max_logprobs=-1, seed=0
    )
    try:
        outputs = engine.generate(
            [{"prompt_token_ids": p} for p in prompts], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=-1)
        )
    finally:
        engine.llm_engine.engine_core.shutdown()
    found = []
    for output in outputs:
        rows = output.prompt_logprobs[1:]
        found.append(torch.tensor([[row[i].logprob for i in range(len(row))] for row in rows]))
    return found


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_gives_training_s_distributions(training, exported, monkeypatch, dtype: str) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"))
    model, export, train = training
    folder, net = exported
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(16, 1024, (n,), generator=generator).tolist() for n in LENGTHS]
    served = served_logprobs(folder, prompts, dtype)
    expected = [train_logprobs(training, net, p)[:-1] for p in prompts]
    assert [s.shape for s in served] == [e.shape for e in expected]
    difference = torch.cat([(s - e).abs().flatten() for s, e in zip(served, expected, strict=True)])
    if dtype == "float32":  # the same numbers, summed in another order
        assert difference.max() < 3e-4
        assert difference.mean() < 1e-5
        return
    # In bfloat16 a near tie between experts falls either way and moves a token's logits visibly, so single values have no bound.
    # The yardstick is what rounding to bfloat16 does to training's own model.
    rounded = model.TinyK3(train.MICRO, dtype=torch.bfloat16)
    export.load_checkpoint(folder, train.MICRO, rounded)
    own = [train_logprobs(training, rounded, p)[:-1] for p in prompts]
    yardstick = torch.cat([(o - e).abs().flatten() for o, e in zip(own, expected, strict=True)])
    assert difference.mean() < 2 * yardstick.mean(), (difference.mean(), yardstick.mean())
    assert difference.quantile(0.9) < 2 * yardstick.quantile(0.9), (difference.quantile(0.9), yardstick.quantile(0.9))
