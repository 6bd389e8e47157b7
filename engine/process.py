"""Entry of the engine process: `python -m engine.process FD TASK CONFIG` (see `engine.protocol`).

Two threads: a reader decodes what the server sends and puts it into the inbox; the main thread owns the device and
alternates between the inbox and the step loop, so messages are seen between steps. End-of-file ends the process.
"""

import gc
import logging
import os
import queue
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import msgspec

from engine.config import BenchConfig, EngineConfig, PackConfig
from engine.errors import SpecterError
from engine.phases import PhaseClock
from engine.protocol import (
    HEADER,
    MAX_MESSAGE_BYTES,
    Abort,
    Failed,
    Message,
    Ping,
    Planned,
    Pong,
    Prepared,
    Ready,
    Shutdown,
    Submit,
    Task,
    ToEngine,
    decode_to_engine,
    encode,
)

if TYPE_CHECKING:
    from engine.serial_core import SerialCore

logger = logging.getLogger(__name__)


class Connection:
    """The engine's end of the socket pair. `send` may be called from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self.is_serving = False
        self.inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        """What the server sent, in order; the end of the connection reads as `Shutdown`."""

    def send(self, message: Message) -> None:
        """Raises `OSError` where the server is gone."""
        with self._sending:
            self._socket.sendall(encode(message))

    def read_all(self) -> None:
        """Fill the inbox until the server is gone. While the model loads, an end of the connection ends the process."""
        try:
            with self._socket.makefile("rb") as stream:
                while header := stream.read(HEADER.size):
                    (size,) = HEADER.unpack(header)
                    if size > MAX_MESSAGE_BYTES:
                        raise ValueError(f"a message of {size} bytes")
                    self._receive(decode_to_engine(stream.read(size)))
        except (OSError, ValueError, struct.error, msgspec.DecodeError) as error:
            logger.error("cannot read from the server any more: %s", error)
        finally:
            self._receive(Shutdown())

    def _receive(self, message: ToEngine) -> None:
        self.inbox.put(message)
        if isinstance(message, Shutdown) and not self.is_serving:
            os.kill(os.getpid(), signal.SIGTERM)


def serve(connection: Connection, core: "SerialCore") -> None:
    """Alternate between the inbox and the step loop until a `Shutdown`."""
    core.send = connection.send
    while True:
        # Blocks only where there is no work to go on with.
        while not core.has_work or not connection.inbox.empty():
            match connection.inbox.get():
                case Submit() as submit:
                    core.submit(submit)
                case Abort(request_id):
                    core.abort(request_id)
                case Ping(nonce):
                    connection.send(Pong(nonce))
                case Shutdown():
                    core.abort_all()
                    return
        core.step()


CONFIGS: dict[Task, type[EngineConfig]] = {"pack": PackConfig, "bench": BenchConfig}
"""What tasks are told, where it is more than the engine's settings."""


def run(connection: Connection, task: Task, config_json: str) -> None:
    """Do the task; returns when it is done or the server says so."""
    config = CONFIGS.get(task, EngineConfig).model_validate_json(config_json)
    clock = PhaseClock()
    with clock.phase("imports"):
        # torch and transformers take seconds, which the server process should not pay for importing this module's
        # types.
        from engine.build import open_engine, pack, plan
        from engine.loading import locate_model

        quiet_libraries()
        # What was imported stays: looking through it for garbage would stop the step loop for a fifth of a second.
        gc.freeze()
    match task:
        case "prepare":
            connection.send(Prepared(str(locate_model(config, connection.send))))
        case "pack":
            assert isinstance(config, PackConfig)
            connection.send(Prepared(str(pack(config, connection.send))))
        case "plan":
            connection.send(Planned(plan(config, connection.send)))
        case "serve" | "bench":
            with open_engine(config, connection.send, clock) as (core, capabilities):
                connection.is_serving = True
                connection.send(Ready(capabilities))
                serve(connection, core)


def quiet_libraries() -> None:
    """Progress and notes of the libraries would be a second voice beside `Loading` and the log."""
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def main(run: Callable[[Connection, Task, str], None]) -> int:
    """Have `run` do the task that the command line says, and tell the server why where it cannot; the exit status."""
    fd, task, config_json = sys.argv[1:]
    # How long OpenMP's threads spin at a barrier before they sleep. Transfer threads and other processes need those
    # cores too: with the default a pass takes ten times as long on a busy machine. Sleeping at once takes 1.6 times as
    # long on a quiet one.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s engine: %(message)s")
    # Ctrl-C goes to the whole terminal, but the server decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with socket.socket(fileno=int(fd)) as sock:
        connection = Connection(sock)
        threading.Thread(target=connection.read_all, name="reader", daemon=True).start()
        try:
            run(connection, cast(Task, task), config_json)
        except (BrokenPipeError, ConnectionResetError):
            return 1  # the server is gone, and with it whoever could be told
        except SpecterError as error:
            connection.send(Failed(None, type(error).__name__, str(error)))
            return 1
        except Exception as error:
            logger.exception("the engine cannot go on")
            connection.send(Failed(None, "InternalError", f"{type(error).__name__}: {error}"))
            return 1
        finally:
            # From here on there is nothing to clean up, so whoever still asks for the end gets it as it is.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return 0


if __name__ == "__main__":
    sys.exit(main(run))
