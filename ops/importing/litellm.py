"""Reads the configuration of LiteLLM's proxy."""

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gateway.config.yaml_file import load_yaml
from ops.importing.values import (
    Deployment,
    ImportedSetup,
    ImportOutcome,
    ModelGroup,
    UnreadableSource,
    is_address,
    values_of,
)

FROM_ENVIRONMENT = "os.environ/"
# Providers with OpenAI's API, and their base URLs if the file names none.
OPENAI_CONTRACT: Mapping[str, str | None] = {
    "openai": "https://api.openai.com/v1",
    "text-completion-openai": "https://api.openai.com/v1",
    "groq": "https://api.groq.com/openai/v1",
    "deepseek": "https://api.deepseek.com/v1",
    "mistral": "https://api.mistral.ai/v1",
    "together_ai": "https://api.together.xyz/v1",
    "fireworks_ai": "https://api.fireworks.ai/inference/v1",
    "openrouter": "https://openrouter.ai/api/v1",
    "perplexity": "https://api.perplexity.ai",
    "xai": "https://api.x.ai/v1",
    "cerebras": "https://api.cerebras.ai/v1",
    "deepinfra": "https://api.deepinfra.com/v1/openai",
    "nvidia_nim": "https://integrate.api.nvidia.com/v1",
    "gemini": "https://generativelanguage.googleapis.com/v1beta/openai",
    "ollama": "http://localhost:11434",
    "ollama_chat": "http://localhost:11434",
    "hosted_vllm": None,
    "litellm_proxy": None,
    "lm_studio": None,
    "llamafile": None,
    "openai_like": None,
    "custom_openai": None,
    "databricks": None,
    "infinity": None,
    "xinference": None,
}
# Self-hosted servers, which may have no key.
_KEYLESS = frozenset(
    {
        "hosted_vllm",
        "infinity",
        "llamafile",
        "lm_studio",
        "ollama",
        "ollama_chat",
        "openai_like",
        "xinference",
    }
)
# Services that refuse or ignore OpenAI's max_completion_tokens.
_MAX_TOKENS = frozenset({"mistral", "ollama", "ollama_chat", "deepseek", "perplexity", "together_ai"})
_NO_KEY = frozenset({"none", "empty", "dummy", "fake-key", "sk-none", "not-needed", "no-key"})
_SECRET = re.compile(r"key|token|secret|auth|password", re.IGNORECASE)
_LIMITS = "limits are of keys: sluice keys create --rpm --tpm"
_RETRIES = "a request has at most 4 further calls, over workers and fallbacks together"
_AT_ONCE = "admission limits what runs at once: docs/admission.md"
_MONEY = 1_000_000
_WEIGHTS = ("weight", "rpm", "tpm")
_NEEDED = ("input", "output")
_PRICES = {
    "input": "input_cost_per_token",
    "output": "output_cost_per_token",
    "cached": "cache_read_input_token_cost",
    "cache_write": "cache_creation_input_token_cost",
}

# Providers whose services have an API other than OpenAI's.
_OTHER_CONTRACTS = frozenset(
    {"anthropic", "azure", "azure_ai", "bedrock", "cohere", "cohere_chat", "huggingface", "replicate",
     "sagemaker", "sagemaker_chat", "vertex_ai", "watsonx"}
)  # fmt: skip

