"""Routing files are validated whole, with the path of every fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.routing.revision import Known, RoutingFileError, load_routing, make_revision

KNOWN = Known(
    backends={"local", "pool"},
    prompt_versions={"chat-manga-2.1"},
    adapters={"jp_style_v1", "manga_domain_v3"},
)
GOOD = {
    "routes": {
        "self_hosted_generation": {
            "backends": [{"name": "local", "weight": 95}, {"name": "pool", "weight": 5}],
            "fallback": ["response_cache", "pool", "degraded"],
            "slo": {"ttft_ms": 200, "total_ms": 1400},
            "prompt_version": "chat-manga-2.1",
            "adapter_rules": [{"when": {"locale": "ja"}, "adapter": "jp_style_v1"}],
        }
    }
}


def changed(**route: object) -> dict[str, object]:
    return {"routes": {"self_hosted_generation": {**GOOD["routes"]["self_hosted_generation"], **route}}}


def test_a_good_configuration_becomes_a_frozen_revision() -> None:
    revision = make_revision(1, GOOD, KNOWN)
    route = revision.routes["self_hosted_generation"]
    assert route.weights == (("local", 95.0), ("pool", 5.0))
    assert revision.openai_route == "self_hosted_generation"
    with pytest.raises(TypeError):
        revision.routes["other"] = route  # type: ignore[index]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (changed(backends=[{"name": "local", "weight": 90}]), ["weights add up to 90", "allowed: 100"]),
        (changed(backends=[]), ["backends"]),
        (changed(backends=[{"name": "gone", "weight": 100}]), ["backends[0].name", "'gone'", "local, pool"]),
        (
            changed(backends=[{"name": "local", "weight": -1}, {"name": "pool", "weight": 101}]),
            ["backends.0.weight"],
        ),
        (
            changed(backends=[{"name": "local", "weight": 50}, {"name": "local", "weight": 50}]),
            ["named twice"],
        ),
        (changed(fallback=["mars"]), ["fallback[0]", "'mars'", "degraded"]),
        (changed(fallback=["degraded", "degraded"]), ["fallback", "twice"]),
        (changed(prompt_version="none"), ["prompt_version", "'none'", "chat-manga-2.1"]),
        (
            changed(adapter_rules=[{"when": {"locale": "ja"}, "adapter": "x"}]),
            ["adapter_rules[0].adapter", "'x'"],
        ),
        (
            changed(adapter_rules=[{"when": {"moon": "1"}, "adapter": "jp_style_v1"}]),
            ["when", "'moon'", "locale"],
        ),
        (changed(surprise=1), ["surprise"]),
        ({"routes": {}}, ["routes"]),
        ({}, ["routes"]),
        ([], ["file"]),
        ({**GOOD, "openai_route": "nowhere"}, ["openai_route", "'nowhere'"]),
    ],
)
def test_a_fault_is_told_with_its_path_and_what_is_allowed(data: object, told: list[str]) -> None:
    with pytest.raises(RoutingFileError) as caught:
        make_revision(1, data, KNOWN, source="routing.yaml")
    for part in ["routing.yaml", *told]:
        assert part in str(caught.value)


def test_a_missing_or_malformed_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RoutingFileError, match="cannot be read"):
        load_routing(tmp_path / "routing.yaml", KNOWN)
    (tmp_path / "routing.yaml").write_text("a: [")
    with pytest.raises(RoutingFileError, match="not valid YAML"):
        load_routing(tmp_path / "routing.yaml", KNOWN)
