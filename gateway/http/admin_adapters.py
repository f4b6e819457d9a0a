"""``/admin/adapters``: the LoRA registry, for operators; promoting by force is for admins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import Field
from starlette.types import Receive, Scope

from gateway.admin.ports import AdapterService, Promotion
from gateway.contracts.fields import Body
from gateway.contracts.native_answer import error_json
from gateway.contracts.refusals import parse
from gateway.contracts.values import Caller, CallerRole
from gateway.http.body import read_body
from gateway.http.disconnect_watch import run_until_gone
from gateway.http.endpoint import Endpoint, require_role
from gateway.http.exchange import Exchange, Reply
from gateway.ports import Services

B = TypeVar("B", bound=Body)
_Comment = Annotated[str, Field(max_length=1_000)]
_Labels = Annotated[dict[str, str], Field(max_length=32)]


class AddBody(Body):
    """A new version: its name and where it lies (a folder, an archive, ``s3://bucket/prefix``)."""

    id: str
    location: Annotated[str, Field(min_length=1, max_length=1_024)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    labels: _Labels = Field(default_factory=dict)
    base_revision: Annotated[str, Field(max_length=256)] | None = None
    comment: _Comment = ""
    dry_run: bool = False


class PromoteBody(Body):
    """Where a version is promoted to; below 100 percent it is a canary of the alias."""

    alias: str | None = None
    percent: Annotated[float, Field(gt=0, le=100)] = 100.0
    force: bool = False
    comment: _Comment = ""
    dry_run: bool = False


class RollbackBody(Body):
    """The version to go back to; unset: the one before."""

    to: str | None = None
    comment: _Comment = ""
    dry_run: bool = False


class CommentBody(Body):
    """Why; a dry run changes nothing and answers as it would be."""

    comment: _Comment = ""
    dry_run: bool = False


class LabelsBody(Body):
    """The labels that a version shall have."""

    labels: _Labels


class ReportBody(Body):
    """An evaluation's report; ``passed`` decides."""

    report: dict[str, Any]


def adapter_pages(services: Services, adapters: AdapterService) -> dict[str, Endpoint]:
    """What is read with GET, by path."""

    async def listed(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        require_role(services, exchange, CallerRole.OPERATOR)
        return Reply(200, orjson.dumps(adapters.show_all()))

    async def one(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        require_role(services, exchange, CallerRole.OPERATOR)
        return Reply(200, orjson.dumps(adapters.show(scope["path_params"]["id"])))

    return {
        "/admin/adapters": Endpoint(listed, error_json),
        "/admin/adapters/{id}": Endpoint(one, error_json),
    }


def adapter_changes(services: Services, adapters: AdapterService) -> dict[str, Endpoint]:
    """What is posted, by path."""

    def post(
        body: type[B],
        change: Callable[[str, B, Caller], Awaitable[Mapping[str, object]]],
        *,
        status: int = 200,
    ) -> Endpoint:
        async def handle(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
            caller = require_role(services, exchange, CallerRole.OPERATOR)
            raw = await read_body(exchange, receive, services.limits.max_body_bytes)
            given = parse(body, raw or b"{}")
            if isinstance(given, PromoteBody) and given.force:
                require_role(services, exchange, CallerRole.ADMIN)
            name = scope["path_params"].get("id", "")
            done = await run_until_gone(change(name, given, caller), exchange, receive, services.clock)
            return Reply(200 if "dry_run" in done else status, orjson.dumps(done))

        return Endpoint(handle, error_json)

    async def add(_: str, given: AddBody, caller: Caller) -> Mapping[str, object]:
        return await adapters.add(
            given.id,
            given.location,
            who=caller.key_id,
            sha256=given.sha256,
            labels=given.labels,
            base_revision=given.base_revision,
            comment=given.comment,
            dry_run=given.dry_run,
        )

    async def promote(name: str, given: PromoteBody, caller: Caller) -> Mapping[str, object]:
        promotion = Promotion(given.alias, given.percent, given.force, given.comment, given.dry_run)
        return await adapters.promote(name, promotion, who=caller.key_id)

    def roll_back(name: str, given: RollbackBody, caller: Caller) -> Awaitable[Mapping[str, object]]:
        return adapters.roll_back(
            name, who=caller.key_id, to=given.to, comment=given.comment, dry_run=given.dry_run
        )

    def retire(name: str, given: CommentBody, caller: Caller) -> Awaitable[Mapping[str, object]]:
        return adapters.retire(name, who=caller.key_id, comment=given.comment, dry_run=given.dry_run)

    def end_canary(name: str, given: CommentBody, caller: Caller) -> Awaitable[Mapping[str, object]]:
        return adapters.end_canary(name, who=caller.key_id, comment=given.comment, dry_run=given.dry_run)

    at = "/admin/adapters/{id}"
    alias = "/admin/adapters/aliases/{id}"
    return {
        "/admin/adapters": post(AddBody, add, status=201),
        f"{at}/verify": post(Body, lambda name, _, by: adapters.verify(name, who=by.key_id)),
        f"{at}/preload": post(Body, lambda name, _, by: adapters.preload(name, who=by.key_id)),
        f"{at}/promote": post(PromoteBody, promote),
        f"{at}/retire": post(CommentBody, retire),
        f"{at}/pin": post(Body, lambda name, _, by: adapters.pin(name, True, who=by.key_id)),
        f"{at}/unpin": post(Body, lambda name, _, by: adapters.pin(name, False, who=by.key_id)),
        f"{at}/labels": post(
            LabelsBody, lambda name, given, by: adapters.label(name, given.labels, who=by.key_id)
        ),
        f"{at}/evaluation": post(
            ReportBody, lambda name, given, by: adapters.evaluated(name, given.report, who=by.key_id)
        ),
        f"{alias}/rollback": post(RollbackBody, roll_back),
        f"{alias}/end-canary": post(CommentBody, end_canary),
    }
