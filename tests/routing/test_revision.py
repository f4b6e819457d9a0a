"""Routing files are validated whole, with the path of every fault."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from admission.ladder import Rung
from admission.values import AdmissionLimits
from gateway.config.yaml_file import load_yaml
from gateway.routing.check import KnownNames
from gateway.routing.revision import RoutingFileError, default_routing, make_revision
from gateway.wiring.control import read_seed
from resilience.resume import ResumeRules

KNOWN = KnownNames(
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
    ("data", "expected"),
    [
        (changed(backends=[{"name": "local", "weight": 90}]), ["weights add up to 90", "allowed: 100"]),
        (changed(backends=[]), ["backends"]),
        (changed(models=["two words"]), ["models"]),
        (changed(models=["x", "x"]), ["'x'", "allowed: one route"]),
        (changed(backends=[{"name": "gone", "weight": 100}]), ["backends[0].name", "'gone'", "local, pool"]),
        (
            changed(backends=[{"name": "local", "weight": -1}, {"name": "pool", "weight": 101}]),
            ["backends[0].weight: Input should be greater than or equal to 0; given: -1"],
        ),
        (
            changed(backends=[{"name": "local", "weight": 50}, {"name": "local", "weight": 50}]),
            ["backends: 'local' is named twice; name each once"],
        ),
        (changed(fallback=["mars"]), ["fallback[0]", "'mars'", "degraded"]),
        (changed(fallback=["degraded", "degraded"]), ["fallback: 'degraded' is named twice; name each once"]),
        (
            changed(backends=[{"name": "pool", "weight": 100}]),
            ["routes.self_hosted_generation.fallback[1]", "'pool'", "leads back to what failed"],
        ),
        (changed(prompt_version="none"), ["prompt_version", "'none'", "chat-manga-2.1"]),
        (
            changed(adapter_rules=[{"when": {"locale": "ja"}, "adapter": "x"}]),
            ["adapter_rules[0].adapter", "'x'"],
        ),
        (
            changed(adapter_rules=[{"when": {"moon": "1"}, "adapter": "jp_style_v1"}]),
            ["when", "'moon'", "locale"],
        ),
        (
            changed(surprise=1),
            [
                "unknown key 'routes.self_hosted_generation.surprise' (did you mean 'spare'?); allowed: adapter_fallback, "
            ],
        ),
        (changed(slo={"ttft_ms": math.inf}), ["slo.ttft_ms: Input should be a finite number; given: inf"]),
        (
            changed(degraded_text="x" * 200, spare=["y" * 200]),
            ["spare[0]: Input should be 'retrieval' or", "yyy…"],
        ),
        (
            changed(fallback=[], response_cache={"similar": {"model": "bge", "threshold": 0.9}}),
            ["response_cache.similar: the fallback chain has no response_cache"],
        ),
        (changed(response_cache={"similar": {"model": "bge"}}), ["response_cache.similar.threshold"]),
        (
            changed(response_cache={"similar": {"model": "bge", "threshold": 1.5}}),
            ["response_cache.similar.threshold", "given: 1.5"],
        ),
        (changed(adapter_rules=[{"when": {}}]), ["adapter_rules[0]: adapter or labels: exactly one"]),
        (changed(admission={"max_queue": -1}), ["admission.max_queue: ", "equal to 0; given: -1"]),
        (
            changed(admission={"max_in_flight": 3}),
            ["admission.max_in_flight'", "allowed: ", "max_queue, "],
        ),
        (
            changed(admission={"watermark_low": 0.97, "watermark_normal": None, "watermark_high": 0.9}),
            ["admission: watermark_low: 0.97 is above watermark_high (0.9); allowed: at most as much"],
        ),
        (changed(admission={"ladder": [{"depth": 0}]}), ["admission.ladder[0].depth"]),
        (changed(slo={"tpot_ms": 0}), ["slo.tpot_ms: Input should be greater than 0; given: 0"]),
        ({"routes": {}}, ["routes"]),
        ({}, ["routes"]),
        ([], ["file"]),
        ({**GOOD, "openai_route": "nowhere"}, ["openai_route", "'nowhere'"]),
    ],
)
def test_a_fault_is_told_with_its_path_and_what_is_allowed(data: object, expected: list[str]) -> None:
    with pytest.raises(RoutingFileError) as caught:
        make_revision(1, data, KNOWN, source="routing.yaml")
    for part in ["routing.yaml", *expected]:
        assert part in str(caught.value)


def test_all_faults_are_told_at_once_also_those_beside_unknown_keys() -> None:
    data = changed(surprise=1, slo={"fast": 1}, prompt_version="none", fallback=["mars"])
    with pytest.raises(RoutingFileError) as caught:
        make_revision(1, {**data, "more": 1, "openai_route": "nowhere"}, KNOWN, source="routing.yaml")
    lines = str(caught.value).splitlines()
    told = ("surprise'", "fast'", "'more'", "'none'", "'mars'", "'nowhere'")
    assert [sum(part in line for line in lines) for part in told] == [1] * len(lines)

    # Values that are wrong are told once, and hide the names.
    with pytest.raises(RoutingFileError) as caught:
        make_revision(1, changed(surprise=1, timeout_ms=0, fallback=["mars"]), KNOWN)
    assert len(str(caught.value).splitlines()) == 2


def test_an_unknown_key_of_a_route_that_two_names_share_is_told_for_both(tmp_path: Path) -> None:
    shared = (
        "routes:\n  one: &one\n    backends: [{name: mars, weight: 100}]\n    timout_ms: 1\n  two: *one\n"
    )
    (tmp_path / "routing.yaml").write_text(shared)
    seed = read_seed(str(tmp_path / "routing.yaml"), KNOWN)
    for name in ("one", "two"):
        assert f"unknown key 'routes.{name}.timout_ms'" in str(seed.fault)
        assert f"routes.{name}.backends[0]" in str(seed.fault), "the other faults are told too"


def test_a_missing_or_malformed_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RoutingFileError, match="cannot be read"):
        load_yaml(tmp_path / "routing.yaml", RoutingFileError)
    (tmp_path / "routing.yaml").write_text("a: [")
    with pytest.raises(RoutingFileError, match="not valid YAML"):
        load_yaml(tmp_path / "routing.yaml", RoutingFileError)


def test_without_a_file_the_first_backend_answers_and_the_others_are_its_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    known = replace(KNOWN, backends=("local", "pool", "far"))
    seed = read_seed(None, known)
    assert seed.config is not None and seed.fault is None
    (route,) = make_revision(1, seed.config, known).routes.values()
    assert route.weights == (("local", 100.0),) and route.fallback == ("pool", "far")


def test_a_file_of_the_folder_that_names_none_of_the_backends_is_another_gateways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "routing.yaml").write_text("routes: {chat: {backends: [{name: local, weight: 100}]}}")
    seed = read_seed(None, replace(KNOWN, backends=("worker",)))
    assert seed.config == default_routing(["worker"]) and seed.fault is None
    assert read_seed("routing.yaml", replace(KNOWN, backends=("worker",))).fault is not None
    assert read_seed(None, replace(KNOWN, backends=("local",))).file == "routing.yaml"


def test_a_file_that_is_configured_and_missing_is_a_fault(tmp_path: Path) -> None:
    seed = read_seed(str(tmp_path / "routes.yaml"), KNOWN)
    assert seed.config is None and str(seed.fault).startswith("routing.file: ")


def test_a_routes_admission_is_laid_over_the_sections() -> None:
    base = AdmissionLimits(max_queue=50, kv_pressure=0.5)
    admission = {"max_wait_ms": 750, "watermark_high": 0.9, "ladder": [{"depth": 3, "shed_low": True}]}
    revision = make_revision(1, changed(admission=admission), replace(KNOWN, limits=base))
    assert revision.routes["self_hosted_generation"].limits == replace(
        base,
        max_wait_s=0.75,
        watermarks=(0.9, 0.9, 0.9),
        oom_watermark=0.9,
        rungs=(Rung(3, shed_low=True),),
    )


@pytest.mark.parametrize(
    ("own", "watermarks"),
    [
        ({"watermark_low": 0.93}, (0.93, 0.93, 0.97)),
        ({"watermark_normal": 0.99}, (0.8, 0.99, 0.99)),
        ({"watermark_high": 0.85}, (0.8, 0.85, 0.85)),
        ({"watermark_low": 0.5, "watermark_high": 0.7}, (0.5, 0.7, 0.7)),
    ],
)
def test_watermarks_that_a_route_does_not_set_keep_the_order_of_the_classes(
    own: dict[str, float], watermarks: tuple[float, float, float]
) -> None:
    base = AdmissionLimits(watermarks=(0.8, 0.9, 0.97), oom_watermark=0.97)
    limits = make_revision(1, changed(admission=own), replace(KNOWN, limits=base))
    held = limits.routes["self_hosted_generation"].limits
    assert held is not None
    assert (held.watermarks, held.oom_watermark) == (watermarks, watermarks[2])


def test_a_route_that_says_nothing_of_admission_has_the_sections_limits() -> None:
    base = AdmissionLimits(max_queue=50)
    route = make_revision(1, GOOD, replace(KNOWN, limits=base)).routes["self_hosted_generation"]
    assert route.limits is base


@pytest.mark.parametrize(
    ("tpot_ms", "follows", "expected"),
    [
        (40, None, (0.04, 0.3)),
        (40, ["tpot"], (0.04, None)),
        (40, ["ttft"], (None, 0.3)),
        (40, [], (None, None)),
        (None, ["ttft"], (None, 0.3)),
        (None, ["tpot"], (0.07, None)),
        (None, None, (0.07, None)),
    ],
)
def test_the_adaptive_limit_follows_the_targets_that_the_route_names(
    tpot_ms: float | None, follows: list[str] | None, expected: tuple[float | None, float | None]
) -> None:
    routing = changed(slo={"ttft_ms": 300, "tpot_ms": tpot_ms}, admission={"limit_follows": follows})
    revision = make_revision(1, routing, replace(KNOWN, limits=AdmissionLimits(tpot_slo_s=0.07)))
    limits = revision.routes["self_hosted_generation"].limits
    assert limits is not None
    assert (limits.tpot_slo_s, limits.ttft_slo_s) == expected


def test_a_route_may_refuse_requests_that_would_miss_its_first_token_target() -> None:
    def within(refuse_late: bool) -> float | None:
        routing = changed(slo={"ttft_ms": 300}, admission={"refuse_late": refuse_late, "max_queue": 5})
        limits = make_revision(1, routing, KNOWN).routes["self_hosted_generation"].limits
        assert limits is not None
        return limits.first_token_within_s

    assert (within(True), within(False)) == (0.3, None)


def test_a_target_for_the_time_per_token_turns_the_adaptive_limit_on() -> None:
    slo = {"ttft_ms": 300, "tpot_ms": 40}
    limits = make_revision(1, changed(slo=slo), KNOWN).routes["self_hosted_generation"].limits
    assert limits is not None
    assert (limits.tpot_slo_s, limits.ttft_slo_s) == (0.04, 0.3)


def test_a_route_says_how_broken_answers_go_on() -> None:
    route = make_revision(1, GOOD, KNOWN).routes["self_hosted_generation"]
    assert route.resume == ResumeRules(True, 2.0, 60.0, 0, 0.05)
    own = {"enabled": False, "wait_ms": 500, "max_wait_ms": 0, "commit_chunks": 8, "commit_ms": 0}
    route = make_revision(1, changed(resume=own), KNOWN).routes["self_hosted_generation"]
    assert route.resume == ResumeRules(False, 0.5, 0.0, 0, 0.0), "nothing can be held for no time"


@pytest.mark.parametrize(
    ("resume", "expected"),
    [
        ({"wait_ms": -1}, "resume.wait_ms"),
        ({"max_wait_ms": 3_600_001}, "resume.max_wait_ms"),
        ({"commit_chunks": 65}, "resume.commit_chunks"),
        ({"commit_ms": 1001}, "resume.commit_ms"),
        ({"mode": "text"}, "resume.mode"),
    ],
)
def test_a_wrong_resume_section_is_named(resume: dict[str, object], expected: str) -> None:
    with pytest.raises(RoutingFileError, match=expected):
        make_revision(1, changed(resume=resume), KNOWN)
