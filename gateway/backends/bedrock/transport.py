"""The thread's side of a call: asks one region after another. Imports boto3 only when it makes a client."""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gateway.backends.bedrock.answer import (
    ConverseStop,
    Event,
    InvokedModel,
    events_of_answer,
    events_of_stream,
)
from gateway.backends.bedrock.call import EventBatches, Wire, WireCut
from gateway.config.backends import BedrockSection
from gateway.contracts.events import Delta
from gateway.limited.aws_session import make_session
from resilience.classify_aws import aws_failure
from resilience.failures import BackendFailure, FailureKind

# Longest time that a failed region is not asked, seconds, however long a pause it requests.
MAX_COOL_DOWN_S = 60.0
MAX_RETRY_AFTER_S = 300.0  # longest Retry-After that is used, seconds
# Shortest time between two new clients of a region whose credentials are refused, seconds: each takes a tenth
# of a second of CPU.
RENEWED_AFTER_S = 5.0

_TOKENS_HEADER = "x-amzn-bedrock-input-token-count"
# A part of the message for a request whose ``maxTokens`` is more than the model answers with.
_ANSWER_LIMIT = re.compile(r"maximum tokens you requested exceeds the model limit of (\d{1,9})")
# Parts of the messages for hints that the model does not take: Claude 4.7 and later take neither of the two,
# 4.5 and 4.6 only one at a time.
_NOT_TAKEN = re.compile(r"(temperature|top_p)\W* (?:is deprecated for this model|cannot both be specified)")
_HINTS = {"temperature": "temperature", "top_p": "topP"}


class Regions:
    """The order in which regions are asked: the operator's, without those that failed lately; thread-safe.

    Args:
        names: the regions, the preferred one first.
        cool_down_s: how long a region that failed is passed over.
    """

    def __init__(self, names: Sequence[str], cool_down_s: float) -> None:
        self._names = tuple(names)
        self._cool_down_s = cool_down_s
        self._back_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def order(self, now: float) -> tuple[str, ...]:
        """The regions to ask, one after the other.

        When all of them cool down, only the one whose cool-down ends first is asked: an outage then costs
        each request one call, not one for each region.
        """
        with self._lock:
            warm = [name for name in self._names if self._back_at.get(name, now) <= now]
            return tuple(warm) or (min(self._names, key=lambda name: self._back_at[name]),)

    def failed(self, name: str, now: float, retry_after_s: float | None) -> None:
        """Record that a region could not answer; ``retry_after_s``: the pause that it requested."""
        with self._lock:
            self._back_at[name] = now + min(max(self._cool_down_s, retry_after_s or 0.0), MAX_COOL_DOWN_S)

    def answered(self, name: str) -> None:
        with self._lock:
            self._back_at.pop(name, None)


class Transport:
    """Makes calls, each in the thread that asks for it.

    ``on_failure``: called with each region that failed, on the thread.
    """

    def __init__(
        self,
        section: BedrockSection,
        *,
        clock: Callable[[], float],
        on_failure: Callable[[str, BackendFailure], None],
    ) -> None:
        self._section = section
        self._regions = Regions([section.region, *section.regions], section.region_cooldown_seconds)
        self._clock = clock
        self._on_failure = on_failure
        self._making = threading.Lock()
        self._clients: dict[str, Any] = {}
        self._renewable_at: dict[str, float] = {}
        self._current = threading.local()

    def ask(self, request: Mapping[str, Any], call: EventBatches) -> None:
        """Make a call and hand its events to ``call``; raises nothing."""
        failure: BackendFailure | None = None
        try:
            self._current.wire = call.wire
            failure = self._ask(request, call)
        except Exception as error:
            failure = failure_of(error, region="any region", delivered=False)
        finally:
            self._current.wire = None
            call.wire.release()
            call.end(failure)

    def warm(self) -> None:
        """Load boto3 and make the preferred region's client ahead of the first request.

        Raises BackendFailure: the client cannot be made.
        """
        region = self._regions.order(self._clock())[0]
        try:
            self._client(region)
        except Exception as error:
            raise failure_of(error, region=region, delivered=False) from error

    def _ask(self, request: Mapping[str, Any], call: EventBatches) -> BackendFailure | None:
        first: BackendFailure | None = None  # of the preferred region: another may only lack the model
        for region in self._regions.order(self._clock()):
            delivered = ended = False
            try:
                for event in self._events(region, request):
                    call.put(event)
                    delivered = delivered or isinstance(event, Delta)
                    ended = ended or isinstance(event, ConverseStop)
            except Exception as error:
                if call.wire.is_cut or ended:  # the caller left, or only the usage is missing
                    return None
                failure = failure_of(error, region=region, delivered=delivered)
                first = first or failure
                self._on_failure(region, failure)
                if failure.kind is FailureKind.ACCESS_DENIED:
                    self._renew(region)
                if not failure.policy.other_backend:
                    return failure
                self._regions.failed(region, self._clock(), failure.retry_after_s)
                if delivered:
                    return failure
            else:
                self._regions.answered(region)
                return None
        return first

    def _renew(self, region: str) -> None:
        """Have the next call make a new client: a client never reads a rotated file of credentials again."""
        with self._making:
            now = self._clock()
            if now >= self._renewable_at.get(region, now):
                self._clients.pop(region, None)
                self._renewable_at[region] = now + RENEWED_AFTER_S

    def _events(self, region: str, request: Mapping[str, Any]) -> Iterator[Event]:
        client = self._client(region)
        if "body" in request:
            answer = client.invoke_model(**request)
            tokens = answer["ResponseMetadata"]["HTTPHeaders"].get(_TOKENS_HEADER, "")
            yield InvokedModel(answer["body"].read(), int(tokens) if tokens.isdecimal() else 0)
            return
        ask = client.converse_stream if self._section.streaming else client.converse
        answer, adjusted = _adjusting(ask, request)
        yield from adjusted
        if not self._section.streaming:
            yield from events_of_answer(answer)
            return
        stream = answer["stream"]
        try:
            yield from events_of_stream(stream)
        finally:
            stream.close()

    def _client(self, region: str) -> Any:
        with self._making:
            if region not in self._clients:
                self._clients[region] = self._made(region)
            return self._clients[region]

    def _made(self, region: str) -> Any:
        from botocore.config import Config

        from gateway.backends.bedrock.cutting import make_cuttable

        section = self._section
        client = make_session(profile=section.profile).client(
            "bedrock-runtime",
            region_name=region,
            endpoint_url=section.endpoint_url and section.endpoint_url.replace("{region}", region),
            config=Config(
                connect_timeout=section.connect_timeout_seconds,
                read_timeout=section.read_timeout_seconds,
                max_pool_connections=section.max_concurrency,
                # The gateway's own policy decides about retries, under the caller's deadline.
                retries={"mode": "standard", "total_max_attempts": 1},
                tcp_keepalive=True,
            ),
        )
        make_cuttable(client, self._wire)
        return client

    def _wire(self) -> Wire | None:
        wire: Wire | None = getattr(self._current, "wire", None)
        return wire


