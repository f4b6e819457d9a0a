"""The backends' sections of the configuration, told apart by ``kind``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gateway.config_section import Section


class EngineBackend(Section):
    """The engine in process, as a backend."""

    kind: Literal["engine"]


BackendConfig = Annotated[EngineBackend, Field()]
