"""Configuration: file, environment, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from gateway.config.backends import OpenAIBackend
from gateway.config.errors import ConfigError
from gateway.config.ray import RaySection
from gateway.config.settings import Settings, load_settings
from gateway.routing.file import RouteConfig

ROOT = Path(__file__).parents[1]


def write(folder: Path, text: str) -> Path:
    path = folder / "sluice.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_shipped_file_is_valid() -> None:
    settings = load_settings(ROOT / "sluice.yaml", {})
    assert settings.engine.model_id == "demo"
    assert list(settings.backends) == ["local"]


def test_defaults_need_no_file() -> None:
    assert load_settings(None, {}).server.port == 8000


@pytest.mark.parametrize("key", ["model", "tokenizer"])
def test_the_demo_model_is_found_from_any_folder(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, f"engine: {{{key}: models/demo}}")
    monkeypatch.chdir(tmp_path)
    assert Path(getattr(load_settings(path, {}).engine, key), "tokenizer.json").is_file()


def test_by_default_a_worker_that_never_answers_leaves_half_of_a_routes_time_for_another() -> None:
    route_s = RouteConfig.model_fields["timeout_ms"].default / 1000
    for section in (OpenAIBackend, RaySection):
        assert section.model_fields["first_token_timeout_seconds"].default <= route_s / 2


def test_the_environment_wins_over_the_file_and_our_names_over_vllms(tmp_path: Path) -> None:
    path = write(tmp_path, "engine: {max_model_len: 1024}\nserver: {port: 1}")
    environ = {
        "MAX_MODEL_LEN": "2048",
        "MAX_NUM_SEQS": "7",
        "SLUICE_ENGINE__MAX_NUM_SEQS": "9",
        "SLUICE_SERVER__PORT": "2",
    }
    settings = load_settings(path, environ)
    assert (settings.engine.max_model_len, settings.engine.max_num_seqs, settings.server.port) == (2048, 9, 2)


def test_a_bare_off_is_a_policy_in_the_file_and_in_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path, "prompts: {volatile: off}")
    settings = load_settings(path, {"SLUICE_PROMPTS__OPENAI_VOLATILE": "off"})
    assert (settings.prompts.volatile.value, settings.prompts.openai_volatile.value) == ("off", "off")


def test_null_true_and_false_are_what_they_say_in_the_environment() -> None:
    settings = load_settings(None, {"SLUICE_AUTH__ENABLED": "false", "SLUICE_TRACING__OTLP_ENDPOINT": "null"})
    assert settings.auth.enabled is False and settings.tracing.otlp_endpoint is None


def test_lists_and_mappings_come_as_json_in_the_environment() -> None:
    fault = {"backend": "local", "kind": "nan_output", "every": 2}
    settings = load_settings(
        None,
        {
            "SLUICE_BACKENDS__W": '{"kind": "openai", "base_urls": ["http://a/v1"], "model": "m"}',
            "SLUICE_BACKENDS__W__BASE_URLS": '["http://b/v1", "http://c/v1"]',
            "SLUICE_CHAOS__FAULTS": json.dumps([fault]),
            "SLUICE_SERVER__HOST": "[::1]",
        },
    )
    worker = settings.backends["w"]
    assert worker.kind == "openai" and worker.base_urls == ["http://b/v1", "http://c/v1"]
    assert [rule.every for rule in settings.chaos.faults] == [2]
    assert settings.server.host == "[::1]", "what is no JSON is a text"


def test_a_section_comes_whole_from_the_environment_in_place_of_the_files(tmp_path: Path) -> None:
    path = write(tmp_path, "backends: {a: {kind: engine}}\nmodels: {demo: {aliases: [x]}}\nserver: {port: 1}")
    worker = {"kind": "openai", "base_urls": ["http://a/v1"]}
    environ = {
        "SLUICE_BACKENDS": json.dumps({"w": worker}),
        "SLUICE_BACKENDS__W__BASE_URLS": '["http://b/v1"]',
        "SLUICE_MODELS": "{}",
        "SLUICE_PORT": "tcp://10.0.0.1:8000",  # what Kubernetes sets for a service of the name sluice
    }
    settings = load_settings(path, environ)
    assert list(settings.backends) == ["w"] and settings.models == {} and settings.server.port == 1
    assert settings.backends["w"].base_urls == ["http://b/v1"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "environ", "expected"),
    [
        ("server: {prt: 1}", {}, ["sluice.yaml", "server.prt", "did you mean 'port'", "allowed"]),
        ("server: {port: 99999}", {}, ["server.port", "less than or equal to 65535", "99999"]),
        ("", {"SLUICE_SERVER__HOST": ""}, ["SLUICE_SERVER__HOST: server.host", "at least 1 character"]),
        ('engine: {model: ""}', {}, ["engine.model", "at least 1 character"]),
        ("engine: {kind: magic}", {}, ["engine.kind", "'embedded'", "magic"]),
        ("engine: {max_model_len: NaN}", {}, ["engine.max_model_len", "valid integer"]),
        (
            "auth: {tenant_budgets: {a b: {usd_per_day: 5}}}",
            {},
            ["auth.tenant_budgets.a b", "match pattern '^[A-Za-z0-9]"],
        ),
        ("engine: {seed: -1}", {}, ["engine.seed: Input should be greater than or equal to 0; given: -1"]),
        *(
            (f"engine: {{{key}: {10**30}}}", {}, [f"engine.{key}: Input should be less than"])
            for key in ("seed", "num_blocks", "kv_cache_bytes")
        ),
        (
            "engines: {a: {kind: none}}",
            {},
            ["engines.a", "kind: none loads nothing; allowed: embedded or vllm"],
        ),
        ("engines: {a: {}, b: {}}", {}, ["engines.b", "engines.a serves 'demo' too", "served_model_name"]),
        ("engines: {a: {max_loras: 2}}", {}, ["engines.a", "adapters are loaded on `engine` alone"]),
        ("engines: {a: {task: embed, max_loras: 1}}", {}, ["engines.a", "task embed generates nothing"]),
        (
            "engines: {a: {}}\nbackends: {b: {kind: engine, engine: c}}",
            {},
            ["backends.b.engine: there is no engines.c; allowed: a"],
        ),
        (
            "engines: {a: {}}\nbackends: {b: {kind: engine, engine: [a]}}",
            {},
            ["backends.b.engine: Input should be a valid string; given: an array of 1 item"],
        ),
        (
            "engines: {a: {}}\nbackends: {a: {kind: engine}}\nengine: {served_model_name: x}",
            {},
            ["engines.a: backends.a is another backend"],
        ),
        ("servers: {}", {}, ["unknown key 'servers'", "did you mean 'server'"]),
        ("- a list", {}, ["must be a mapping"]),
        ("a: [", {}, ["not valid YAML"]),
        ("a: \0", {}, ["not valid YAML", "#x0000", "position 3"]),
        ('server:\n  host: "a\\0b"', {}, ["sluice.yaml, line 2: not valid YAML", "U+0000"]),
        ("[" * 5_000, {}, ["not valid YAML", "recursion depth"]),
        ("backends: {'bad name': {kind: engine}}", {}, ["backends"]),
        (
            "backends: {local: {kind: engine, unknown_fields: pass}}",
            {},
            ["backends.local.unknown_fields: Input should be 'refuse' or 'drop'; given: 'pass'"],
        ),
        (
            "chaos: {faults: [{backend: local, kind: slowly}]}",
            {},
            ["chaos.faults[0].kind: Input should be 'cuda_oom', ", "'slow' or 'hang'; given: 'slowly'"],
        ),
        (
            "server:",
            {},
            ["sluice.yaml: server: Input should be a valid dictionary; given: None", "leave it out"],
        ),
        ("server: {port: yes}", {}, ["server: port: is True, which YAML makes of yes, no"]),
        ("", {"SLUICE_SERVER__PORT": "true"}, ["environment SLUICE_SERVER__PORT: server: port: is True"]),
        ("admission: {tpot_slo_ms: off}", {}, ["admission: tpot_slo_ms: is False", "allowed: a number"]),
        (
            "admission: {watermark_low: 0.97, watermark_high: 0.9}",
            {},
            ["admission: watermark_low: 0.97 is above watermark_high (0.9); allowed: at most as much"],
        ),
        ("1: 2", {}, ["sluice.yaml: [1]: Keys should be strings; given: 1"]),
        ("", {"SLUICE_SERVR__PORT": "1"}, ["environment SLUICE_SERVR__PORT", "servr"]),
        ("", {"MAX_MODEL_LEN": "abc"}, ["environment MAX_MODEL_LEN", "valid integer", "abc"]),
        (
            "",
            {"MAX_NUM_SEQS": "7", "QUANTIZATION": "awq"},
            ["environment MAX_NUM_SEQS, QUANTIZATION: engine: quant"],
        ),
        ("", {"SLUICE_SERVER__PORT__X": "1"}, ["SLUICE_SERVER__PORT__X"]),
        ("", {"SLUICE_BACKENDS": "{"}, ["environment SLUICE_BACKENDS: backends", "given: '{'"]),
        (
            "",
            {"SLUICE_SERVER": "x", "SLUICE_SERVER__PORT": "1"},
            ["environment SLUICE_SERVER: server: must be a mapping, because SLUICE_SERVER__PORT sets a key"],
        ),
        (
            "server: {trusted_proxies: []}",
            {"SLUICE_SERVER__TRUSTED_PROXIES": '["10.0.0.300"]'},
            [
                "environment SLUICE_SERVER__TRUSTED_PROXIES: server.trusted_proxies[0]: value is not a valid IPv4"
            ],
        ),
        *(
            (
                "",
                {name: "http://a/v1"},
                [f"environment {name}: {key}: Input", """'http://a/v1'; allowed in a variable: JSON, as ["""],
            )
            for name, key in (
                ("SLUICE_BACKENDS", "backends"),
                ("SLUICE_SERVER", "server"),
                ("SLUICE_SERVER__CORS_ORIGINS", "server.cors_origins"),
                ("SLUICE_IMAGES__FETCH_HOSTS", "images.fetch_hosts"),
            )
        ),
        (
            "",
            {"SLUICE_AUTH": '{"enabled": "maybe"}'},
            ["environment SLUICE_AUTH: auth.enabled: ", "given: 'maybe'"],
        ),
        ("", {"SLUICE_SERVER_PORT": "9"}, ["SLUICE_SERVER_PORT: is not read; allowed: SLUICE_SERVER__PORT"]),
        (
            "server:",
            {"SLUICE_SERVER__PORT": "9"},
            ["sluice.yaml: server: must be a mapping, because SLUICE_SERVER__PORT sets a key", "given: None"],
        ),
        (
            "",
            {"SLUICE_SERVER__PORT": "9", "SLUICE_SERVER__PORT__X": "1"},
            ["environment SLUICE_SERVER__PORT: server.port: must be a mapping", "given: '9'"],
        ),
        (
            "backends: {gpus: {kind: openia}}",
            {},
            ["backends.gpus.kind: allowed: 'engine', 'openai', 'bedrock'; given: 'openia'"],
        ),
        ("backends: {gpus: {}}", {}, ["backends.gpus.kind: Field required"]),
        ("server: {cors_origins: x}", {}, ["server.cors_origins: Input should be a valid list; given: 'x'"]),
    ],
)
def test_a_wrong_key_or_value_names_place_given_and_allowed(
    tmp_path: Path, text: str, environ: dict[str, str], expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(write(tmp_path, text), environ)
    for part in expected:
        assert part in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ("base_urls: ['http://me:hunter2@gpu/v1']", "base_urls[0]: .* given: 'http://…@gpu/v1'"),
        ("base_urls: ['http://gpu/v1?key=hunter2']", "base_urls[0]: .* given: 'http://gpu/v1?…'"),
        (
            "base_urls: [http://gpu/v1], headers: 'X-Key: hunter2'",
            "headers: .* given: a string of 14 characters",
        ),
    ],
)
def test_a_wrong_value_is_told_without_its_secrets(tmp_path: Path, fields: str, told: str) -> None:
    text = f"backends: {{gpus: {{kind: openai, {fields}}}}}"
    with pytest.raises(ConfigError) as caught:
        load_settings(write(tmp_path, text), {})
    key, _, given = told.partition(".*")
    assert key in str(caught.value) and str(caught.value).endswith(given)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("section", ["engine", "models: {small", "batches"])
def test_an_address_in_the_place_of_a_folder_is_refused_without_its_password(
    tmp_path: Path, section: str
) -> None:
    key = "folder" if section == "batches" else "tokenizer"
    text = f"{section}: {{{key}: 'https://me:hunter2@hub/org/name'}}" + "}" * section.count("{")
    with pytest.raises(ConfigError, match=rf"{key}:? .*allowed: a folder") as caught:
        load_settings(write(tmp_path, text), {})
    assert "hunter2" not in str(caught.value)


def test_an_address_without_a_scheme_is_refused_with_the_form_of_one(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"base_urls\[0\]: is no address; allowed: http://HOST:PORT .*'gpu-1:80'"
    ):
        load_settings(write(tmp_path, "backends: {gpus: {kind: openai, base_urls: ['gpu-1:80']}}"), {})


def test_an_origin_with_a_path_is_refused_with_the_form_of_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cors_origins\[0\]: is no origin; allowed: .*, without a path"):
        load_settings(write(tmp_path, "server: {cors_origins: ['https://console.example/']}"), {})


@pytest.mark.parametrize(
    "url", ["http://gpu-1:99999/v1", "http://gpu-1:x/v1", "http://gpu-1:0", "http://[::1/v1"]
)
def test_an_address_with_an_invalid_host_or_port_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"base_urls\[0\]: has no valid host and port; .*given: 'http"):
        load_settings(write(tmp_path, f"backends: {{gpus: {{kind: openai, base_urls: ['{url}']}}}}"), {})


def test_an_empty_mapping_of_backends_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="backends: is empty; allowed: one or more"):
        load_settings(write(tmp_path, "backends: {}"), {})
    with pytest.raises(ConfigError, match="environment SLUICE_BACKENDS: backends: is empty"):
        load_settings(None, {"SLUICE_BACKENDS": "{}"})


def test_each_of_several_engines_has_a_backend_and_engine_has_one_where_it_is_asked_for(
    tmp_path: Path,
) -> None:
    several = "engines: {a: {served_model_name: x}, b: {served_model_name: y}}\n"
    settings = load_settings(write(tmp_path, several), {"MAX_MODEL_LEN": "512"})
    assert settings.engine.kind == "none" and list(settings.backends) == ["a", "b"]
    settings = load_settings(write(tmp_path, several + "engine: {kind: embedded}"), {})
    assert list(settings.backends) == ["a", "b", "local"]
    more = "backends: {c: {kind: engine, engine: a}, d: {kind: engine, engine: a}}"
    settings = load_settings(write(tmp_path, several + more), {})
    assert settings.engine.kind == "none"
    assert {name: one.model_id for name, one in settings.engines_of_backends.items()} == {
        "b": "y",
        "c": "x",
        "d": "x",
    }


def test_variables_that_kubernetes_sets_for_services_are_ignored(tmp_path: Path) -> None:
    environ = {
        "SLUICE_SERVER_PORT": "tcp://10.0.0.1:8000",
        "SLUICE_PORT": "tcp://10.0.0.2:8000",
        "SLUICE_SERVICE_HOST": "10.0.0.2",
        "SLUICE_SERVER_SERVICE_PORT": "8000",
    }
    assert load_settings(write(tmp_path, ""), environ).server.port == 8000


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read"):
        load_settings(tmp_path / "gone.yaml", {})


def test_every_key_and_its_default_are_documented() -> None:
    rows = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for section, field in Settings.model_fields.items():
        model = field.annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            continue
        for key, value in model.model_fields.items():
            default = json.dumps(value.default).strip('"')
            assert f"| `{section}.{key}` | `{default}` |" in rows, f"{section}.{key} = {default}"