def _adjusting(ask: Callable[..., Any], request: Mapping[str, Any]) -> tuple[Any, Sequence[Event]]:
    """Ask; a model that refuses ``maxTokens``, ``temperature`` or ``topP`` is asked again as it allows."""
    try:
        return ask(**request), ()
    except Exception as error:
        config, text = dict(request.get("inferenceConfig", {})), str(error)
        limit = int(found[1]) if (found := _ANSWER_LIMIT.search(text)) else 0
        hint = found[1] if (found := _NOT_TAKEN.search(text)) else ""
        if 0 < limit < config.get("maxTokens", 0):
            config["maxTokens"] = limit
            warning = f"max_tokens was lowered to {limit}, the limit of the model"
        elif config.pop(_HINTS.get(hint), None) is not None:
            warning = f"{hint} was left out, because the model refuses it"
        else:
            raise
    answer, adjusted = _adjusting(ask, {**request, "inferenceConfig": config})
    return answer, [warning, *adjusted]


def failure_of(error: Exception, *, region: str, delivered: bool) -> BackendFailure:
    """The failure for what boto3, botocore or urllib3 raised in ``region``.

    Its message has Bedrock's own code and never its text, which may contain a part of the prompt or the
    account's number; ``__cause__`` is the exception, for the log.

    ``delivered``: whether a part of the answer had come; the failure is then a broken stream.
    """
    if isinstance(error, BackendFailure):
        return error
    kind, text = _kind_and_text(error, delivered)
    failure = BackendFailure(kind, f"Bedrock in {region}: {text}", retry_after_s=_retry_after(error))
    failure.__cause__ = error
    return failure


def _kind_and_text(error: Exception, delivered: bool) -> tuple[FailureKind, str]:
    if isinstance(error, WireCut):
        return FailureKind.BACKEND_UNAVAILABLE, "the call was given up"
    failure = aws_failure(error, delivered=delivered)
    if failure is not None:
        return failure
    name = type(error).__name__
    # botocore has no exceptions of its own for a file that it cannot read, and for credentials that are
    # expired when they are fetched.
    if getattr(error, "filename", None) is not None or "refreshed credentials are" in str(error):
        return FailureKind.ACCESS_DENIED, f"no usable credentials ({name})"
    if isinstance(error, OSError):
        kind = FailureKind.STREAM_BROKEN if delivered else FailureKind.BACKEND_UNAVAILABLE
        return kind, f"the connection broke ({name})"
    # The remaining case is an event stream that cannot be decoded.
    return FailureKind.STREAM_BROKEN, f"the answer cannot be read ({name})"


def _retry_after(error: Exception) -> float | None:
    response = getattr(error, "response", None)
    if not isinstance(response, Mapping):
        return None
    value = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", "")
    return min(float(value), MAX_RETRY_AFTER_S) if value.isascii() and value.isdigit() else None
