"""The recorder of a request: no stage of the journey reads from it."""

from __future__ import annotations

import inspect
import typing

from gateway.requests.request_record import RequestRecorder


def test_the_recorder_only_listens() -> None:
    public = {name: value for name, value in vars(RequestRecorder).items() if not name.startswith("_")}
    assert public, "it listens to something"
    for name, method in public.items():
        assert inspect.isfunction(method), f"{name} can be read"
        assert typing.get_type_hints(method)["return"] is type(None), f"{name} returns a value"