_D, _U, _C = ImportOutcome.DIFFERENT, ImportOutcome.UNSUPPORTED, ImportOutcome.CARRIED
NOT_SENT = (_U, "is not added to requests; callers send it themselves")
NOT_SET = "its variable is not set; set it when you import"
# Settings that set no value in Sluice: the outcome, and what to do instead.
PARAMS: Mapping[str, tuple[ImportOutcome, str]] = {
    "max_retries": (_D, _RETRIES),
    "num_retries": (_D, _RETRIES),
    "tags": (_U, "no selection by tag; callers name a model or a route"),
    "api_version": (_U, "give api_base as .../openai/v1, which needs no version"),
    "cooldown_time": (_D, "backends.<name>.eject_seconds is of the whole pool; a Retry-After holds"),
    "max_parallel_requests": (_D, _AT_ONCE),
    "litellm_credential_name": (_D, "is not in this file: correct backends.<name>.base_urls and api_key_env"),
    "drop_params": (_D, "if it is true, set backends.<name>.unknown_fields: drop"),
    "guardrailConfig": (_D, "set backends.<name>.guardrail, with its id and version"),
    "max_budget": (_D, "budgets are of keys: sluice keys create"),
    "budget_duration": (_D, "see max_budget"),
}
SETTINGS: Mapping[str, tuple[ImportOutcome, str]] = {
    "num_retries": (_D, _RETRIES),
    "max_retries": (_D, _RETRIES),
    "retry_policy": (_D, f"each kind of failure has its own: docs/resilience.md; {_RETRIES}"),
    "context_window_fallbacks": (
        _U,
        "prompts are counted before they are sent; one too long is refused with the numbers",
    ),
    "content_policy_fallbacks": (_U, "an answer that a service filters is passed on as it is"),
    "enable_pre_call_checks": (_C, "prompts are always counted first"),
    "cache": (_D, "stored answers are for outages: add response_cache to a route's fallback"),
    "cache_params": (_D, "response_cache.url and response_cache.ttl_seconds; see cache"),
    "set_verbose": (_D, "sluice serve --log-level debug"),
    "master_key": (
        _D,
        "set the variable SLUICE_ADMIN_KEY; it was not copied. Virtual keys: sluice keys create",
    ),
    "database_url": (_D, "set SLUICE_LEDGER__URL to postgresql+asyncpg://...; it was not copied"),
    "redis_host": (_D, "set SLUICE_STATE__URL to redis://... where several gateways share limits"),
    "redis_port": (_D, "see redis_host"),
    "redis_password": (_D, "see redis_host; it was not copied"),
    "redis_url": (_D, "see redis_host; it was not copied"),
    "store_model_in_db": (_U, "models are in this file; routes change by `sluice routes`"),
    "max_parallel_requests": (_D, _AT_ONCE),
    "global_max_parallel_requests": (_D, _AT_ONCE),
    "alerting": (_D, "alert on /metrics; rules are in deploy/"),
    "tag_filtering": (_U, "no selection by tag"),
}
_GENERATING = frozenset({"chat", "completion", "responses"})
_MODES = _GENERATING | {"embedding", "rerank", "audio_transcription"}
_NUMBERS = frozenset({"timeout", "request_timeout", "allowed_fails", "cooldown_time"})
_TIMEOUTS = {"timeout": "total_timeout_seconds", "stream_timeout": "first_token_timeout_seconds"}


