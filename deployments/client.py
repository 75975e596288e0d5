"""A small HTTP client for the commands: JSON requests, JSON or event-stream responses."""

import json
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

from decoding.errors import ConsortError, DeadlineError, InvalidRequestError, OverloadedError, UnavailableError
from deployments.fields.loopback import is_loopback

DEFAULT_URL = "http://127.0.0.1:8000"  # the default of `consort serve`
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


@dataclass(frozen=True, slots=True)
class Reply:
    """A response's status and its JSON document. `retry_after_s`: seconds to wait before a retry, if it says so."""

    status: int
    document: Any
    retry_after_s: int | None = None


class _BrokenOffError(Exception):
    """A stream has not come to its end, but may. reason: to raise if it can't go on."""

    def __init__(self, reason: ConsortError) -> None:
        super().__init__()
        self.reason = reason


@dataclass(slots=True)
class _Progress:
    """How far a stream has come. last_id: of its events, `_NO_EVENT` before the first; None: it can't be resumed."""

    last_id: str | None
    has_begun: bool = False  # a response has come
    has_passed_on: bool = False  # an event, too

    @property
    def can_go_on(self) -> bool:
        return self.has_begun and self.last_id is not None and (self.last_id != _NO_EVENT or not self.has_passed_on)


class _Connection(HTTPConnection):
    """Gives up soon where nobody listens. `timeout` is for what comes after; None: wait for ever."""

    def connect(self) -> None:
        timeout_s, self.timeout = self.timeout, _CONNECT_TIMEOUT_S
        super().connect()
        self.sock.settimeout(timeout_s)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine may be lost without a word


class _TlsConnection(_Connection, HTTPSConnection):
    """The same over TLS."""


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_Connection, request)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def __init__(self, tls: ssl.SSLContext | None) -> None:
        super().__init__()
        self._tls = tls

    def https_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(_TlsConnection, context=self._tls), request)


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
        handlers: list[urllib.request.BaseHandler] = [_HttpHandler(), _HttpsHandler(tls)]
        if local or is_loopback(urllib.parse.urlsplit(self.url).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))  # http_proxy is for other machines
        self._opener = urllib.request.build_opener(*handlers)
        api_key = (api_key or "").strip()  # files and shells add line ends
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

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
                if broken_s is None and isinstance(error.__cause__, ConnectionError | HTTPException):
                    broken_s = time.monotonic()
                if path not in _REPEATABLE or broken_s is None or time.monotonic() - broken_s > _PATIENCE_S:
                    raise
                time.sleep(_PAUSE_S)

    def _request(self, path: str, body: Mapping[str, object] | None = None) -> Reply:
        try:
            with self._open(path, body) as response:
                return Reply(response.status, json.load(response))
        except urllib.error.HTTPError as error:
            return _reply(error)
        except TimeoutError as error:
            raise UnavailableError(f"{self.url}{path}: the server has not answered in time") from error
        except (OSError, HTTPException, ValueError) as error:
            raise self._unreachable(error) from error

    def document(self, path: str) -> Any:
        """Return the JSON document at a path.

        Raises:
            InvalidRequestError: the server refused the request; names the field, if the server did.
            OverloadedError, DeadlineError: the server's queue is full, or the request took too long.
            UnavailableError: the server can't answer now, or there is none.
        """
        return self.checked(path, self.get(path))

    def checked(self, path: str, reply: Reply) -> Any:
        """Return the reply's document; raises what `document` raises."""
        if reply.status != HTTPStatus.OK:
            raise self._error(path, reply)
        return reply.document

    def stream(self, path: str, body: Mapping[str, object]) -> Generator[Any, None, None]:
        """Yield the documents of a stream's events, up to [DONE]. Closing the iterator hangs up.

        A stream that breaks off is resumed where its events have ids, for up to half a minute.

        Raises:
            ConsortError: as in `document`; UnavailableError also if the stream broke off or contained another error.
        """
        progress = _Progress(_NO_EVENT if path in _REPEATABLE else None)
        broken_s = None
        while True:
            try:
                for data in self._events(path, body, progress):
                    broken_s = None
                    yield self._checked(path, json.loads(data))
                return
            except _BrokenOffError as broken:
                broken_s = broken_s or time.monotonic()
                if not progress.can_go_on or time.monotonic() - broken_s > _PATIENCE_S:
                    raise broken.reason from broken
                time.sleep(_PAUSE_S)

    def _events(self, path: str, body: Mapping[str, object], progress: _Progress) -> Iterator[str]:
        """Yield the data of events after `progress`, up to [DONE].

        Raises:
            _BrokenOffError: the server can't be reached, can't answer now, or has not answered to the end.
            ConsortError: it refused the request.
        """
        try:
            with self._open(path, {**body, "stream": True}, progress.last_id) as response:
                progress.has_begun, last_id = True, progress.last_id
                for line in response:
                    field, _, data = line.decode().strip().partition(":")
                    if field == "id":
                        last_id = data.strip()
                    if field != "data" or not line.endswith(b"\n"):
                        continue  # a comment, an event's name or end, or a part of a line
                    if data.strip() == "[DONE]":
                        return
                    progress.last_id, progress.has_passed_on = last_id, True
                    yield data
        except urllib.error.HTTPError as error:
            refusal = self._error(path, _reply(error))
            raise (_BrokenOffError(refusal) if error.code in _TRY_AGAIN else refusal) from error
        except urllib.error.URLError as error:
            raise _BrokenOffError(self._unreachable(error)) from error
        except (OSError, HTTPException) as error:
            raise _BrokenOffError(UnavailableError(f"{self.url}{path}: the stream broke off: {error}")) from error
        raise _BrokenOffError(UnavailableError(f"{self.url}{path}: the stream broke off"))

    def _open(self, path: str, body: Mapping[str, object] | None = None, last_event: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers if data is None else {**self._headers, "Content-Type": "application/json"}
        if last_event is not None:
            headers = {**headers, "Last-Event-ID": last_event}
        request = urllib.request.Request(self.url + path, data, headers)
        return self._opener.open(request, timeout=_GET_TIMEOUT_S if body is None else None)

    def _unreachable(self, error: Exception) -> UnavailableError:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        reason = getattr(reason, "strerror", None) or reason
        return UnavailableError(f"no Consort server answers at {self.url} ({reason}); `consort serve` starts one")

    def _error(self, path: str, reply: Reply) -> ConsortError:
        """Return the error for a status other than 200, with the server's message."""
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

    def _checked(self, path: str, document: Any) -> Any:
        if "error" in document:
            status = _STREAMED.get(document["error"].get("type"), HTTPStatus.SERVICE_UNAVAILABLE)
            raise self._error(path, Reply(status, document))
        return document


def _reply(error: urllib.error.HTTPError) -> Reply:
    retry_after = error.headers.get("Retry-After", "")
    with error:
        return Reply(error.code, _error_document(error), int(retry_after) if retry_after.isdecimal() else None)


def _error_document(error: urllib.error.HTTPError) -> Any:
    try:
        return json.load(error)
    except ValueError:
        return {"error": {"message": f"HTTP {error.code} {error.reason}"}}
