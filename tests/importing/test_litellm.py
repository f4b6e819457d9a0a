"""Import of a LiteLLM configuration: what is carried over, what is reported, and that the result serves."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from ops.cli.main import app
from ops.importing.litellm import read_litellm
from ops.importing.values import ImportedSetup, ImportOutcome, UnreadableSource
from ops.importing.writer import MAX_MODEL_LEN, configurations
from tests.integration.live import gateway
from tests.workers.raw_worker import RawWorker, Request, answers

SOURCE = Path(__file__).with_name("litellm.yaml")
ENVIRON = {"LLAMA_BASE": "http://gpu-3:8000/v1"}
# Imported model names, each with the model that its server is asked for.
ANSWERED = {
    "qwen3-8b": "Qwen/Qwen3-8B",
    "cheap": "Qwen/Qwen3-8B",
    "llama-70b": "llama-70b",
    "gpt-4o": "gpt-4o-2024-08-06|gpt-4o-eu",
    "gpt-4": "gpt-4o-2024-08-06|gpt-4o-eu",
    "gpt-4o-mini": "gpt-4o-mini",
    "text/legacy": "legacy-model",
    "deepseek-chat": "deepseek-chat",
    "mistral-small": "mistral-small",
    "local-phi": "phi4",
    "grok": "grok-3",
    "router-model": "meta-llama/llama-3-70b",
    "together": "Qwen/Qwen2.5-72B",
    "own-proxy": "team-model",
}


@pytest.fixture(scope="module")
def setup() -> ImportedSetup:
    return read_litellm(SOURCE, ENVIRON)


@pytest.fixture(scope="module")
def written(setup: ImportedSetup) -> tuple[dict[str, Any], dict[str, Any]]:
    return configurations(setup)


def test_no_secret_is_copied_and_each_is_a_variable_to_set(setup: ImportedSetup, written: Any) -> None:
    text = json.dumps(written) + repr(setup.notes)
    assert "do-not-copy" in SOURCE.read_text() and "do-not-copy" not in text
    backends = written[0]["backends"]
    assert backends["gpt-4o"]["api_key_env"] == "OPENAI_API_KEY"
    assert backends["gpt-4o-mini"]["api_key_env"] == "GPT_4O_MINI_API_KEY"
    assert backends["deepseek-chat"]["api_key_env"] == "DEEPSEEK_API_KEY"
    assert "api_key_env" not in backends["text-legacy"] and "api_key_env" not in backends["qwen3-8b"]
    said = {note.place: note.text for note in setup.notes}
    assert "GPT_4O_MINI_API_KEY" in said["model_list[6].litellm_params.api_key"]
    assert "SLUICE_ADMIN_KEY" in said["general_settings.master_key"]


def test_deployments_of_one_server_kind_are_a_pool_and_others_share_by_weight(written: Any) -> None:
    settings, routing = written
    backends, routes = settings["backends"], routing["routes"]
    assert backends["qwen3-8b"]["base_urls"] == ["http://gpu-1:8000/v1", "http://gpu-2:8000/v1"]
    assert routes["gpt-4o"]["backends"] == [
        {"name": "gpt-4o", "weight": 75.0}, {"name": "gpt-4o-2", "weight": 25.0}
    ]  # fmt: skip
    own, later, named = ["gpt-4o", "gpt-4o-2"], ["gpt-4o-3"], ["gpt-4o-mini", "qwen3-8b"]
    assert routes["gpt-4o"]["fallback"] == own + later + named, "one backend of a name stands in for another"
    assert routes["gpt-4o-mini"]["fallback"] == []
    assert routes["gpt-4o"]["models"] == ["gpt-4o", "gpt-4"]
    assert routes["qwen3-8b"]["models"] == ["qwen3-8b", "cheap"]
    assert backends["gpt-4o"]["total_timeout_seconds"] == 90
    assert (
        routes["gpt-4o"]["timeout_ms"] == 90_000 * (5 + 5)
        and routes["llama-70b"]["timeout_ms"] == 120_000 * 5
    )
    assert backends["gpt-4o"]["headers"] == {"OpenAI-Organization": "org-42"}
    assert backends["gpt-4o"]["price"] == {"input_usd_per_million": 2.5, "output_usd_per_million": 10.0}
    assert backends["text-legacy"]["headers"] == {"X-Team": "search"}
    assert backends["llama-70b"]["total_timeout_seconds"] == 120
    assert backends["llama-70b"]["base_urls"] == ["http://gpu-3:8000/v1"]
    assert backends["local-phi"]["base_urls"] == ["http://ollama:11434/v1"]
    assert backends["nova"]["region"] == "eu-west-1"
    assert backends["grok"]["eject_after_failures"] == 4 and backends["grok"]["eject_seconds"] == 30
    assert settings["engine"]["max_model_len"] == MAX_MODEL_LEN and settings["server"]["log_json"]


def test_services_that_refuse_or_ignore_max_completion_tokens_get_max_tokens(written: Any) -> None:
    backends = written[0]["backends"]
    for name in ("mistral-small", "local-phi", "deepseek-chat"):
        assert backends[name]["max_tokens_field"] == "max_tokens"
    assert "max_tokens_field" not in backends["gpt-4o"] and "max_tokens_field" not in backends["qwen3-8b"]


def test_a_fallback_asks_the_deployments_of_the_other_model_in_their_order(tmp_path: Path) -> None:
    orders = (("a", 1), ("b", 2), ("b", 1))
    models = [
        {
            "model_name": name,
            "litellm_params": {
                "model": "hosted_vllm/m",
                "api_base": f"http://gpu-{place}/v1",
                "order": order,
            },
        }
        for place, (name, order) in enumerate(orders)
    ]
    source = {"model_list": models, "litellm_settings": {"fallbacks": [{"a": ["b"]}]}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(source))
    settings, routing = configurations(read_litellm(tmp_path / "config.yaml", {}))
    first, last = routing["routes"]["a"]["fallback"]
    assert settings["backends"][first]["base_urls"] == ["http://gpu-2/v1"]
    assert settings["backends"][last]["base_urls"] == ["http://gpu-1/v1"]


def test_each_model_has_the_length_that_it_says(tmp_path: Path) -> None:
    one = "{model_name: %s, litellm_params: {model: %s, api_key: sk-do-not-copy}, model_info: {max_input_tokens: %d}}"
    models = ", ".join((one % ("4o", "gpt-4o", 100_000), one % ("4o", "gpt-4", 8_000)))
    (tmp_path / "config.yaml").write_text(f"model_list: [{models}]")
    setup = read_litellm(tmp_path / "config.yaml", {})
    settings, _ = configurations(setup)
    assert settings["models"] == {"gpt-4o": {"max_model_len": 100_000}, "gpt-4": {"max_model_len": 8_000}}
    keys = [backend["api_key_env"] for backend in settings["backends"].values()]
    assert keys == ["MODEL_4O_API_KEY", "MODEL_4O_2_API_KEY"], "two keys may differ"
    assert any(note.place == "general_settings.master_key" for note in setup.notes)


@pytest.mark.parametrize(
    ("place", "outcome"),
    [
        ("model_list[0]", ImportOutcome.CARRIED),
        ("model_list[0].litellm_params.rpm", ImportOutcome.DIFFERENT),
        ("model_list[3].litellm_params.tags", ImportOutcome.UNSUPPORTED),
        ("model_list[6].litellm_params.max_retries", ImportOutcome.DIFFERENT),
        ("model_list[7].litellm_params.extra_headers.X-Api-Token", ImportOutcome.UNSUPPORTED),
        ("model_list[9].model_name", ImportOutcome.UNSUPPORTED),
        ("model_list[12].litellm_params.temperature", ImportOutcome.UNSUPPORTED),
        ("model_list[17].litellm_params.model", ImportOutcome.UNSUPPORTED),
        ("model_list[18].litellm_params.model", ImportOutcome.UNSUPPORTED),
        ("model_list[19].model_info.mode", ImportOutcome.UNSUPPORTED),
        ("model_list[20].model_name", ImportOutcome.UNSUPPORTED),
        ("router_settings.routing_strategy", ImportOutcome.CARRIED),
        ("router_settings.fallbacks.llama-70b", ImportOutcome.UNSUPPORTED),
        ("router_settings.context_window_fallbacks", ImportOutcome.UNSUPPORTED),
        ("router_settings.model_group_alias.gone", ImportOutcome.UNSUPPORTED),
        ("router_settings.model_group_alias.cheap", ImportOutcome.DIFFERENT),
        ("router_settings.allowed_fails", ImportOutcome.CARRIED),
        ("litellm_settings.callbacks.prometheus", ImportOutcome.CARRIED),
        ("litellm_settings.callbacks.langfuse", ImportOutcome.UNSUPPORTED),
        ("litellm_settings.cache", ImportOutcome.DIFFERENT),
        ("general_settings.database_url", ImportOutcome.DIFFERENT),
        ("environment_variables", ImportOutcome.UNSUPPORTED),
    ],
)
def test_the_fate_of_a_setting_is_reported_with_its_place(
    setup: ImportedSetup, place: str, outcome: ImportOutcome
) -> None:
    found = [note for note in setup.notes if note.place == place]
    assert found and found[0].outcome is outcome and found[0].text


def test_every_setting_of_the_file_is_reported(setup: ImportedSetup) -> None:
    data = yaml.safe_load(SOURCE.read_text())
    places = {note.place for note in setup.notes}
    for section in ("router_settings", "litellm_settings", "general_settings"):
        for key in data[section]:
            assert any(place.startswith(f"{section}.{key}") for place in places), key
    for number in range(len(data["model_list"])):
        assert any(place.startswith(f"model_list[{number}]") for place in places), number


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[]", "model_list"),
        ("model_list: []", "model_list"),
        ("include: [models.yaml]", "include is not read"),
        ("model_list: [{model_name: a}]", "model_list[0]"),
        ("model_list: [{model_name: a, litellm_params: {model: b, weight: x}}]", "weight is x; allowed: 0"),
        ("model_list: [{model_name: a, litellm_params: {model: b, weight: -1}}]", "weight is -1"),
        ("model_list: [{model_name: a, litellm_params: {model: b, weight: .nan}}]", "weight is nan"),
        ("model_list: [{model_name: a, litellm_params: {model: b, order: .inf}}]", "model_list[0]"),
        ("model_list: [{model_name: a, litellm_params: {model: b}}]\nrouter_settings: 3", "router_settings"),
        (
            "model_list: [{model_name: a, litellm_params: {model: b}}]\nrouter_settings: {timeout: soon}",
            "router_settings.timeout",
        ),
    ],
)
def test_a_file_of_another_shape_is_an_error_that_names_the_place(
    tmp_path: Path, text: str, named: str
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UnreadableSource, match=re.escape(named)):
        read_litellm(tmp_path / "config.yaml", {})


@pytest.mark.parametrize("key", ["fallbacks: [{a: [gone]}]", "default_fallbacks: [gone]"])
def test_a_fallback_to_a_model_that_was_not_imported_is_not_called_carried(tmp_path: Path, key: str) -> None:
    (tmp_path / "config.yaml").write_text(
        f"model_list: [{{model_name: a, litellm_params: {{model: b}}}}]\nrouter_settings: {{{key}}}\n"
    )
    setup = read_litellm(tmp_path / "config.yaml", {})
    found = [note for note in setup.notes if "fallbacks" in note.place]
    assert [note.outcome for note in found] == [ImportOutcome.UNSUPPORTED]
    assert found[0].text == "gone was not imported" and setup.groups["a"].fallbacks == []


@pytest.mark.parametrize(
    "default", ["default_fallbacks: [c], fallbacks: [{a: [b]}]", "fallbacks: [{'*': [c]}, {a: [b]}]"]
)
def test_default_fallbacks_are_for_models_that_have_none_of_their_own(tmp_path: Path, default: str) -> None:
    models = [{"model_name": name, "litellm_params": {"model": name}} for name in "abc"]
    (tmp_path / "config.yaml").write_text(
        f"model_list: {json.dumps(models)}\nlitellm_settings: {{{default}}}\n"
    )
    setup = read_litellm(tmp_path / "config.yaml", {})
    assert {name: group.fallbacks for name, group in setup.groups.items()} == {
        "a": ["b"],
        "b": ["c"],
        "c": [],
    }


def test_keys_that_are_no_text_or_look_like_markup_are_reported_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    model = "{model_name: a, litellm_params: {model: b, '[x]': 1, '[/b]': 2}}"
    (tmp_path / "config.yaml").write_text(f"model_list: [{model}]\ntrue: 1\n2: 3\n")
    words = ["import", "litellm", str(tmp_path / "config.yaml"), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    for place in ("litellm_params.[x]", "litellm_params.[/b]", "True", " 2 "):
        assert place in result.stdout


def test_the_command_writes_both_files_once_and_prints_what_became_of_each_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_BASE", ENVIRON["LLAMA_BASE"])
    words = ["import", "litellm", str(SOURCE), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["files"] == [str(tmp_path / "sluice.yaml"), str(tmp_path / "routing.yaml")]
    assert {note["outcome"] for note in report["notes"]} == {"carried", "different", "unsupported"}
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 1 and "--force" in again.output
    forced = CliRunner().invoke(app, [*words, "--force"])
    assert forced.exit_code == 0 and "general_settings.master_key" in forced.stdout


_INVOKED = "arn:aws:bedrock:us-west-2:888602223428:imported-model/r4c4"


@pytest.mark.parametrize(
    ("model", "model_id", "region"),
    [
        ("converse/us.amazon.nova-lite-v1:0", "us.amazon.nova-lite-v1:0", "us-east-1"),
        ("invoke/anthropic.claude-v2:1", "anthropic.claude-v2:1", "us-east-1"),
        ("eu-central-1/anthropic.claude-v2:1", "anthropic.claude-v2:1", "eu-central-1"),
        (f"llama/{_INVOKED}", _INVOKED, "us-west-2"),
    ],
)
def test_a_model_of_bedrock_has_amazons_id_and_region_whatever_litellm_writes_before_it(
    tmp_path: Path, model: str, model_id: str, region: str
) -> None:
    entry = {"model_name": "nova", "litellm_params": {"model": f"bedrock/{model}"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model_list": [entry]}))
    setup = read_litellm(tmp_path / "config.yaml", {})
    assert configurations(setup)[0]["backends"]["nova"] == {
        "kind": "bedrock",
        "model_id": model_id,
        "region": region,
    }
    assert any(note.text == f"'nova' is answered by '{model_id}'" for note in setup.notes)


def test_the_profile_endpoint_and_timeouts_of_a_bedrock_model_are_carried(tmp_path: Path) -> None:
    params = {
        "model": "bedrock/anthropic.claude-v2:1",
        "model_id": "arn:aws:bedrock:us-east-1:1:application-inference-profile/a",
        "aws_region_name": "eu-west-1",
        "aws_profile_name": "team",
        "aws_bedrock_runtime_endpoint": "https://vpce.example",
        "aws_role_name": "arn:aws:iam::1:role/r",
        "timeout": 90,
    }
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"model_list": [{"model_name": "a", "litellm_params": params}]})
    )
    setup = read_litellm(tmp_path / "config.yaml", {})
    assert configurations(setup)[0]["backends"]["a"] == {
        "kind": "bedrock",
        "model_id": params["model_id"],
        "region": "eu-west-1",
        "profile": "team",
        "endpoint_url": "https://vpce.example",
        "total_timeout_seconds": 90.0,
        "read_timeout_seconds": 90.0,
    }
    said = {note.place.rpartition(".")[2]: note.text for note in setup.notes}
    assert "role_arn" in said["aws_role_name"]


def test_a_model_with_vision_takes_images_and_the_report_says_that_others_do_not(tmp_path: Path) -> None:
    models = [
        {
            "model_name": "seer",
            "litellm_params": {"model": "gpt-4o"},
            "model_info": {"supports_vision": True},
        },
        {
            "model_name": "blind",
            "litellm_params": {"model": "gpt-3"},
            "model_info": {"supports_vision": False},
        },
    ]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model_list": models}))
    setup = read_litellm(tmp_path / "config.yaml", {})
    assert configurations(setup)[0]["models"] == {"gpt-4o": {"images": {}}}
    assert any(note.place == "model_list" and "images are refused" in note.text for note in setup.notes)


def test_a_timeout_from_the_environment_is_carried_or_reported_as_one_without_its_variable(
    tmp_path: Path,
) -> None:
    params = {"model": "b", "timeout": "os.environ/SLOW", "stream_timeout": "os.environ/GONE"}
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"model_list": [{"model_name": "a", "litellm_params": params}]})
    )
    setup = read_litellm(tmp_path / "config.yaml", {"SLOW": "90"})
    backend = configurations(setup)[0]["backends"]["a"]
    assert backend["total_timeout_seconds"] == backend["first_token_timeout_seconds"] == 90
    outcomes = {note.place.rpartition(".")[2]: note.outcome for note in setup.notes}
    assert outcomes["timeout"] is ImportOutcome.CARRIED
    assert outcomes["stream_timeout"] is ImportOutcome.UNSUPPORTED


def test_a_setting_that_is_null_or_from_the_environment_is_no_reason_to_refuse_the_file(
    tmp_path: Path,
) -> None:
    sections = {
        "litellm_settings": {"request_timeout": 10, "cooldown_time": "os.environ/GONE"},
        "router_settings": {"timeout": "os.environ/SLOW", "allowed_fails": None},
    }
    models = [{"model_name": "a", "litellm_params": {"model": "b"}}]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model_list": models, **sections}))
    setup = read_litellm(tmp_path / "config.yaml", {"SLOW": "90"})
    assert setup.timeout_s == 90, "the router's is in force"
    outcomes = {note.place: note.outcome for note in setup.notes}
    assert outcomes["router_settings.timeout"] is ImportOutcome.CARRIED
    assert outcomes["litellm_settings.cooldown_time"] is ImportOutcome.UNSUPPORTED


def test_numbers_from_the_environment_and_fallbacks_with_fields_are_imported_or_reported(
    tmp_path: Path,
) -> None:
    numbers = {"rpm": "os.environ/RPM", "tpm": "os.environ/GONE", "input_cost_per_token": "os.environ/USD"}
    models = [{"model_name": name, "litellm_params": {"model": name, **numbers}} for name in "ab"]
    fallbacks = [{"a": [{"model": "b"}]}, {"b": [{"model": "a", "temperature": 0}]}]
    source = {"model_list": models, "litellm_settings": {"fallbacks": fallbacks}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(source))
    setup = read_litellm(tmp_path / "config.yaml", {"RPM": "60", "USD": "0.000002"})
    settings, _ = configurations(setup)
    assert settings["backends"]["a"]["price"]["input_usd_per_million"] == 2.0
    assert {name: group.fallbacks for name, group in setup.groups.items()} == {"a": ["b"], "b": ["a"]}
    assert setup.groups["a"].deployments[0].weight == 60
    unsupported = {note.place for note in setup.notes if note.outcome is ImportOutcome.UNSUPPORTED}
    assert {"model_list[0].litellm_params.tpm", "litellm_settings.fallbacks.b"} <= unsupported
    assert "litellm_settings.fallbacks.a" not in unsupported


@pytest.mark.parametrize(
    ("first", "second", "weights"),
    [
        ({"weight": 3, "rpm": 60}, {"rpm": 600, "weight": 1}, [3, 1]),
        ({"rpm": 60}, {"rpm": 30, "weight": 9}, [60, 30]),
        ({"weight": 3}, {"rpm": 600}, [3, 0]),
        ({}, {"rpm": 600}, [1, 1]),
    ],
)
def test_the_deployments_of_a_model_are_weighed_by_one_key_that_of_the_first(
    tmp_path: Path, first: dict[str, int], second: dict[str, int], weights: list[float]
) -> None:
    models = [{"model_name": "a", "litellm_params": {"model": "b", **keys}} for keys in (first, second)]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model_list": models}))
    setup = read_litellm(tmp_path / "config.yaml", {})
    assert [one.weight for one in setup.groups["a"].deployments] == weights


@pytest.mark.parametrize("mode", ["embedding", "rerank", "audio_transcription"])
def test_a_model_for_other_work_that_the_gateway_serves_is_imported(tmp_path: Path, mode: str) -> None:
    params = {"model": "hosted_vllm/bge-m3", "api_base": "http://gpu-1:8000/v1"}
    entry = {"model_name": "a", "litellm_params": params, "model_info": {"mode": mode}}
    chat = {"model_name": "b", "litellm_params": params}
    for models, default in (([entry], "a"), ([entry, chat], "b")):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model_list": models}))
        settings, routing = configurations(read_litellm(tmp_path / "config.yaml", {}))
        assert "a" in settings["backends"]
        assert routing["openai_route"] == default, "a request without a known model is for one that generates"


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("sambanova/llama", "openai/llama and its api_base"),
        ("azure/gpt-4", "/openai/v1"),
        ("os.environ/GONE", "its variable is not set"),
        ("hosted_vllm/b", "is missing or no http://HOST:PORT"),
    ],
)
def test_a_model_that_is_not_imported_is_reported_with_what_to_do(
    tmp_path: Path, model: str, text: str
) -> None:
    models = [
        {"model_name": name, "litellm_params": {"model": one}} for name, one in (("a", model), ("b", "b"))
    ]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model_list": models, "include": ["more.yaml"]}))
    setup = read_litellm(tmp_path / "config.yaml", {})
    assert list(setup.groups) == ["b"]
    assert any(note.place.startswith("model_list[0]") and text in note.text for note in setup.notes)
    assert any(note.place == "include" and "not read" in note.text for note in setup.notes)


def test_a_model_with_a_credential_of_the_list_is_asked_at_the_credentials_address(tmp_path: Path) -> None:
    own = {"api_base": "http://gpu-1:8000/v1", "api_key": "sk-do-not-copy"}
    names = ("own", "elsewhere")
    source = {
        "model_list": [
            {"model_name": one, "litellm_params": {"model": "openai/b", "litellm_credential_name": one}}
            for one in names
        ],
        "credential_list": [{"credential_name": "own", "credential_values": own}],
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(source))
    setup = read_litellm(tmp_path / "config.yaml", {})
    backend = configurations(setup)[0]["backends"]["own"]
    assert backend["base_urls"] == ["http://gpu-1:8000/v1"] and backend["api_key_env"] == "OWN_API_KEY"
    said = {note.place: note for note in setup.notes if "credential" in note.place}
    assert [note.outcome for note in said.values()] == [ImportOutcome.CARRIED, ImportOutcome.DIFFERENT]
    assert "base_urls" in said["model_list[1].litellm_params.litellm_credential_name"].text


@pytest.mark.parametrize(
    ("api_base", "url"),
    [("http://gpu-1:8000", "http://gpu-1:8000/v1"), ("http://gpu-1/own/path", "http://gpu-1/own/path")],
)
def test_a_vllm_server_that_litellm_names_by_its_root_is_asked_under_v1(
    tmp_path: Path, api_base: str, url: str
) -> None:
    entry = {"model_name": "a", "litellm_params": {"model": "hosted_vllm/b", "api_base": api_base}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model_list": [entry]}))
    setup = read_litellm(tmp_path / "config.yaml", {})
    assert configurations(setup)[0]["backends"]["a"]["base_urls"] == [url]


def test_a_timeout_is_of_each_call_and_the_route_leaves_time_for_the_calls_after_it(tmp_path: Path) -> None:
    models = [
        {"model_name": "slow", "litellm_params": {"model": "slow", "timeout": 900}},
        {"model_name": "quick", "litellm_params": {"model": "quick", "timeout": 5}},
        {"model_name": "plain", "litellm_params": {"model": "plain"}},
    ]
    source = {"model_list": models, "router_settings": {"fallbacks": [{"quick": ["plain"]}], "timeout": 20}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(source))
    settings, routing = configurations(read_litellm(tmp_path / "config.yaml", {}))
    calls = {name: backend["total_timeout_seconds"] for name, backend in settings["backends"].items()}
    assert calls == {"slow": 900, "quick": 5, "plain": 20}
    first = {name: one.get("first_token_timeout_seconds") for name, one in settings["backends"].items()}
    assert first == {"slow": 900, "quick": None, "plain": None}, "no shorter default ends the slow one's call"
    longest = {name: route["timeout_ms"] for name, route in routing["routes"].items()}
    assert longest == {"slow": 4_500_000, "quick": 60_000, "plain": 100_000}
    assert settings["server"] == {"request_timeout_seconds": 4500}, "no shorter one of the gateway ends them"


def test_an_alias_that_is_a_model_of_the_list_is_reported_and_the_file_imported(tmp_path: Path) -> None:
    models = [{"model_name": name, "litellm_params": {"model": name}} for name in "ab"]
    source = {"model_list": models, "router_settings": {"model_group_alias": {"a": "b"}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(source))
    setup = read_litellm(tmp_path / "config.yaml", {})
    assert configurations(setup)[1]["routes"]["b"]["models"] == ["b"]
    [note] = [note for note in setup.notes if "alias" in note.place]
    assert note.outcome is ImportOutcome.UNSUPPORTED


def test_prices_of_input_and_of_cached_tokens_are_carried_and_the_missing_one_is_reported(
    tmp_path: Path,
) -> None:
    model = {"model_name": "a", "litellm_params": {"model": "hosted_vllm/b", "api_base": "http://gpu-1:8000"}}
    info = {"input_cost_per_token": 0.000002, "cache_read_input_token_cost": 0.0000002}
    priced = {**model, "model_info": info}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model_list": [priced]}))
    setup = read_litellm(tmp_path / "config.yaml", {})
    price = configurations(setup)[0]["backends"]["a"]["price"]
    assert price == {
        "input_usd_per_million": 2.0,
        "output_usd_per_million": 0.0,
        "cached_usd_per_million": 0.2,
    }
    outcomes = {note.place: note.outcome for note in setup.notes}
    assert outcomes["model_list[0].output_cost_per_token"] is ImportOutcome.DIFFERENT


@pytest.mark.parametrize(
    "url", ["http://gpu-1:port/v1", "http://[::1:8000/v1", "https://h/v1?version=2", "gpu-1:80"]
)
def test_an_address_that_a_gateway_would_refuse_is_reported_and_the_other_models_are_imported(
    tmp_path: Path, url: str
) -> None:
    models = [
        {"model_name": "bad", "litellm_params": {"model": "hosted_vllm/b", "api_base": url}},
        {
            "model_name": "good",
            "litellm_params": {"model": "hosted_vllm/b", "api_base": "http://[::1]:8000/v1"},
        },
    ]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model_list": models}))
    setup = read_litellm(tmp_path / "config.yaml", {})
    assert list(configurations(setup)[0]["backends"]) == ["good"]
    assert any(note.place == "model_list[0].litellm_params.api_base" for note in setup.notes)


@pytest.mark.parametrize(
    ("out", "shown"), [(".", "with: sluice doctor"), ("a b", "with: cd 'a b' && sluice doctor")]
)
def test_the_command_that_checks_both_files_runs_in_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, shown: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["import", "litellm", str(SOURCE), "--out", out])
    assert result.exit_code == 0 and result.stdout.rstrip().endswith(shown)
    assert (tmp_path / out / "routing.yaml").is_file()


def test_a_folder_that_cannot_be_made_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(
        app, ["import", "litellm", str(SOURCE), "--out", str(tmp_path / "file" / "x")]
    )
    assert result.exit_code == 1 and "--out: " in result.stderr and "cannot be made" in result.stderr


async def test_each_imported_model_is_answered(tmp_path: Path, written: Any) -> None:
    async def say(request: Request) -> None:
        await answers(request.body["model"])(request)

    settings, routing = written
    pools = {name: one for name, one in settings["backends"].items() if one["kind"] == "openai"}
    names = [{"id": one["model"]} for one in pools.values()]
    fake = RawWorker([say], models=lambda: json.dumps({"data": names}).encode())
    await fake.start()
    served = {name: {**one, "base_urls": [fake.url]} for name, one in pools.items()}
    backends = {**settings["backends"], **served}
    files = {
        "sluice.yaml": {
            **settings,
            "backends": backends,
            "routing": {"file": str(tmp_path / "routing.yaml")},
        },
        "routing.yaml": routing,
    }
    for name, content in files.items():
        (tmp_path / name).write_text(yaml.safe_dump(content))
    keys = {one["api_key_env"]: "k" for one in pools.values() if "api_key_env" in one}
    started = gateway(tmp_path, config=tmp_path / "sluice.yaml", **keys)
    live = await asyncio.to_thread(started.__enter__)
    try:
        async with httpx.AsyncClient(base_url=live.url, headers=live.headers, timeout=60) as client:
            listed = {one["id"] for one in (await client.get("/v1/models")).json()["data"]}
            assert ANSWERED.keys() | {"nova"} <= listed
            for _ in range(600):  # until each worker has been probed
                if live.metric("sluice_worker_in_service") >= len(pools):
                    break
                await asyncio.sleep(0.1)
            for model, asked in ANSWERED.items():
                body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
                sent = (await client.post("/v1/chat/completions", json=body)).json()
                assert "choices" in sent, sent
                assert sent["choices"][0]["message"]["content"] in asked.split("|"), model
    finally:
        await asyncio.to_thread(started.__exit__, None, None, None)
        await fake.die()