def read_litellm(path: Path, environ: Mapping[str, str] = os.environ) -> ImportedSetup:
    """Read LiteLLM's configuration file. Raises UnreadableSource."""
    data = load_yaml(path, UnreadableSource)
    models = data.get("model_list") if isinstance(data, dict) else None
    if not isinstance(models, list) or not models:
        hint = ", in this file (include is not read)" if isinstance(data, dict) and "include" in data else ""
        raise UnreadableSource(f"{path}: model_list is missing or empty; allowed: a list of models{hint}")
    setup = ImportedSetup()
    with values_of("LiteLLM", f"{path}: credential_list"):
        listed = data.pop("credential_list", None) or ()
        credentials = {one.get("credential_name"): one.get("credential_values") or {} for one in listed}
    for number, entry in enumerate(models):
        place = f"model_list[{number}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("litellm_params"), dict):
            raise UnreadableSource(f"{path}: {place}: allowed: a mapping with model_name and litellm_params")
        with values_of("LiteLLM", f"{path}: {place}"):
            params = entry["litellm_params"]
            if (values := credentials.get(params.get("litellm_credential_name"))) is not None:
                setup.carried(f"{place}.litellm_params.litellm_credential_name", "with its values; no secret")
                del params["litellm_credential_name"]
                entry = {**entry, "litellm_params": {**values, **params}}
            _Model(setup, place, entry, environ).read()
    setup.different(
        "model_list",
        "prompts are counted by the workers' /tokenize, or estimated; to count exactly, set engine.tokenizer",
    )
    setup.different(
        "model_list", "images are refused but for models with models.<model>.images: docs/images.md"
    )
    # Of a setting of both the library and its router, the router's is in force.
    for section in ("litellm_settings", "router_settings", "general_settings"):
        with values_of("LiteLLM", f"{path}: {section}"):
            settings = (data.pop(section, None) or {}).items()
        # Those of one model come first: the others are for models that have none.
        for key, value in sorted(settings, key=lambda setting: setting[0] == "default_fallbacks"):
            place = f"{section}.{key}"
            with values_of("LiteLLM", f"{path}: {place}"):
                if key in _NUMBERS and str(value).startswith(FROM_ENVIRONMENT):
                    value = environ.get(value.removeprefix(FROM_ENVIRONMENT))
                    if value is None:
                        setup.unsupported(place, NOT_SET)
                if value is not None:
                    _setting(setup, place, key, value)
    if not setup.timeout_s:
        text = "is 60 s here unless a model has a longer timeout, not 6000 s: routes.<name>.timeout_ms"
        setup.different("litellm_settings.request_timeout", text)
    if not any(note.place == "general_settings.master_key" for note in setup.notes):
        setup.different("general_settings.master_key", "keys are required here: set SLUICE_ADMIN_KEY")
    data.pop("model_list")
    for key in data:
        included = "its files are not read; copy their models into one file" if key == "include" else None
        setup.unsupported(key, included or "has no counterpart here")
    return setup


