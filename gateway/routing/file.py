"""The routing configuration as an operator writes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from gateway.config.section import Section
from gateway.routing.route_limits import RouteAdmission, RouteResume


class _Part(Section):
    model_config = ConfigDict(allow_inf_nan=False)  # records are JSON, which has no infinity or NaN


_ModelName = Annotated[str, Field(pattern=r"^[!-~]{1,256}$")]
_Tokens = Annotated[int, Field(ge=0, le=10_000_000)]


class WeightedBackend(_Part):
    """A backend's share of a route's sessions, in percent."""

    name: str
    weight: Annotated[float, Field(ge=0, le=100)] = 100.0


class AdapterRule(_Part):
    """Selects an adapter if every field in ``when`` has the given value in the request.

    The adapter is named by id or alias, or is the newest active version that has all ``labels``.
    """

    when: dict[str, str]
    adapter: str | None = None
    labels: Annotated[dict[str, str], Field(max_length=32)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_of_both(self) -> AdapterRule:
        if (self.adapter is None) == (not self.labels):
            raise ValueError("adapter or labels: exactly one of both says which adapter")
        return self


class Slo(_Part):
    """Service levels; the defaults are for interactive chat."""

    ttft_ms: Annotated[float, Field(gt=0)] = 200.0
    total_ms: Annotated[float, Field(gt=0)] = 1400.0
    tpot_ms: Annotated[float, Field(gt=0)] | None = None


class RouteShadow(_Part):
    """Mirrors a sample of the route's requests to another backend, for comparison."""

    backend: str
    sample: Annotated[float, Field(ge=0, le=1)]


class SimilarQuestions(_Part):
    """Lets similar questions share an answer of the response cache."""

    model: _ModelName
    threshold: Annotated[float, Field(gt=0, le=1)]


class RouteCache(_Part):
    """Settings of the response cache for a route that has it in its fallback chain."""

    similar: SimilarQuestions | None = None


class BudgetsConfig(_Part):
    """Tokens per prompt section; an unset section has the prompt version's budget."""

    system: _Tokens | None = None
    retrieval: _Tokens | None = None
    recent_turns: _Tokens | None = None
    older_summary: _Tokens | None = None


class RouteConfig(_Part):
    """One route; docs/configuration.md explains each key."""

    backends: Annotated[list[WeightedBackend], Field(min_length=1)]
    models: Annotated[list[_ModelName], Field(max_length=256)] = Field(default_factory=list)
    fallback: list[str] = Field(default_factory=list)
    fallback_text_in: tuple[Literal["native", "openai"], ...] = ("native",)
    slo: Slo = Slo()
    prompt_version: str | None = None
    openai_prompt_version: str | None = None
    adapter_rules: list[AdapterRule] = Field(default_factory=list)
    adapter_fallback: Literal["none", "base"] = "none"
    budgets: BudgetsConfig = BudgetsConfig()
    reserve: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    spare: list[Literal["retrieval", "recent_turns"]] | None = None
    trim_in: tuple[Literal["native", "openai"], ...] = ("native",)
    admission: RouteAdmission = RouteAdmission()
    resume: RouteResume = RouteResume()
    timeout_ms: Annotated[float, Field(gt=0, le=86_400_000)] = 60_000.0
    record_content: bool = False
    requires_evaluation: bool = False
    shadow: RouteShadow | None = None
    response_cache: RouteCache = RouteCache()
    degraded_text: Annotated[str, Field(min_length=1)] = (
        "I'm handling a lot of questions right now. Please try again in a moment."
    )

    @model_validator(mode="after")
    def _weights_add_up(self) -> RouteConfig:
        total = sum(backend.weight for backend in self.backends)
        if abs(total - 100.0) > 1e-6:
            raise ValueError(f"backends: weights add up to {total:g}; allowed: 100")
        for key, names in (
            ("backends", [backend.name for backend in self.backends]),
            ("fallback", self.fallback),
        ):
            twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
            if twice is not None:
                raise ValueError(f"{key}: {twice!r} is named twice; name each once")
        return self


class RoutingConfig(_Part):
    """The whole routing configuration."""

    routes: Annotated[dict[str, RouteConfig], Field(min_length=1)]
    openai_route: str | None = None

    @model_validator(mode="after")
    def _a_model_has_one_route(self) -> RoutingConfig:
        routes: dict[str, str] = {}
        for name, route in self.routes.items():
            for model in route.models:
                if model in routes:
                    raise ValueError(
                        f"routes.{name}.models: {model!r} is of {routes[model]!r} too; allowed: one route"
                    )
                routes[model] = name
        return self
