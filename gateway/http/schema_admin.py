"""The OpenAPI entries of the operators' paths."""

from __future__ import annotations

from typing import Any, Final

from gateway.http.schema_parts import KEY, OPERATORS, answers, content, in_path, in_query, refusals

_ID: Final = in_path("id")
_LIMIT: Final = in_query("limit", "How many.", "integer")
_SINCE: Final = in_query("since", "ISO 8601 with an offset, a day (UTC), or seconds since 1970.")
_UNTIL: Final = in_query("until", "The same; what starts then is not in it.")


def admin_paths() -> dict[str, Any]:
    """Every path under ``/admin``, whether a gateway has it or not."""
    adapter, alias = "/admin/adapters/{id}", "/admin/adapters/aliases/{id}"
    return {
        "/admin/prompts": _get("Registered prompt versions", "PromptsBody"),
        "/admin/prompts/{id}": _get("One prompt version", "PromptBody", _ID),
        "/admin/budget/preview": _post("What would be sent", "NativeRequest", "PreviewBody"),
        "/admin/admission": _get("Queues, limits, last decisions", "AdmissionBody"),
        "/admin/adapters": _get("LoRA adapters: versions, aliases, loaded", "AdaptersBody")
        | _post("Add a version, or check one (200)", "AddBody", "AdapterBody", status=201, checked=200),
        adapter: _get("One version or alias", ("AdapterBody", "AliasBody"), _ID),
        f"{adapter}/verify": _post("Check a version's copy", None, "VerifiedBody", _ID),
        f"{adapter}/preload": _post("Load a version in every gateway", None, "AdapterBody", _ID),
        f"{adapter}/promote": _post("Promote a version", "PromoteBody", "AdapterBody", _ID),
        f"{adapter}/retire": _post("Serve a version no more", "CommentBody", "AdapterBody", _ID),
        f"{adapter}/pin": _post("Keep a version loaded", None, "AdapterBody", _ID),
        f"{adapter}/unpin": _post("No longer", None, "AdapterBody", _ID),
        f"{adapter}/labels": _post("Other labels", "LabelsBody", "AdapterBody", _ID),
        f"{adapter}/evaluation": _post("Keep an evaluation's report", "ReportBody", "AdapterBody", _ID),
        f"{alias}/rollback": _post("Lead an alias back", "RollbackBody", "AliasBody", _ID),
        f"{alias}/end-canary": _post("End an alias' canary", "CommentBody", "AliasBody", _ID),
        "/admin/keys": _get("Keys", "KeysBody") | _post("Make a key", "KeyBody", "KeyMadeBody", status=201),
        "/admin/keys/{id}": {"delete": _operation("Revoke a key", {"204": {"description": "Revoked"}}, _ID)},
        "/admin/routing": _get("The routing revision in force", "RevisionInForceBody")
        | {"put": _post("Apply a configuration", "RouteApplyBody", "RevisionMadeBody")["post"]},
        "/admin/routing/weights": _post("Set a share", "RouteWeightBody", "RevisionMadeBody"),
        "/admin/routing/promote": _post("Give a route whole", "RoutePromoteBody", "RevisionMadeBody"),
        "/admin/routing/rollback": _post("Go back", "RouteRollbackBody", "RevisionMadeBody"),
        "/admin/routing/history": _get("Revisions, newest first", "RevisionsBody", _LIMIT),
        "/admin/routing/diff": _get(
            "What two revisions differ in", "ChangesBody",
            in_query("a", "A revision's number.", "integer", required=True),
            in_query("b", "Another one's.", "integer", required=True),
        ),
        "/admin/audit": _get("What operators did, newest first", "AuditBody", _LIMIT),
        "/admin/canary": _get("The canary", "CanaryShownBody"),
        "/admin/canary/start": _post("Start a canary", "CanaryStartBody", "CanaryShownBody"),
        "/admin/canary/pause": _post("Judge nothing", "CanaryBody", "CanaryShownBody"),
        "/admin/canary/resume": _post("Judge again", "CanaryBody", "CanaryShownBody"),
        "/admin/canary/abort": _post("End it, as before", "CanaryAbortBody", "CanaryShownBody"),
        "/admin/shadow": _get(
            "How shadowed requests compare", None, _LIMIT,
            in_query("route", "Of one route alone."),
            in_query("since", "Seconds since 1970.", "number"),
        ),
        "/admin/usage": _get(
            "Sums of the ledger", "UsageSumsBody",
            in_query("by", "Keys with commas between; default: tenant."),
            in_query("kind", "request or shadow."), _SINCE, _UNTIL,
        ),
        "/admin/usage/rows": _get(
            "The ledger's rows, page by page", "UsageRowsBody", _LIMIT,
            in_query("after", "The next of the page before."), _SINCE, _UNTIL,
        ),
        "/admin/usage/reconcile": _get(
            "The ledger beside the engines' own counters", "UsageSumsBody", _SINCE, _UNTIL
        ),
        "/admin/chaos": _get("Faults made on purpose", "FaultsBody")
        | _post("Put other faults in force", "FaultsRequest", "FaultsBody"),
        "/admin/drain": _post("Take this process out of service", None, "DrainBody"),
    }  # fmt: skip


def _operation(summary: str, answered: dict[str, Any], *parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "summary": summary,
        "tags": [OPERATORS.tag],
        "security": [{KEY: []}],
        "parameters": list(parameters),
        "responses": {**answered, **refusals(OPERATORS, 401, 403, 404, OPERATORS.invalid, 503)},
    }


def _get(summary: str, answer: str | tuple[str, ...] | None, *parameters: dict[str, Any]) -> dict[str, Any]:
    """``answer``: one schema, one of several, or any object."""
    if isinstance(answer, str):
        answered = answers(200, answer)
    elif answer is None:
        answered = {"200": {"description": "An object", "content": {"application/json": {"schema": _ANY}}}}
    else:
        schemas = [content(one)["application/json"]["schema"] for one in answer]
        one_of = {"application/json": {"schema": {"anyOf": schemas}}}
        answered = {"200": {"description": " or ".join(answer), "content": one_of}}
    return {"get": _operation(summary, answered, *parameters)}


_ANY: Final = {"type": "object"}


def _post(
    summary: str,
    body: str | None,
    answer: str,
    *parameters: dict[str, Any],
    status: int = 200,
    checked: int | None = None,
) -> dict[str, Any]:
    """``body``: a schema, or ``None`` where none is looked at; ``checked``: the status of a dry run."""
    operation = _operation(summary, answers(status, answer), *parameters)
    if checked is not None:
        operation["responses"].update(answers(checked, answer))
    operation["responses"].update(refusals(OPERATORS, 400, 409, 413))
    if body is not None:
        operation["requestBody"] = {"required": True, "content": content(body)}
    return {"post": operation}
