"""The listening socket, opened before anything slow, so that a wrong address is known at once."""

import errno
import socket

from engine.errors import ConfigError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Raises ConfigError where the address cannot be had."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"The host {host!r} is unknown ({error.strerror}); pass an address as --host.") from None
    try:
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            problem = f"Port {port} on {host} is in use"
        else:
            problem = f"Port {port} on {host} cannot be listened on ({error.strerror})"
        raise ConfigError(f"{problem}; pass another one as --port, or 0 for any free one.") from None


def base_url(host: str, listener: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    shown = f"[{reachable}]" if ":" in reachable else reachable
    return f"http://{shown}:{listener.getsockname()[1]}"
