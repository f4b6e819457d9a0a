"""Checks the required shape of an answer before an engine gets it.

The shape's grammar is compiled once in a process that is killed if it takes too long or too much memory. A
tenant's shapes are checked one after the other, and tenants take turns, so that a tenant waits for its own.
"""

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from msgspec import structs

from budgeting.values import Tool, ToolKind
from gateway.backends.hermes import call_format, input_format
from gateway.contracts.deadlines import until_deadline
from gateway.contracts.values import TEXT, FormatType, GenerateRequest, ResponseFormat
from gateway.errors import BackendUnavailable, GrammarTooComplex, InvalidRequest
from gateway.limited.process import LimitedProcess, NoProcess, OverLimit

WORK: Final = "engine.grammars:prepare_check"
# The most concurrent checks, and the most requests of a tenant that wait for or are in a check.
MAX_RUNNING: Final = 2
MAX_WAITING_PER_TENANT: Final = 64
# The most cached results: at most 2 MB, because a message has at most 400 characters.
MAX_CACHED: Final = 2_048
RETRY_AFTER_MS: Final = 1_000
_OVER: Final = "is too complex"
_LATE: Final = "during the check of its grammar: use a simpler one, or a later deadline"
_ANY_OBJECT: Final = '{"type":"object"}'


CheckShape = Callable[[GenerateRequest], Awaitable[GenerateRequest]]


@dataclass(slots=True)
class _Queue:
    lock: asyncio.Lock
    waiting: int = 0


class GrammarChecks:
    """Checks shapes, and caches the results.

    ``binds_calls``: an engine writes tool calls as text, constrained by a grammar of all tools;
    ``compiles_calls``: an engine of vLLM compiles the schemas of tools if the answer must be a call.
    """

    def __init__(
        self,
        process: LimitedProcess,
        *,
        binds_calls: bool = False,
        compiles_calls: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process = process
        self._clock = clock
        self._binds_calls = binds_calls
        self._compiles_calls = compiles_calls or not binds_calls
        self._cache: OrderedDict[bytes, int | str] = OrderedDict()  # the grammar's bytes, or the problem
        self._running = asyncio.Semaphore(MAX_RUNNING)
        self._queues: dict[str, _Queue] = {}

    async def checked(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with the size of its shape's grammar, and the time that this took.

        The parameters of strict tools are checked like schemas of answers, and those of all tools if the
        answer must be a call, since vLLM then compiles them. With ``binds_calls`` the parameters of all tools
        and the grammars of custom tools are always checked.

        If the parameters of a tool that is not strict are not supported, they are replaced by any object. So
        are those that are too complex, unless an engine of vLLM may get them in a required call.

        Raises the errors of :meth:`check`; DeadlineExceeded, which ends the check.
        """
        if not request.tools and request.response_format.type is TEXT:
            return request
        began_at = self._clock()
        async with until_deadline(request, self._clock, _LATE):
            checked = await self._checked(request)
        return structs.replace(checked, checked_s=self._clock() - began_at)

    async def _checked(self, request: GenerateRequest) -> GenerateRequest:
        if request.tools:
            tools = [await self._tool(index, tool, request) for index, tool in enumerate(request.tools)]
            choice, parallel = request.tool_choice, request.parallel_tool_calls
            if self._binds_calls:
                calls = call_format(tuple(tools), choice, parallel, request.response_format)
                if calls is not None:
                    calls = await self.check(calls, request.caller.tenant)
                    return structs.replace(request, call_format=calls)
            elif request.must_call:
                functions = tuple([one for one in tools if one.kind is ToolKind.FUNCTION])
                calls = call_format(functions, choice, parallel, ResponseFormat())
                if calls is not None:
                    with suppress(InvalidRequest):  # the backend has a grammar of its own
                        await self.check(calls, request.caller.tenant)
        shape = await self.check(request.response_format, request.caller.tenant)
        return structs.replace(request, response_format=shape)

    async def _tool(self, index: int, tool: Tool, request: GenerateRequest) -> Tool:
        if tool.format is not None and self._binds_calls:
            form = input_format(tool, f"tools.{index}.custom.format")
            if form is not None:
                await self.check(form, request.caller.tenant)
            return tool
        if tool.parameters is None or not (tool.strict or self._binds_calls or request.must_call):
            return tool
        param = f"tools.{index}.function.parameters"
        schema = ResponseFormat(FormatType.JSON_SCHEMA, tool.parameters, param)
        try:
            await self.check(schema, request.caller.tenant)
        except (GrammarTooComplex, InvalidRequest) as error:
            compiled = request.must_call and self._compiles_calls
            if tool.strict or (compiled and isinstance(error, GrammarTooComplex)):
                raise
            return structs.replace(tool, parameters=_ANY_OBJECT)
        return tool

    async def check(self, shape: ResponseFormat, tenant: str) -> ResponseFormat:
        """Return ``shape`` with the size of its grammar. A cancellation ends the check.

        Raises:
            InvalidRequest: the shape is malformed or not supported.
            GrammarTooComplex: its grammar takes too long or too much memory, or is too slow to apply.
            BackendUnavailable: the tenant has too many waiting checks, or the check failed.
        """
        if shape.type in (TEXT, FormatType.JSON_OBJECT):
            return shape
        key = hashlib.sha256(f"{shape.type.value}\0{shape.spec}".encode(errors="surrogatepass")).digest()
        found = self._cache.get(key)
        if found is None:
            async with self._turn(tenant):
                found = self._cache.get(key)  # another request may have checked the same shape meanwhile
                if found is None:
                    found = self._cache[key] = await self._built(shape)
                    if len(self._cache) > MAX_CACHED:
                        self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        if isinstance(found, int):
            return replace(shape, grammar_bytes=found)
        refusal = GrammarTooComplex if found.startswith(_OVER) else InvalidRequest
        raise refusal(f"{shape.param} {found}", param=shape.param)

    def close(self) -> None:
        self._process.close()

    @asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        queue = self._queues.setdefault(tenant, _Queue(asyncio.Lock()))
        if queue.waiting >= MAX_WAITING_PER_TENANT:
            raise BackendUnavailable(
                f"{queue.waiting} requests of this tenant wait for their response_format to be checked",
                retry_after_ms=RETRY_AFTER_MS,
            )
        queue.waiting += 1
        try:
            async with queue.lock, self._running:
                yield
        finally:
            queue.waiting -= 1
            if not queue.waiting:
                del self._queues[tenant]

    async def _built(self, shape: ResponseFormat) -> int | str:
        try:
            answer = json.loads(await self._process.run(json.dumps([shape.type.value, shape.spec]).encode()))
        except OverLimit as error:
            return f"{_OVER}: it takes more than {self._process.limits.described(error.bound)} to compile"
        except NoProcess as error:
            raise BackendUnavailable(
                f"{shape.param} could not be checked: {error}", retry_after_ms=RETRY_AFTER_MS
            ) from error
        if "bytes" in answer:
            return int(answer["bytes"])
        problem = answer["problem"]
        return f"{_OVER}: {problem}" if answer["complex"] else f"cannot be followed: {problem}"