class _Model:
    """One entry of ``model_list``."""

    def __init__(
        self, setup: ImportedSetup, place: str, entry: dict[str, Any], environ: Mapping[str, str]
    ) -> None:
        self.setup, self.place, self.environ = setup, place, environ
        self.where = f"{place}.litellm_params"
        self.name = str(entry.get("model_name", ""))
        self.info = dict(entry.get("model_info") or {})
        self.params = dict(entry["litellm_params"])

    def read(self) -> None:
        """Add the entry to its model group, and note the outcome of each setting."""
        setup, params = self.setup, self.params
        provider, model = self._provider(self._text("model") or "")
        if not model:
            setup.unsupported(f"{self.where}.model", f"is missing, or {NOT_SET}")
            return
        if "*" in self.name or not re.fullmatch(r"[!-~]{1,256}", self.name):
            setup.unsupported(
                f"{self.place}.model_name",
                "names have no spaces and no *; a pool without model serves all that its workers list",
            )
            return
        if (mode := self.info.pop("mode", "chat")) not in _MODES:
            setup.unsupported(f"{self.place}.model_info.mode", f"{mode} models are not imported")
            return
        if provider == "bedrock":
            base, section = None, self._bedrock(model)
            model = section["model_id"]
        else:
            found = self._openai(provider, model)
            if found is None:
                return
            base, section = found
        for key in (*_WEIGHTS, "order", *_PRICES.values()):
            if str(params.get(key)).startswith(FROM_ENVIRONMENT):
                if (value := self._text(key)) is None:
                    setup.unsupported(f"{self.where}.{key}", NOT_SET)
                else:
                    params[key] = value
        weight = self._weight()
        order = int(params.pop("order", 1))
        self._prices(section)
        self._model_section(model)
        setup.add(self.name, Deployment(base, section, weight, order))
        setup.groups[self.name].generates = mode in _GENERATING
        setup.carried(self.place, f"{self.name!r} is answered by {model!r}" + (f" at {base}" if base else ""))
        for key in params:
            setup.note(f"{self.where}.{key}", *PARAMS.get(key, NOT_SENT))
        for key in self.info:
            setup.unsupported(f"{self.place}.model_info.{key}", "has no counterpart; it changes no answer")

    def _provider(self, model: str) -> tuple[str, str]:
        provider = self.params.pop("custom_llm_provider", None)
        prefix, slash, rest = model.partition("/")
        known = prefix in OPENAI_CONTRACT or prefix in _OTHER_CONTRACTS
        if provider is None and slash and (known or "api_base" not in self.params):
            return prefix, rest
        if provider is None and re.match(r"claude", model):
            return "anthropic", model
        return provider or "openai", rest if slash and prefix == provider else model

    def _bedrock(self, model: str) -> dict[str, Any]:
        setup, where = self.setup, self.where
        named = re.search(r"(?:^|[/:])([a-z]{2}(?:-[a-z]+)+-\d)[/:]", model)
        # LiteLLM's routes and a region, each before a slash, are no part of Amazon's id.
        model = model.split("/", model.partition(":")[0].count("/"))[-1]
        region = self._text("aws_region_name") or (named and named[1])
        if region is None:
            region = "us-east-1"
            setup.different(f"{where}.aws_region_name", "us-east-1 was written; correct region")
        section: dict[str, Any] = {"kind": "bedrock", "model_id": self._text("model_id") or model}
        section["region"] = region
        texts = {"aws_profile_name": "profile", "aws_bedrock_runtime_endpoint": "endpoint_url"}
        self._carry(section, texts, str)
        self._carry(section, {**_TIMEOUTS, "stream_timeout": "read_timeout_seconds"}, float)
        for key in [key for key in self.params if key.startswith("aws_")]:
            del self.params[key]
            text = "credentials are AWS's usual chain; none was copied. A role: a profile with its role_arn"
            setup.different(f"{where}.{key}", text)
        return section

    def _carry(self, section: dict[str, Any], names: Mapping[str, str], read: Callable[[str], Any]) -> None:
        """Write parameters to ``section``; ``names`` are their names here."""
        params, setup, where = self.params, self.setup, self.where
        for key, ours in names.items():
            if params.get(key) is None:
                params.pop(key, None)
            elif (value := self._text(key)) is None:
                setup.unsupported(f"{where}.{key}", NOT_SET)
            else:
                section[ours] = read(value)
                setup.carried(f"{where}.{key}", f"backends.<name>.{ours}")

    def _openai(self, provider: str, model: str) -> tuple[str, dict[str, Any]] | None:
        setup, params, where = self.setup, self.params, self.where
        base = self._text("api_base") or self._text("base_url") or OPENAI_CONTRACT.get(provider)
        if provider in ("azure", "azure_ai") and base is not None and base.rstrip("/").endswith("/v1"):
            provider = "azure"
        elif provider not in OPENAI_CONTRACT:
            text = f"{provider} is not imported; with OpenAI's API: openai/{model} and its api_base"
            if provider == "azure":
                text = "azure is imported with an api_base that ends in /openai/v1"
            setup.unsupported(f"{where}.model", text)
            return None
        if base is None or not is_address(base):
            setup.unsupported(
                f"{where}.api_base", "is missing or no http://HOST:PORT; set its variable when you import"
            )
            return None
        base = base.rstrip("/")
        bare = provider == "hosted_vllm" and re.fullmatch("https?://[^/]+", base)
        if bare or (provider.startswith("ollama") and not base.endswith("/v1")):
            base += "/v1"
        section: dict[str, Any] = {"kind": "openai", "model": model}
        if provider != "hosted_vllm":
            section |= {"dialect": "openai", "unknown_fields": "pass", "metrics_path": None}
            section["probe_interval_seconds"] = 30.0
            if provider in _MAX_TOKENS:
                section["max_tokens_field"] = "max_tokens"
        if (variable := self._key(provider)) is not None:
            section["api_key_env"] = variable
        self._carry(section, _TIMEOUTS, float)
        self._headers(section)
        if isinstance(ca_file := params.pop("ssl_verify", None), str):
            section["tls"] = {"ca_file": ca_file}
        elif ca_file is False:
            setup.unsupported(f"{where}.ssl_verify", "certificates are always checked; name tls.ca_file")
        return base, section

    def _headers(self, section: dict[str, Any]) -> None:
        given = self.params.pop("extra_headers", None) or {}
        headers = {}
        if (organization := self._text("organization")) is not None:
            headers["OpenAI-Organization"] = organization
        for name, value in given.items():
            place = f"{self.where}.extra_headers.{name}"
            secret = _SECRET.search(name) or str(value).startswith(FROM_ENVIRONMENT)
            if secret or not re.fullmatch(r"[!-z|~]+( [!-z|~]+)*", str(value)):
                text = "may be a secret and was not copied; see backends.<name>.headers"
                self.setup.unsupported(place, text)
            else:
                headers[name] = str(value)
                self.setup.carried(place, "backends.<name>.headers")
        if headers:
            section["headers"] = headers

    def _key(self, provider: str) -> str | None:
        """The name of the environment variable with the key; a key in the file is not copied."""
        place, key = f"{self.where}.api_key", self.params.pop("api_key", None)
        default = re.sub(r"\W", "_", provider.upper()) + "_API_KEY"
        if key is None:
            return None if provider in _KEYLESS else default
        if str(key).startswith(FROM_ENVIRONMENT):
            return str(key).removeprefix(FROM_ENVIRONMENT)
        if str(key).lower() in _NO_KEY:
            return None
        group = self.setup.groups.get(self.name)
        number = f"_{len(group.deployments) + 1}" if group else ""
        variable = re.sub(r"\W", "_", f"{self.name}{number}_API_KEY".upper())
        variable = f"MODEL_{variable}" if variable[0].isdigit() else variable
        self.setup.different(place, f"set the variable {variable}; the key in the file was not copied")
        return variable

    def _prices(self, section: dict[str, Any]) -> None:
        prices = {kind: self.params.pop(key, self.info.pop(key, None)) for kind, key in _PRICES.items()}
        if any(usd is not None for usd in prices.values()):
            given = {kind: usd or 0 for kind, usd in prices.items() if usd is not None or kind in _NEEDED}
            section["price"] = {
                f"{kind}_usd_per_million": round(float(usd) * _MONEY, 6) for kind, usd in given.items()
            }
            for kind in given:
                outcome, more = (_D, "; 0 was written, correct it") if prices[kind] is None else (_C, "")
                self.setup.note(f"{self.place}.{_PRICES[kind]}", outcome, f"backends.<name>.price{more}")

    def _model_section(self, model: str) -> None:
        """Write the section of the model, with its length and whether it takes images."""
        if not re.match(r"[A-Za-z0-9]", model):
            return  # the name of no section
        section, place = dict[str, Any](), f"{self.place}.model_info"
        if (longest := self.info.pop("max_input_tokens", None)) is not None:
            section["max_model_len"] = int(longest) + int(self.info.pop("max_output_tokens", 0) or 0)
            self.setup.carried(f"{place}.max_input_tokens", "models.<model>.max_model_len")
        if self.info.pop("supports_vision", False):
            section["images"] = {}
            text = "models.<model>.images; correct its formula of an image's tokens"
            self.setup.different(f"{place}.supports_vision", text)
        if section:
            self.setup.sections.setdefault("models", {}).setdefault(model, {}).update(section)

    def _weight(self) -> float:
        """The weight: LiteLLM weighs all deployments by the first of the keys that the first of them has."""
        given = {key: self.params.pop(key, None) for key in _WEIGHTS}
        group = self.setup.groups.setdefault(self.name, ModelGroup(self.name))
        if not group.deployments:
            group.weighed_by = next((key for key in _WEIGHTS if given[key] is not None), None)
        for key, value in given.items():
            if value is None:
                continue
            place = f"{self.where}.{key}"
            given[key] = _weight(key, value)
            if key == group.weighed_by == "weight":
                self.setup.carried(place, "routes.<name>.backends[].weight, in percent")
            elif key == "weight":
                self.setup.different(place, "has no effect, as the first deployment of the model has none")
            else:
                self.setup.different(place, f"taken as weight where there is none; {_LIMITS}")
        return 1.0 if group.weighed_by is None else given[group.weighed_by] or 0.0

    def _text(self, key: str) -> str | None:
        """A value that is not secret; a reference to the environment is resolved."""
        value = self.params.pop(key, None)
        if isinstance(value, str) and value.startswith(FROM_ENVIRONMENT):
            return self.environ.get(value.removeprefix(FROM_ENVIRONMENT))
        return None if value is None else str(value)


