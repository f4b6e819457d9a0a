import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observability.redact import REDACTED, is_secret, redact, scrub


@pytest.mark.parametrize(
    "name",
    ["key", "api_key", "x-api-key", "Authorization", "prompt", "output_text", "text", "content", "messages",
     "apikey", "SLUICE_ADMIN_KEY", "password", "client.secret", "raw_prompt"],
)  # fmt: skip
def test_names_of_secrets_and_of_callers_text_are_known(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["key_id", "prompt_version", "context_too_long", "tenant", "route", "trace_id"]
)
def test_harmless_names_stay_readable(name: str) -> None:
    assert not is_secret(name)


def test_counts_pass_under_any_name() -> None:
    assert redact("prompt_tokens", 12) == 12
    assert redact("text", None) is None


def test_redaction_reaches_into_nested_values() -> None:
    value = {
        "headers": {"authorization": "Bearer abc"},
        "messages": [{"role": "user", "content": "hi"}],
        "n": 1,
    }
    assert redact("request", value) == {"headers": {"authorization": REDACTED}, "messages": REDACTED, "n": 1}


def test_credentials_inside_other_text_are_found_by_shape() -> None:
    assert "hunter2" not in scrub("cannot connect to postgresql://app:hunter2@db:5432/x")
    assert "abc.def" not in scrub("got header Bearer abc.def here")
    assert "sk-live" not in scrub("key sk-live-1234")
    assert scrub("http://127.0.0.1:8000/v1") == "http://127.0.0.1:8000/v1"


def test_after_key_and_a_colon_only_what_looks_like_a_secret_is_hidden() -> None:
    for message in (
        "invalid key: gpus",
        "models.key: allowed: a, b",
        "a missing token: end",
        '{"key": "r1"}',
    ):
        assert scrub(message) == message
    for secret in ("abcd1234", "correct-horse-battery", "0123456789abcdef"):
        for text in (
            f"key: {secret}",
            f'"token": "{secret}"',
            f"key={secret[:4]}",
            f'"api_key": "{secret[:4]}"',
        ):
            assert secret[:4] not in scrub(text)


def test_an_exception_is_shown_by_class_and_scrubbed_message() -> None:
    assert redact("error", OSError("redis://:pw@h/0 refused")) == f"OSError: redis://:{REDACTED}@h/0 refused"


@given(st.recursive(
    st.none() | st.integers() | st.just("SECRET"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("text"), inner, max_size=1)
    | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
    max_leaves=20,
))  # fmt: skip
def test_nothing_below_a_secret_name_is_ever_shown(value: object) -> None:
    assert "SECRET" not in repr(redact("authorization", value))


@pytest.mark.parametrize(
    "text",
    [
        "secret" * 50_000,
        "secret-" * 50_000 + "=",
        "secret" + " " * 300_000,
        "eyJ-" * 75_000,
        "a." * 150_000 + "://",
        "x://:" * 60_000,
        "bearer" + " " * 300_000,
        "key:" * 75_000,
    ],
)
def test_the_time_grows_with_a_callers_text_not_with_its_square(text: str) -> None:
    began = time.process_time()
    scrub(text)
    assert time.process_time() - began < 2
