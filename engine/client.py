"""The server's side of the engine process: starts it, talks to it, and ends it.

One task, `_supervise`, owns the reading end and fills the mailbox. When the engine is gone (end-of-file, end of the
process, or a message that says so) the mailbox tells everyone who still waits. Writes never wait: messages to the
engine are small and few, and an abort must also go out while its task is being cancelled.
"""

import asyncio
import itertools
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from engine.config import EngineConfig
from engine.errors import EngineDiedError, SpecterError
from engine.mailbox import GenerationEvent, Mailbox
from engine.protocol import (
    HEADER,
    MAX_MESSAGE_BYTES,
    Abort,
    Capabilities,
    Loading,
    Located,
    ModelPlan,
    OnProgress,
    Ping,
    Planned,
    Prefill,
    Prepared,
    Ready,
    Shutdown,
    Submit,
    Task,
    ToEngine,
    Tokens,
    Traced,
    decode_to_server,
    encode,
)

Answer = TypeVar("Answer", Located, Ready, Prepared, Planned)

TERMINATE_SECONDS = 2.0
"""How long `close` waits after SIGTERM before it kills."""
LAST_WORDS_SECONDS = 1.0
"""How long the end of the process and the end of the socket wait for each other, to tell the best reason."""


class EngineClient:
    """A running engine process. Mutable; belongs to one event loop; `close` must be awaited in the end."""

    def __init__(
        self,
        task: Task,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        process: asyncio.subprocess.Process,
    ) -> None:
        self._task = task
        self._reader = reader
        self._writer = writer
        self._process = process
        self._mailbox = Mailbox()
        self._nonces = itertools.count()
        self._closing: asyncio.Task[None] | None = None
        self._supervisor = asyncio.create_task(self._supervise())

    @classmethod
    async def start(cls, config: EngineConfig, task: Task, command: Sequence[str] | None = None) -> "EngineClient":
        """Start the engine process; `command` replaces `python -m engine.process` and gets the same arguments.

        The task "pack" takes a `PackConfig`, "bench" a `BenchConfig`. The process has its own session, so that Ctrl-C
        in a terminal reaches the server only.
        """
        command = command or (sys.executable, "-m", "engine.process")
        parent, child = socket.socketpair()
        with child:
            reader, writer = await _open_stream(parent)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    str(child.fileno()),
                    task,
                    config.model_dump_json(),
                    pass_fds=(child.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )
            except BaseException:
                writer.close()
                raise
        return cls(task, reader, writer, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def died(self) -> asyncio.Event:
        """Set when the engine is gone, or has said that it cannot go on; also after `close`."""
        return self._mailbox.died

    @property
    def error(self) -> EngineDiedError | None:
        """Why the engine died; None while it lives."""
        return self._mailbox.error

    async def wait_located(self, on_progress: OnProgress) -> str:
        """Wait for the directory of the model that is going to be served; to be called before `wait_ready`, or not.

        This and the other waits for the task's answers raise the error that the task failed with.
        """
        return (await self._wait_for(Located, on_progress)).model_path

    async def wait_ready(self, on_progress: OnProgress) -> Capabilities:
        """Wait until the model is loaded."""
        return (await self._wait_for(Ready, on_progress)).capabilities

    async def wait_prepared(self, on_progress: OnProgress) -> str:
        """Wait until the model has been prepared or packed, and return its directory, or its pack's."""
        return (await self._wait_for(Prepared, on_progress)).model_path

    async def wait_planned(self, on_progress: OnProgress) -> ModelPlan:
        return (await self._wait_for(Planned, on_progress)).plan

    async def _wait_for(self, kind: type[Answer], on_progress: OnProgress) -> Answer:
        while True:
            message = await self._mailbox.startup.get()
            if isinstance(message, kind):
                return message
            if isinstance(message, SpecterError):
                self._mailbox.startup.put_nowait(message)
                raise message
            if isinstance(message, Loading):
                on_progress(message)
            elif not isinstance(message, Located):
                answer = type(message).__name__
                raise EngineDiedError(
                    f"The engine answered the task {self._task!r} with {answer}, not {kind.__name__}."
                )

    async def generate(self, submit: Submit) -> AsyncGenerator[GenerationEvent, None]:
        """Submit a request and yield its messages, `Finished` last.

        Raises RequestError where the engine refuses or fails this request, EngineDiedError where it is gone. Leaving
        early (use `contextlib.aclosing`) aborts the request, once.
        """
        if self.error is not None or self._closing is not None:
            raise self.error or EngineDiedError("The engine is shutting down.")
        if submit.request_id in self._mailbox.requests:
            raise ValueError(f"request id {submit.request_id!r} is in use")
        events: asyncio.Queue[GenerationEvent | SpecterError] = asyncio.Queue()
        self._mailbox.requests[submit.request_id] = events
        over = False
        self._send(submit)
        try:
            while not over:
                event = await events.get()
                over = not isinstance(event, Prefill | Tokens | Traced)
                if isinstance(event, SpecterError):
                    raise event
                yield event
        finally:
            del self._mailbox.requests[submit.request_id]
            if not over:
                self._send(Abort(submit.request_id))

    async def ping(self, timeout_seconds: float) -> None:
        """Return when the engine has answered; raises TimeoutError, or EngineDiedError where it is gone."""
        if self.error is not None:
            raise self.error
        nonce = next(self._nonces)
        answer = self._mailbox.pings[nonce] = asyncio.get_running_loop().create_future()
        try:
            self._send(Ping(nonce))
            async with asyncio.timeout(timeout_seconds):
                await answer
        finally:
            del self._mailbox.pings[nonce]

    async def close(self, grace_seconds: float) -> None:
        """End the process: ask, wait `grace_seconds`, terminate, then kill. Idempotent; a cancelled call kills."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(grace_seconds))
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self.kill()
            await self._closing
            raise

    def kill(self) -> None:
        """End the process at once; `close` still has to be awaited where the event loop goes on."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def _close(self, grace_seconds: float) -> None:
        if self.error is None:
            # An engine that has said that it cannot go on is ending already.
            self._send(Shutdown())
        if not await self._ends_within(grace_seconds):
            with suppress(ProcessLookupError):
                self._process.terminate()
            if not await self._ends_within(TERMINATE_SECONDS):
                self.kill()
        await self._process.wait()
        await self._supervisor
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _ends_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._process.wait()
                return True
        return False

    def _send(self, message: ToEngine) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def _supervise(self) -> None:
        """Deliver messages until the socket or the process ends, then say so."""
        receive = asyncio.create_task(self._receive())
        ended = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({receive, ended}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({receive, ended}, timeout=LAST_WORDS_SECONDS)
        finally:
            receive.cancel()
            ended.cancel()
            await asyncio.wait({receive, ended})
            complaint = None if receive.cancelled() else receive.exception()
            reason = _how_it_ended(self._process.returncode, complaint)
            self._mailbox.fail(EngineDiedError(f"The engine process {reason}."))

    async def _receive(self) -> None:
        """Read until end-of-file; raises ValueError or `msgspec.DecodeError` for what is not a message."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (num_bytes,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if num_bytes > MAX_MESSAGE_BYTES:
                    raise ValueError(f"{num_bytes} bytes in one")
                self._mailbox.deliver(decode_to_server(await self._reader.readexactly(num_bytes)))


async def _open_stream(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        return await asyncio.open_connection(sock=sock)
    except BaseException:
        sock.close()
        raise


def _how_it_ended(returncode: int | None, complaint: BaseException | None) -> str:
    if isinstance(complaint, ValueError | msgspec.DecodeError):
        return f"sent something that is not a message ({complaint})"
    if returncode is None:
        return "closed its connection"
    if returncode < 0:
        return f"was ended by signal {signal.Signals(-returncode).name}"
    return f"ended with exit status {returncode}"
