"""When a request came to the proxy, as the proxy tells the coordinator: its client waits since. Knows no fields."""

from collections.abc import Mapping

REQUEST_START = "x-request-start"  # as load balancers name it
_LONGEST_S = 60.0  # more is another machine's wrong clock


def arrival_header(now_s: float) -> str:
    """Return the header's value. now_s: by the wall clock, which machines share."""
    return f"t={now_s:.6f}"


def seconds_since_arrival(headers: Mapping[str, str], now_s: float) -> float:
    """Return for how long a request has been on the way; 0 without the header, or with one that can't be right."""
    try:
        passed_s = now_s - float(headers.get(REQUEST_START, "").removeprefix("t="))
    except ValueError:
        return 0.0
    return passed_s if 0 <= passed_s <= _LONGEST_S else 0.0
