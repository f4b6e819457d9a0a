"""``/admin/canary``: the canary, for operators."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, TypeVar

import orjson
from pydantic import Field, field_validator
from starlette.types import Receive, Scope

from gateway.admin.ports import CanaryOrder, CanaryService
from gateway.contracts.fields import Body
from gateway.contracts.native_answer import error_json
from gateway.contracts.refusals import parse
from gateway.contracts.values import CallerRole
from gateway.http.body import read_body
from gateway.http.endpoint import Endpoint, require_role
from gateway.http.exchange import Exchange, Reply
from gateway.ports import Services
from gateway.routing.canary import MIN_SAMPLES, STEP_S, STEPS, WINDOW_S
from gateway.routing.change import WHOLE

Answer = Mapping[str, object]


class CanaryBody(Body):
    """Why; kept in the audit log."""

    comment: Annotated[str, Field(max_length=1_000)] = ""


class CanaryAbortBody(CanaryBody):
    """Why; a dry run tells what would change."""

    dry_run: bool = False


class CanaryStartBody(CanaryAbortBody):
    """A backend that shall have a route, step by step."""

    route: str
    backend: str
    steps: Annotated[tuple[Annotated[float, Field(gt=0, le=WHOLE)], ...], Field(max_length=20)] = STEPS
    min_samples: Annotated[int, Field(ge=1, le=1_000_000)] = MIN_SAMPLES
    step_seconds: Annotated[float, Field(ge=0, le=43_200)] = STEP_S
    window_seconds: Annotated[float, Field(ge=1, le=60)] = WINDOW_S

    @field_validator("steps")
    @classmethod
    def _rising(cls, steps: tuple[float, ...]) -> tuple[float, ...]:
        if len(steps) < 2 or steps[-1] != WHOLE or list(steps) != sorted(set(steps)):
            raise ValueError("allowed: at least two rising percents, the last of them 100")
        return steps

    def order(self, who: str) -> CanaryOrder:
        """The same for the desk."""
        return CanaryOrder(
            who,
            self.route,
            self.backend,
            self.comment,
            self.steps,
            self.min_samples,
            self.step_seconds,
            self.window_seconds,
            self.dry_run,
        )


B = TypeVar("B", bound=CanaryBody)


def canary_pages(services: Services, canary: CanaryService) -> tuple[Endpoint, dict[str, Endpoint]]:
    """What GET of ``/admin/canary`` answers, and what is posted, by path."""

    async def show(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        require_role(services, exchange, CallerRole.OPERATOR)
        return Reply(200, orjson.dumps(canary.show()))

    def post(body: type[B], act: Callable[[B, str], Awaitable[Answer]]) -> Endpoint:
        async def handle(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
            caller = require_role(services, exchange, CallerRole.OPERATOR)
            raw = await read_body(exchange, receive, services.limits.max_body_bytes)
            # Not until the caller is gone: an order that was begun is audited too. It is short and bounded.
            return Reply(200, orjson.dumps(await act(parse(body, raw or b"{}"), caller.key_id)))

        return Endpoint(handle, error_json)

    return Endpoint(show, error_json), {
        "/admin/canary/start": post(CanaryStartBody, lambda given, who: canary.start(given.order(who))),
        "/admin/canary/pause": post(CanaryBody, lambda given, who: canary.pause(who, given.comment)),
        "/admin/canary/resume": post(CanaryBody, lambda given, who: canary.resume(who, given.comment)),
        "/admin/canary/abort": post(
            CanaryAbortBody,
            lambda given, who: canary.abort(who, given.comment, dry_run=given.dry_run),
        ),
    }
