"""The coordinator's gRPC service: generic handlers around a :class:`Desk`, which decides nothing.

Every call is checked for the run's token before its body is read. Bodies are decoded here, so that
a wrong one costs its sender one line and nobody else anything.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc
import grpc.aio
import msgspec

from planaria.errors import CommError, EpochSuperseded, JoinError, UserError
from planaria.runtime import messages
from planaria.runtime.control import protocol as control

EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
CLOSED = "its control stream was closed"
"""By the other side itself."""
Context = Any
Handler = Callable[[Any, Context], Awaitable[Any]]


class Outbox:
    """What is to go out on one stream, encoded; :meth:`end` closes the stream after it."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.ended = False

    def put(self, data: bytes) -> None:
        """Queue ``data``; dropped where the stream has ended."""
        if not self.ended:
            self._queue.put_nowait(data)

    def end(self) -> None:
        """Close the stream once everything queued is out."""
        if not self.ended:
            self.ended = True
            self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (data := await self._queue.get()) is not None:
            yield data


class Desk(Protocol):
    """What the service hands on; every method but the waiting ones returns at once."""

    def admit(self, hello: messages.Hello, outbox: Outbox) -> None:
        """Let a worker in, or raise ``JoinError`` with the one line that it is told."""
        ...

    def hear(self, worker: str, message: messages.FromWorker) -> None: ...

    def gone(self, worker: str, outbox: Outbox, reason: str) -> None:
        """The stream of ``worker`` has ended."""
        ...

    def admit_launcher(self, hello: control.LauncherHello, outbox: Outbox) -> None: ...

    def hear_launcher(self, message: control.FromLauncher, outbox: Outbox) -> None: ...

    def gone_launcher(self, outbox: Outbox, *, cut: bool) -> None:
        """The stream of a launcher has ended; ``cut``: not by its own decision."""
        ...

    async def answer(self, body: Any) -> msgspec.Struct:
        """Answer Put, Get, GetMany, Add or Check."""
        ...

    def inject(self, body: control.Inject) -> control.Done: ...

    def request(self, body: control.Requested) -> control.Done: ...

    def status(self) -> control.Status: ...

    def fail(self, error: Exception) -> None:
        """Something that is not the other side's fault went wrong."""
        ...

    def refused(self, who: str, reason: str) -> None:
        """Somebody was turned away."""
        ...


class TokenCheck(grpc.aio.ServerInterceptor):
    """Turns away every call without the run's token, before anything of it is read."""

    def __init__(self, token: str, refused: Callable[[str, str], None]) -> None:
        self._token = token.encode()
        self._refused = refused
        self._unary = grpc.unary_unary_rpc_method_handler(self._refuse)
        self._stream = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        given = b""
        for key, value in handler_call_details.invocation_metadata:
            if key == control.TOKEN_KEY:
                given = value if isinstance(value, bytes) else value.encode()
        if hmac.compare_digest(given, self._token):
            return await continuation(handler_call_details)
        method = handler_call_details.method.rpartition("/")[2]
        return self._stream if method in (control.ATTACH, control.LAUNCHER) else self._unary

    async def _refuse(self, request: Any, context: Context) -> None:
        line = "wrong token: give the token of this run (OUT/coordinator.token)"
        self._refused(context.peer(), line)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, line)


def handlers(desk: Desk) -> grpc.GenericRpcHandler:
    """The service, to be added to a ``grpc.aio`` server."""

    async def attach(_: Any, context: Context) -> None:
        await _serve_worker(desk, context)

    async def launcher(_: Any, context: Context) -> None:
        await _serve_launcher(desk, context)

    async def inject(body: control.Inject) -> msgspec.Struct:
        return desk.inject(body)

    async def request(body: control.Requested) -> msgspec.Struct:
        return desk.request(body)

    async def status(_: control.Look) -> msgspec.Struct:
        return desk.status()

    unary: dict[str, tuple[Any, Callable[[Any], Awaitable[msgspec.Struct]]]] = {
        control.PUT: (control.Put, desk.answer),
        control.GET: (control.Get, desk.answer),
        control.GET_MANY: (control.GetMany, desk.answer),
        control.ADD: (control.Add, desk.answer),
        control.CHECK: (control.Check, desk.answer),
        control.INJECT: (control.Inject, inject),
        control.REQUEST: (control.Requested, request),
        control.STATUS: (control.Look, status),
    }
    methods: dict[str, Any] = {
        name: grpc.unary_unary_rpc_method_handler(_answering(desk, kind, function))
        for name, (kind, function) in unary.items()
    }
    methods[control.ATTACH] = grpc.stream_stream_rpc_method_handler(attach)
    methods[control.LAUNCHER] = grpc.stream_stream_rpc_method_handler(launcher)
    return grpc.method_handlers_generic_handler(control.SERVICE, methods)


