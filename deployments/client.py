"""A small HTTP client for the commands: JSON requests, JSON or event-stream responses."""

import json
import re
import socket
import ssl
import time
import urllib.parse
import urllib.request
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from decoding.errors import ConsortError, DeadlineError, InvalidRequestError, OverloadedError, UnavailableError
from deployments.fields.loopback import is_loopback

_CONNECT_TIMEOUT_S = 10.0
_GET_TIMEOUT_S = 120.0  # of silence; POST requests have none, as they may wait for long in the server's queue
_PATIENCE_S = 30.0  # for a server whose connection broke to be there again
_PAUSE_S = 0.5
_REPEATABLE = ("/v1/completions", "/v1/chat/completions")  # change nothing on the server: they may be sent again
_NO_EVENT = "0"  # asks for ids of a stream's events, by which it can be resumed
_CALLERS_FAULT = {
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
}
_TRY_AGAIN = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE}
_STREAMED = {"timeout_error": HTTPStatus.REQUEST_TIMEOUT, "rate_limit_error": HTTPStatus.TOO_MANY_REQUESTS}
_BROKEN = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)  # the connection was there
_KEEP_ALIVE = (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine may be lost without a word


@dataclass(frozen=True, slots=True)
class Reply:
    """A response's status and its JSON document. `retry_after_s`: seconds to wait before a retry, if it says so."""

    status: int
    document: Any
    retry_after_s: int | None = None


class Client:
    """A client of one server."""

    def __init__(
        self, url: str, api_key: str | None = None, *, tls: ssl.SSLContext | None = None, local: bool = False
    ) -> None:
        """
        url: with or without http:// and OpenAI's /v1.
        api_key: sent with every request, if given.
        tls: whose certificates are trusted; None: those that this machine trusts.
        local: the server is on this machine, though its address is not of the loopback interface: ask no proxy.
        """
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        transport = httpx.HTTPTransport(
            verify=tls or ssl.create_default_context(),
            proxy=None if local else _proxy_for(self.url),
            limits=httpx.Limits(max_keepalive_connections=0),  # a server may close what is idle, just as it is used
            socket_options=[_KEEP_ALIVE],
        )
        headers = {"Accept-Encoding": "identity"}
        if key := (api_key or "").strip():  # files and shells add line ends
            headers["Authorization"] = f"Bearer {key}"
        self._http = httpx.Client(transport=transport, headers=headers, follow_redirects=True)

    def get(self, path: str) -> Reply:
        """Send a GET request; raises UnavailableError without a JSON response, or after 120 s of silence."""
        return self._request(path)

    def post(self, path: str, body: Mapping[str, object]) -> Reply:
        """Send a POST request; raises UnavailableError without a JSON response, however long that takes.

        A completion whose connection breaks is asked for again, for up to half a minute.
        """
        broken_s = None
        while True:
            try:
                return self._request(path, body)
            except UnavailableError as error:
                if broken_s is None and isinstance(error.__cause__, _BROKEN):
                    broken_s = time.monotonic()
                if path not in _REPEATABLE or broken_s is None or time.monotonic() - broken_s > _PATIENCE_S:
                    raise
                time.sleep(_PAUSE_S)

    def document(self, path: str) -> Any:
        """Return the JSON document at a path.

        Raises InvalidRequestError if the server refused the request; names the field, if the server did. Raises
        OverloadedError, DeadlineError if the server's queue is full, or the request took too long. Raises
        UnavailableError if the server can't answer now, or there is none.
        """
        return self.checked(path, self.get(path))

    def checked(self, path: str, reply: Reply) -> Any:
        """Return the reply's document; raises what `document` raises."""
        if reply.status != HTTPStatus.OK:
            raise self._error(path, reply)
        return reply.document

    def stream(self, path: str, body: Mapping[str, object]) -> Generator[Any, None, None]:
        """Yield the documents of a stream's events, up to [DONE]. Closing the iterator hangs up.

        A stream that breaks off is resumed where its events have ids, for up to half a minute. Raises what `document`
        raises; UnavailableError also if the stream broke off or contained another error.
        """
        last_id = _NO_EVENT if path in _REPEATABLE else None
        has_begun = has_passed_on = False  # whether a response has come, and an event
        body, timeout = {**body, "stream": True}, httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        broken_s = None
        while True:
            cause: Exception | None = None
            try:
                headers = {} if last_id is None else {"Last-Event-ID": last_id}
                with self._http.stream(
                    "POST", self.url + path, json=body, headers=headers, timeout=timeout
                ) as response:
                    if response.is_success:
                        has_begun = True
                        for event in _events_of(response):
                            if event.get("data") == "[DONE]":
                                return
                            if "data" in event:
                                last_id, has_passed_on, broken_s = event.get("id", last_id), True, None
                                yield self._event(path, json.loads(event["data"]))
                        reason: ConsortError = self._broken_off(path)
                    else:
                        response.read()
                        reason = self._error(path, _reply(response))
                        if response.status_code not in _TRY_AGAIN:
                            raise reason
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                reason, cause = self._unreachable(error), error
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                reason, cause = self._broken_off(path, f": {error}"), error
            broken_s = broken_s or time.monotonic()
            can_go_on = has_begun and last_id is not None and (last_id != _NO_EVENT or not has_passed_on)
            if not can_go_on or time.monotonic() - broken_s > _PATIENCE_S:
                raise reason from cause
            time.sleep(_PAUSE_S)

    def _request(self, path: str, body: Mapping[str, object] | None = None) -> Reply:
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S, read=_GET_TIMEOUT_S if body is None else None)
        try:
            response = self._http.request(
                "GET" if body is None else "POST", self.url + path, json=body, timeout=timeout
            )
            return _reply(response)
        except httpx.ReadTimeout as error:
            raise UnavailableError(f"{self.url}{path}: the server has not answered in time") from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise self._unreachable(error) from error

    def _broken_off(self, path: str, why: str = "") -> UnavailableError:
        return UnavailableError(f"{self.url}{path}: the stream broke off{why}")

    def _unreachable(self, error: Exception) -> UnavailableError:
        reason = re.sub(r"^\[Errno -?\d+\] ", "", str(error))
        return UnavailableError(f"no Consort server answers at {self.url} ({reason}); `consort serve` starts one")

    def _error(self, path: str, reply: Reply) -> ConsortError:
        details = reply.document.get("error") if isinstance(reply.document, dict) else None
        details = details if isinstance(details, dict) else {}
        message = details.get("message") or f"{self.url}{path}: HTTP {reply.status}"
        if reply.status in _CALLERS_FAULT:
            return InvalidRequestError(message, field=details.get("param"))
        message = f"{self.url}: {message}"
        match reply.status:
            case HTTPStatus.TOO_MANY_REQUESTS:
                return OverloadedError(message, retry_after_s=reply.retry_after_s or 1)
            case HTTPStatus.REQUEST_TIMEOUT:
                return DeadlineError(message)
            case _:
                return UnavailableError(message, retry_after_s=reply.retry_after_s or 5)

    def _event(self, path: str, document: Any) -> Any:
        if "error" in document:
            status = _STREAMED.get(document["error"].get("type"), HTTPStatus.SERVICE_UNAVAILABLE)
            raise self._error(path, Reply(status, document))
        return document


def _proxy_for(url: str) -> str | None:
    """Return the URL of the proxy that the environment names; those are for other machines."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy is None or is_loopback(host) or urllib.request.proxy_bypass(host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _events_of(response: httpx.Response) -> Iterator[dict[str, str]]:
    """Yield the fields of each event that has come whole. httpx's own lines also end at U+2028, which texts contain."""
    rest = b""
    for chunk in response.iter_bytes():
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            lines = (line.partition(":") for line in event.decode().split("\n"))
            yield {name: value.strip() for name, _, value in lines}


def _reply(response: httpx.Response) -> Reply:
    retry_after = response.headers.get("Retry-After", "")
    try:
        document = response.json()
    except ValueError:
        if response.is_success:
            raise
        document = {"error": {"message": f"HTTP {response.status_code} {response.reason_phrase}"}}
    return Reply(response.status_code, document, int(retry_after) if retry_after.isdecimal() else None)
