"""Settings: every wrong value is refused with what was expected and found."""

import pytest

from vllm.model_executor.models.kimi_k3_fast import settings


def test_defaults_and_override_order():
    read = settings.load({"kimi_k3_fast": {"mode": "off"}}, {settings.ENVIRONMENT: '{"mode": "require", "audit": {"every": 7}}'})
    assert (read.mode, read.audit.every, read.policy) == ("off", 7, "quarantine")
    assert settings.load(None, {}) == settings.Settings()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"modes": "auto"}, ["unknown key 'modes'", "known keys: mode, policy, allow"]),
        ({"mode": "fast"}, ["kimi_k3_fast.mode", "'auto', 'require', 'off'", "'fast'"]),
        ({"max_tokens": "64"}, ["kimi_k3_fast.max_tokens", "expected int", "str '64'"]),
        ({"max_tokens": True}, ["expected int", "bool True"]),
        ({"max_tokens": 65}, ["at most 64", "65"]),
        ({"shadow": {"every": -1}}, ["kimi_k3_fast.shadow.every", "at least 0"]),
        ({"shadow": 5}, ["kimi_k3_fast.shadow", "object with keys every", "int 5"]),
        ({"events": {"file": "x"}}, ["kimi_k3_fast.events", "'file'", "path, max_mib, keep"]),
        ({"allow": ["mode_off"]}, ["step-level", "'mode_off'", "step_prefill"]),
        ({"allow": "step_prefill"}, ["list of strings"]),
    ],
)
def test_bad_value_names_expected_and_found(given, says):
    with pytest.raises(settings.SettingsError) as error:
        settings.from_object(given)
    assert all(part in str(error.value) for part in says), str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_malformed_environment_is_an_error_not_ignored(text):
    with pytest.raises(settings.SettingsError, match=settings.ENVIRONMENT):
        settings.load({}, {settings.ENVIRONMENT: text})


def test_settings_of_other_plugins_are_left_alone():
    assert settings.load({"kda_prefill_backend": "auto"}, {}) == settings.Settings()
    with pytest.raises(settings.SettingsError, match="expected an object, found str"):
        settings.load({"kimi_k3_fast": "auto"}, {})