def _weight(key: str, value: Any) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise ValueError(f"{key} is {value}; allowed: 0 or more")
    return weight


def _setting(setup: ImportedSetup, place: str, key: str, value: Any) -> None:
    """Read one setting of the proxy, its router or its library."""
    match key:
        case "routing_strategy" if value == "simple-shuffle":
            setup.carried(place, "backends of a route share sessions by their weights")
        case "routing_strategy":
            setup.different(place, "weights between backends; in a pool affinity, then the least load")
        case "fallbacks":
            for entry in sorted(value or (), key=lambda entry: "*" in entry):
                for name, others in entry.items():
                    _fall_back(setup, place, str(name), others)
        case "default_fallbacks":
            _fall_back(setup, place, "*", value)
        case "model_group_alias":
            for alias, target in (value or {}).items():
                name = target.get("model") if isinstance(target, dict) else target
                if alias in setup.groups:
                    setup.unsupported(f"{place}.{alias}", "is a model of the list, and stays it")
                elif name in setup.groups:
                    setup.groups[name].aliases.append(str(alias))
                    hidden = isinstance(target, dict) and target.get("hidden")
                    more = "; /v1/models lists it" if hidden else ""
                    setup.note(f"{place}.{alias}", _D if hidden else _C, f"routes.<name>.models{more}")
                else:
                    setup.unsupported(f"{place}.{alias}", f"{name!r} was not imported")
        case "timeout" | "request_timeout":
            setup.timeout_s = float(value)
            setup.carried(
                place, "backends.<name>.total_timeout_seconds; routes.<name>.timeout_ms for all calls"
            )
        case "allowed_fails" | "cooldown_time":
            ours = "eject_after_failures" if key == "allowed_fails" else "eject_seconds"
            setup.set_on_all({ours: int(value) + 1 if key == "allowed_fails" else float(value)}, "openai")
            setup.carried(place, f"backends.<name>.{ours}")
        case "drop_params":
            if value:
                setup.set_on_all({"unknown_fields": "drop"}, "openai", "bedrock")
            setup.carried(place, "backends.<name>.unknown_fields")
        case "json_logs":
            setup.sections["server"] = {"log_json": bool(value)}
            setup.carried(place, "server.log_json")
        case "callbacks" | "success_callback" | "failure_callback" | "service_callback":
            for name in [value] if isinstance(value, str) else value or ():
                _callback(setup, f"{place}.{name}", str(name))
        case _:
            setup.note(place, *SETTINGS.get(key, (_U, "has no counterpart here; see docs/configuration.md")))


