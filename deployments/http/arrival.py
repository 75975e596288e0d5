"""When a request came to the proxy, as the proxy tells the coordinator: its client waits since. Knows no fields."""

import socket
import struct
import sys
from collections.abc import Mapping

REQUEST_START = "x-request-start"  # as load balancers name it
_LONGEST_S = 60.0  # more is another machine's wrong clock
_LAST_DATA_MS = struct.Struct("52xI")  # tcpi_last_data_recv, in Linux's struct tcp_info, whose beginning never changes


def arrival_header(now_s: float) -> str:
    """Return the header's value. now_s: by the wall clock, which machines share."""
    return f"t={now_s:.6f}"


def seconds_unread(receive: object) -> float:
    """Return for how long a request's last bytes have lain in their socket, because the event loop was busy.

    receive: of an ASGI application. 0 unless it is uvicorn's, on Linux: ASGI does not show the connection. Data that
        comes resets the time, so a connection's idle time before a request is not part of it.
    """
    transport = getattr(getattr(receive, "__self__", None), "transport", None)
    connection = None if transport is None else transport.get_extra_info("socket")
    if connection is None or sys.platform != "linux":
        return 0.0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_MS.size)
    except OSError:  # it has closed, or is no TCP connection
        return 0.0
    return float(_LAST_DATA_MS.unpack(info)[0] / 1000) if len(info) == _LAST_DATA_MS.size else 0.0


def seconds_since_arrival(headers: Mapping[str, str], now_s: float) -> float:
    """Return for how long a request has been on the way; 0 without the header, or with one that can't be right."""
    try:
        passed_s = now_s - float(headers.get(REQUEST_START, "").removeprefix("t="))
    except ValueError:
        return 0.0
    return passed_s if 0 <= passed_s <= _LONGEST_S else 0.0
