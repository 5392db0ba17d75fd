"""Every rule refuses what it names, alone; all rules are asked; what is in scope is not refused."""

import dataclasses
from pathlib import Path

import pytest

from vllm.model_executor.models.kimi_k3_fast.reasons import Level, Reason
from vllm.model_executor.models.kimi_k3_fast.scope import Deployment, refusals, rules
from vllm.model_executor.models.kimi_k3_fast.settings import Settings

PLAIN, AUTO = Deployment(attention_heads=8, kda_heads=8), Settings()
REFUSED = [
    ({"architecture": "LlamaForCausalLM"}, Reason.MODEL_NOT_K3),
    ({"device_arch": "sm_100a"}, Reason.UNVALIDATED),
    ({"device_arch": "sm_80a"}, Reason.OP_ARCH),
    ({"dtype": "float16"}, Reason.DTYPE),
    ({"kv_cache_dtype": "fp8"}, Reason.CACHE_DTYPE),
    ({"tensor_parallel": 3}, Reason.OP_SHAPE),
    ({"pipeline_parallel": 2}, Reason.PIPELINE_PARALLEL),
    ({"data_parallel": 2}, Reason.DATA_PARALLEL),
    ({"prefill_context_parallel": 2}, Reason.CONTEXT_PARALLEL),
    ({"decode_context_parallel": 2}, Reason.CONTEXT_PARALLEL),
    ({"expert_parallel": True}, Reason.EXPERT_PARALLEL),
    ({"eplb": True}, Reason.EPLB),
    ({"dbo": True}, Reason.DBO),
    ({"lora": True}, Reason.LORA),
    ({"speculation": "ngram"}, Reason.SPECULATION),
    ({"kv_connector": "NixlConnector"}, Reason.KV_CONNECTOR),
    ({"sleep_mode": True}, Reason.SLEEP_MODE),
    ({"prompt_embeds": True}, Reason.PROMPT_EMBEDS),
    ({"replay_ssm": True}, Reason.REPLAY_SSM),
    ({"features": ("no AttnRes",)}, Reason.MODEL_FEATURES),
    ({"offload": True}, Reason.OFFLOAD),
    ({"state_dtype": "bfloat16"}, Reason.STATE_LAYOUT),
    ({"options": ("batch invariance",)}, Reason.OPTIONS),
]
CUDA = dataclasses.replace(
    PLAIN, attention_heads=96, kda_heads=96, platform="cuda", device_arch="sm_90a", runner="v2", cudagraph="full_and_piecewise"
)
REFUSED_ON_CUDA = [
    ({"device_arch": "sm_80a"}, Reason.OP_ARCH),
    ({"dtype": "float32"}, Reason.DTYPE),
    ({"kv_cache_dtype": "float32"}, Reason.CACHE_DTYPE),
    ({"kv_cache_dtype": "fp8"}, Reason.CACHE_DTYPE),
    ({"runner": "v1"}, Reason.RUNNER),
    ({"cudagraph": "none"}, Reason.CUDA_GRAPHS),
    ({"cudagraph": "piecewise"}, Reason.CUDA_GRAPHS),
    ({"state_dtype": "bfloat16"}, Reason.STATE_LAYOUT),
    ({"conv_layout": "DS"}, Reason.STATE_LAYOUT),
    ({"tensor_parallel": 3}, Reason.OP_SHAPE),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4, 8])
def test_in_scope(dtype, tensor_parallel):
    assert refusals(dataclasses.replace(PLAIN, dtype=dtype, tensor_parallel=tensor_parallel), Settings()) == ()


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=lambda v: v.code if isinstance(v, Reason) else "")
def test_each_rule_refuses_alone_and_says_what_it_found(change, reason):
    found = refusals(dataclasses.replace(PLAIN, **change), Settings())
    assert [r.reason for r in found] == [reason]
    value = next(iter(change.values()))
    assert value is True or str(value[0] if isinstance(value, tuple) else value) in found[0].detail


