"""Whether a host can be reached from this machine alone."""

from ipaddress import ip_address

DEFAULT_URL = "http://127.0.0.1:8000"  # the default of `consort serve`


def is_loopback(host: str) -> bool:
    """Whether an address, or the name `localhost`, is of the loopback interface. Asks no name server."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
