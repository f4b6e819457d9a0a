from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.errors import ConfigError
from gateway.state.url import parse_state_url
from gateway.wiring.state_store import copies_folder, make_limit_store


@pytest.mark.parametrize(
    ("url", "kind", "shown"),
    [
        ("sqlite:///sluice.db", "sqlite", "sqlite:///sluice.db"),
        ("sqlite:////var/lib/sluice.db", "sqlite", "sqlite:////var/lib/sluice.db"),
        ("redis://localhost", "redis", "redis://localhost:6379"),
        ("redis://ann:s3cret@host:7000/2", "redis", "redis://host:7000/2"),
        ("rediss://:s3cret@[::1]/0?password=s3cret", "redis", "rediss://[::1]:6379/0"),
        ("memory://", "memory", "memory://"),
    ],
)
def test_a_url_tells_its_kind_and_shows_no_password(url: str, kind: str, shown: str) -> None:
    parsed = parse_state_url(url)
    assert (parsed.kind, parsed.shown) == (kind, shown)
    assert "s3cret" not in repr(parsed)


def test_the_file_of_a_sqlite_url_is_relative_with_three_slashes_and_absolute_with_four() -> None:
    assert parse_state_url("sqlite:///a/s.db").path == Path("a/s.db")
    assert parse_state_url("sqlite:////a/s.db").path == Path("/a/s.db")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "sluice.db",
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///s.db?mode=ro",
        "redis://",
        "redis://:s3cret@host:port/",
        "postgresql://ann:s3cret@host/db",
        "redis://[s3cret",
    ],
)
def test_another_url_is_refused_with_what_is_allowed_and_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"state\.url: given .*allowed: sqlite:///FILE, redis://") as caught:
        parse_state_url(url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("options", ["socket_timeout=soon", "no_such_option=1"])
def test_a_redis_url_with_options_that_nobody_knows_is_refused_by_its_key_without_its_password(
    options: str,
) -> None:
    for key in ("state.url", "state.limits_url"):
        url = parse_state_url(f"redis://:s3cret@host/0?{options}", key=key)
        with pytest.raises(ConfigError, match=rf"^{key}: not a url of Redis") as caught:
            make_limit_store(url, namespace="n", unix_time=lambda: 0.0)
        assert "s3cret" not in str(caught.value) and caught.value.__cause__ is None


def test_each_store_and_namespace_has_a_folder_of_copies_of_its_own(tmp_path: Path) -> None:
    def folder(url: str, namespace: str = "n", cache_dir: str | None = str(tmp_path)) -> Path | None:
        return copies_folder(parse_state_url(url), namespace=namespace, cache_dir=cache_dir)

    assert folder("memory://") is None
    assert folder("sqlite:////a/s.db", cache_dir=None) == Path("/a/s.db.streams")
    folders = [
        folder("sqlite:////a/s.db"),
        folder("redis://one"),
        folder("redis://two"),
        folder("redis://one/1"),
        folder("redis://one", "other"),
    ]
    assert len(set(folders)) == len(folders)
    assert folder("redis://one") == folder("redis://ann:s3cret@one:6379"), "a new password is not a new store"