def _fall_back(setup: ImportedSetup, place: str, name: str, others: Any) -> None:
    if any(isinstance(one, dict) and one.keys() != {"model"} for one in others or ()):
        setup.unsupported(f"{place}.{name}", "a fallback gets the request as it is, without further fields")
    others = [one.get("model") if isinstance(one, dict) else one for one in others or ()]
    # "*" is for models that have no fallbacks of their own.
    groups = [one for one in setup.groups.values() if one.name == name or (name == "*" and not one.fallbacks)]
    missing = [one for one in others if one not in setup.groups]
    if missing or not groups:
        what = ", ".join(map(str, missing)) or ("a model without fallbacks" if name == "*" else name)
        setup.unsupported(f"{place}.{name}", f"{what} was not imported")
    for group in groups:
        found = [one for one in others if one in setup.groups and one != group.name]
        group.fallbacks += found
        if found:
            setup.carried(f"{place}.{name}", f"routes.{group.name}.fallback: {', '.join(found)}")


def _callback(setup: ImportedSetup, place: str, name: str) -> None:
    if name == "prometheus":
        setup.carried(place, "/metrics has Sluice's own names: docs/observability.md")
    elif name in ("otel", "arize", "langfuse_otel"):
        setup.different(place, "set tracing.otlp_endpoint")
    else:
        setup.unsupported(place, "no such sink; spans go to tracing.otlp_endpoint, usage is in the ledger")
