"""docs/guard.md and docs/patches.md are what their generators say, and name everything there is."""

from pathlib import Path

from vllm.model_executor.models.kimi_k3_fast.guard import core, reference
from vllm.model_executor.models.kimi_k3_fast.patches import reference as patch_reference
from vllm.model_executor.models.kimi_k3_fast.reasons import Level, Reason

ROOT = Path(__file__).parents[2]


def test_the_documents_are_up_to_date():
    assert (ROOT / "docs/guard.md").read_text() == reference.document()
    assert (ROOT / "docs/patches.md").read_text() == patch_reference.document()


def test_every_reason_says_what_it_means_and_what_to_do():
    assert set(reference.LEVELS) == set(Level)
    assert len({reason.code for reason in Reason}) == len(list(Reason)), "an alias in the enum hides a reason"
    for reason in Reason:
        assert reason.code == reason.code.lower() and reason.meaning.endswith(".") and reason.action.endswith("."), reason


def test_every_counter_is_documented():
    import re

    package = Path(core.__file__).parents[1]
    sources = "".join(path.read_text() for room in ("guard", "fast") for path in (package / room).glob("*.py"))
    used = set(re.findall(r'count\("(\w+)"', sources)) | set(re.findall(r'_counts\["(\w+)"\]', sources))
    used |= {f"slots_{kind}" for kind in ("allocated", "shared", "copied", "freed")}
    assert used == set(reference.COUNTERS)
