"""The section ``admission``, and the degradation rung, which routes use too."""

from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from admission.ladder import Rung
from admission.values import AdmissionLimits
from gateway.config.section import Section


class RungConfig(Section):
    """A rung of the degradation ladder: limits of new requests while at least ``depth`` requests wait, beside
    those of the rungs below."""

    depth: Annotated[int, Field(ge=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    shed_low: bool = False
    shed_all: bool = False

    def rung(self) -> Rung:
        return Rung(self.depth, self.max_tokens, self.shed_low, self.shed_all)


# Keys that are fields of AdmissionLimits.
_SAME = ("max_queue", "max_queue_tokens", "max_queue_bytes", "max_input_tokens", "kv_pressure")
_WATERMARKS = ("watermark_low", "watermark_normal", "watermark_high")


def check_watermarks(section: Any) -> None:
    """Raise ValueError where a class has more memory than a higher one, of the watermarks that are set."""
    for name, above in pairwise(name for name in _WATERMARKS if _is_set(section, name)):
        mark, most = getattr(section, name), getattr(section, above)
        if mark > most:
            raise ValueError(f"{name}: {mark} is above {above} ({most}); allowed: at most as much")


def _is_set(section: Any, name: str) -> bool:
    return name in section.model_fields_set and getattr(section, name) is not None


def thresholds(section: Any, default: AdmissionLimits) -> dict[str, Any]:
    """Return what this section or a route's sets of the keys that both have, as fields of the limits."""
    own = {name: value for name in _SAME if (value := getattr(section, name)) is not None}
    if section.max_wait_ms is not None:
        own["max_wait_s"] = section.max_wait_ms / 1000
    if section.ladder is not None:
        own["rungs"] = tuple(one.rung() for one in section.ladder)
    marks = list(default.watermarks)
    for place, name in enumerate(_WATERMARKS):
        if _is_set(section, name):  # the others keep the order of the classes
            mark = getattr(section, name)
            lower, higher = marks[:place], marks[place + 1 :]
            marks = [*(min(one, mark) for one in lower), mark, *(max(one, mark) for one in higher)]
            own["watermarks"], own["oom_watermark"] = tuple(marks), marks[2]
    return own


class AdmissionConfig(Section):
    """Admission thresholds; :class:`AdmissionLimits` has the reasons for the defaults."""

    max_queue: Annotated[int, Field(ge=0, le=1_000_000)] = 1000
    max_wait_ms: Annotated[float, Field(gt=0, le=3_600_000)] | None = None
    max_input_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    max_queue_tokens: Annotated[int, Field(ge=1)] = 1_000_000
    max_queue_bytes: Annotated[int, Field(ge=1)] = 64 << 20
    kv_pressure: Annotated[float, Field(gt=0, le=1)] = 0.93
    watermark_low: Annotated[float, Field(gt=0, le=1)] = 0.90
    watermark_normal: Annotated[float, Field(gt=0, le=1)] = 0.95
    watermark_high: Annotated[float, Field(gt=0, le=1)] = 0.98
    output_quantile: Annotated[float, Field(gt=0, lt=1)] = 0.8
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 2048
    max_in_flight: Annotated[int, Field(ge=1)] = 256
    aging_seconds: Annotated[float, Field(ge=0)] = 10.0
    tpot_slo_ms: Annotated[float, Field(gt=0)] | None = 250.0
    ladder: tuple[RungConfig, ...] | None = None

    @model_validator(mode="after")
    def _watermarks_in_order(self) -> Self:
        check_watermarks(self)
        return self

    def limits(self) -> AdmissionLimits:
        return AdmissionLimits(
            **thresholds(self, AdmissionLimits()),
            output_share=self.output_quantile,
            max_prefill_tokens=self.max_prefill_tokens,
            max_in_flight=self.max_in_flight,
            aging_s=self.aging_seconds,
            tpot_slo_s=None if self.tpot_slo_ms is None else self.tpot_slo_ms / 1000,
        )