@pytest.mark.parametrize(("change", "reason"), REFUSED_ON_CUDA, ids=lambda v: v.code if isinstance(v, Reason) else "")
def test_each_rule_of_gpus_refuses_alone_and_says_what_it_found(change, reason):
    lifted = Settings(allow_unvalidated=True)
    assert refusals(CUDA, lifted) == ()
    found = refusals(dataclasses.replace(CUDA, **change), lifted)
    assert [r.reason for r in found] == [reason]
    assert str(next(iter(change.values()))) in found[0].detail


@pytest.mark.parametrize("name", rules.CPU_SIZES)
def test_a_size_that_the_cpu_operators_do_not_take_is_refused_before_a_step(name, monkeypatch):
    """`tests/ops_cpu/test_edges.py` holds the bounds to what the library refuses."""
    low, high, multiple = rules.CPU_SIZES[name]

    def found(size, settings=AUTO, plain=PLAIN):
        return refusals(dataclasses.replace(plain, sizes=((name, size),)), settings)

    assert found(low) == found(high) == ()
    for size in {low - multiple, high + multiple, high + 1} | ({low + multiple // 2} if multiple > 1 else set()):
        refusal = found(size)
        assert [r.reason for r in refusal] == [Reason.OP_SHAPE]
        assert name in refusal[0].detail and str(size) in refusal[0].detail
        assert len(found(size, Settings(cpu_kernels="torch"))) == (name in rules.PYTORCH_SIZES)
        assert found(size, Settings(allow_unvalidated=True), CUDA) == (), "the bounds are the CPU's"
    monkeypatch.setitem(rules.CPU_SIZES, name, (0, 2**40, 1))
    assert found(high + 1) == (), "without its bound nothing else refuses the size"


CARRIED = dataclasses.replace(CUDA, device="NVIDIA H200", sizes=(("MLA heads", 12), ("expert width", 384)))


@pytest.mark.parametrize(
    "change",
    [
        {"device_arch": "sm_100a", "device": "NVIDIA B200"},
        {"device_arch": "sm_103a", "device": "NVIDIA B300"},
        {"device": "NVIDIA H100 80GB HBM3"},
        {"tensor_parallel": 2},
        {"tensor_parallel": 16},
        {"sizes": (("MLA heads", 96), ("expert width", 3072))},
        {"sizes": (("MLA heads", 12), ("expert width", 448))},
    ],
    ids=str,
)
def test_beyond_what_was_run_on_a_gpu_the_operator_has_to_say_so(change):
    assert refusals(CARRIED, Settings()) == ()
    beyond = dataclasses.replace(CARRIED, **change)
    (found,) = refusals(beyond, Settings())
    assert found.reason is Reason.UNVALIDATED
    value = next(iter(change.values()))
    assert str(value[-1][1] if isinstance(value, tuple) else value) in found.detail
    assert "allow_unvalidated" in found.detail
    assert refusals(beyond, Settings(allow_unvalidated=True)) == ()


def test_all_that_no_run_carries_is_named_at_once():
    beyond = dataclasses.replace(
        CARRIED, device="NVIDIA GH200", tensor_parallel=4, sizes=(("MLA heads", 24), ("expert width", 768))
    )
    (found,) = refusals(beyond, Settings())
    assert all(part in found.detail for part in ("GH200", "TP 4", "MLA heads", "expert width"))


def test_all_reasons_are_given_at_once():
    changes = {k: v for change, _ in REFUSED for k, v in change.items()}
    found = {r.reason for r in refusals(dataclasses.replace(PLAIN, **changes), Settings(mode="off"))}
    assert found == {reason for _, reason in REFUSED} - {Reason.UNVALIDATED} | {Reason.MODE_OFF}


def test_every_deployment_reason_has_a_rule():
    covered = {reason for _, reason in REFUSED + REFUSED_ON_CUDA} | {Reason.MODE_OFF}
    elsewhere = {Reason.BASE_VERSION}
    source = Path(rules.__file__).read_text(encoding="utf-8")
    named = {r for r in Reason if r.level is Level.DEPLOYMENT and r.name in source}
    assert named - elsewhere == covered - elsewhere


def test_readers_find_every_refusal_in_the_table_of_support():
    table = (Path(__file__).parents[2] / "docs/support.md").read_text(encoding="utf-8").partition("## Refused")[2]
    missing = {reason.code for _, reason in REFUSED + REFUSED_ON_CUDA if f"`{reason.code}`" not in table}
    assert not missing