def _answering(
    desk: Desk, kind: Any, function: Callable[[Any], Awaitable[msgspec.Struct]]
) -> Handler:
    async def answer(data: bytes, context: Context) -> bytes | None:
        try:
            return control.encode(await function(control.decode(data, kind)))
        except EpochSuperseded as error:
            code, line = grpc.StatusCode.ABORTED, str(error)
        except CommError as error:
            code, line = grpc.StatusCode.DEADLINE_EXCEEDED, str(error)
        except (UserError, ValueError) as error:
            code, line = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except Exception as error:
            desk.fail(error)
            code, line = grpc.StatusCode.INTERNAL, f"the coordinator failed: {error}"
        await context.abort(code, line)
        return None

    return answer


async def _serve_worker(desk: Desk, context: Context) -> None:
    outbox = Outbox()
    hello = await _first(desk, context, messages.FromWorker, messages.Hello)
    await _admitted(desk, context, hello.worker, lambda: desk.admit(hello, outbox))
    await _serve(
        context,
        outbox,
        kind=messages.FromWorker,
        hear=_guarded(desk, lambda message: desk.hear(hello.worker, message)),
        gone=_guarded(desk, lambda reason: desk.gone(hello.worker, outbox, reason)),
    )


async def _serve_launcher(desk: Desk, context: Context) -> None:
    outbox = Outbox()
    hello = await _first(desk, context, control.FromLauncher, control.LauncherHello)
    who = f"launcher of {hello.node}"
    await _admitted(desk, context, who, lambda: desk.admit_launcher(hello, outbox))
    await _serve(
        context,
        outbox,
        kind=control.FromLauncher,
        hear=_guarded(desk, lambda message: desk.hear_launcher(message, outbox)),
        gone=_guarded(desk, lambda reason: desk.gone_launcher(outbox, cut=reason != CLOSED)),
    )


async def _admitted(desk: Desk, context: Context, who: str, admit: Callable[[], None]) -> None:
    """Let somebody in, or end the call with the reason; a defect of ours ends the run as well."""
    try:
        try:
            admit()
            return
        except JoinError as error:
            desk.refused(who, str(error))
            code, line = grpc.StatusCode.FAILED_PRECONDITION, str(error)
        except ValueError as error:
            code, line = grpc.StatusCode.INVALID_ARGUMENT, str(error)
    except Exception as error:
        desk.fail(error)
        code, line = grpc.StatusCode.INTERNAL, f"the coordinator failed: {error}"
    await context.abort(code, line)


def _guarded(desk: Desk, hear: Callable[[Any], None]) -> Callable[[Any], None]:
    """A wrong message costs its sender the stream; a defect of ours must end the run loudly."""

    def guarded(message: Any) -> None:
        try:
            hear(message)
        except ValueError:
            raise
        except Exception as error:
            desk.fail(error)

    return guarded


async def _first(desk: Desk, context: Context, kind: Any, expected: type[Any]) -> Any:
    """The greeting that has to come first."""
    data = await context.read()
    line = f"the first message of a stream has to be {expected.__name__}"
    if data is not EOF:
        try:
            message = control.decode(data, kind)
        except ValueError as error:
            line = str(error)
        else:
            if isinstance(message, expected):
                return message
    desk.refused(context.peer(), line)
    return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, line)


async def _serve(
    context: Context,
    outbox: Outbox,
    *,
    kind: Any,
    hear: Callable[[Any], None],
    gone: Callable[[str], None],
) -> None:
    """Both directions of one stream until either side ends it."""
    reading = asyncio.create_task(_read(context, kind, hear))
    writing = asyncio.create_task(_write(context, outbox))
    reason = "its control stream was cut"
    try:
        await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and not reading.cancelled() and reading.exception() is None:
            reason = reading.result()
    finally:
        # First of all, because a loss is to be known at once; then the tidying up.
        gone(reason)
        outbox.end()
        reading.cancel()
    if reading.done() and isinstance(error := _exception(reading), ValueError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    await asyncio.wait((writing,), timeout=1.0)
    writing.cancel()
    # A write to a stream that has just been cut fails; asyncio would tell of that as of a defect.
    await asyncio.gather(writing, return_exceptions=True)


def _exception(task: asyncio.Task[Any]) -> BaseException | None:
    return None if task.cancelled() else task.exception()


async def _read(context: Context, kind: Any, hear: Callable[[Any], None]) -> str:
    while (data := await context.read()) is not EOF:
        hear(control.decode(data, kind))
    return CLOSED


async def _write(context: Context, outbox: Outbox) -> None:
    async for data in outbox:
        await context.write(data)
