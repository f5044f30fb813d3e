"""``quantmoe serve``: an application on a port."""

from __future__ import annotations

import ipaddress
import socket
import sys

import uvicorn

from quantmoe.exporter.errors import OptionError
from quantmoe.serving.app import Server, application
from quantmoe.serving.embeddings import Embeddings

#: seconds that requests have to end after Ctrl-C
GRACE = 5
#: seconds after which the thread of the event loop lets the scheduler's thread go on
SWITCH = 0.0005


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        OptionError: the address does not exist, or the port is not free.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise OptionError(f"host is {host!r}, expected a name or an address of this machine: {error}") from None
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OptionError(f"port is {port}, {host} cannot listen there: {reason}; choose another --port") from None


def run(server: Server | Embeddings, listening: socket.socket, key: str | None) -> None:
    """Answer requests until Ctrl-C."""
    host, port = listening.getsockname()[:2]
    if not ipaddress.ip_address(host).is_loopback and key is None:
        print(
            "quantmoe: everybody who reaches this machine can use the model; --api-key asks for a key", file=sys.stderr
        )
    where = f"[{host}]" if ":" in host else host
    print(f"{server.name} at http://{where}:{port}/v1; Ctrl-C ends it", flush=True)
    sys.setswitchinterval(SWITCH)
    settings = uvicorn.Config(
        application(server, key), log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=GRACE
    )
    uvicorn.Server(settings).run(sockets=[listening])
