"""A small HTTP client for the commands: JSON requests, JSON or event-stream responses."""

import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from typing import Any

from decoding.errors import InvalidRequestError, UnavailableError
from deployments.validation.loopback import is_loopback

DEFAULT_URL = "http://127.0.0.1:8000"  # the default of `consort serve`
_TIMEOUT_S = 120.0
_CALLERS_FAULT = {HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND}


@dataclass(frozen=True, slots=True)
class Reply:
    """A response's status and its JSON document."""

    status: int
    document: Any


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
        handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=tls)]
        if local or is_loopback(urllib.parse.urlsplit(self.url).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))  # http_proxy is for other machines
        self._opener = urllib.request.build_opener(*handlers)
        api_key = (api_key or "").strip()  # files and shells add line ends
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str) -> Reply:
        """Send a GET request; raises UnavailableError without a JSON response."""
        return self._request(path)

    def post(self, path: str, body: Mapping[str, object]) -> Reply:
        """Send a POST request; raises what `get` raises."""
        return self._request(path, body)

    def _request(self, path: str, body: Mapping[str, object] | None = None) -> Reply:
        try:
            with self._open(path, body) as response:
                return Reply(response.status, json.load(response))
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, _error_document(error))
        except (OSError, HTTPException, ValueError) as error:
            raise self._unreachable(error) from error

    def document(self, path: str) -> Any:
        """Return the JSON document at a path.

        Raises:
            InvalidRequestError: the server refused the request; names the field, if the server did.
            UnavailableError: the server can't answer now, or there is none.
        """
        return self.checked(path, self.get(path))

    def checked(self, path: str, reply: Reply) -> Any:
        """Return the reply's document; raises what `document` raises."""
        if reply.status != HTTPStatus.OK:
            raise self._error(path, reply.status, reply.document)
        return reply.document

    def stream(self, path: str, body: Mapping[str, object]) -> Generator[Any, None, None]:
        """Yield the documents of a stream's events, up to [DONE]. Closing the iterator hangs up.

        Raises:
            InvalidRequestError: the request was refused; names the field, if the server did.
            UnavailableError: the server can't answer now, the stream broke off, or it contained an error.
        """
        try:
            with self._open(path, {**body, "stream": True}) as response:
                for line in response:
                    field, _, data = line.decode().strip().partition(":")
                    if field != "data":
                        continue  # a comment, an event's name, or the end of an event
                    if data.strip() == "[DONE]":
                        return
                    yield self._checked(json.loads(data))
        except urllib.error.HTTPError as error:
            with error:
                raise self._error(path, error.code, _error_document(error)) from error
        except urllib.error.URLError as error:
            raise self._unreachable(error) from error
        except (OSError, HTTPException) as error:
            raise UnavailableError(f"{self.url}{path}: the stream broke off: {error}") from error
        raise UnavailableError(f"{self.url}{path}: the stream broke off")

    def _open(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers if data is None else {**self._headers, "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        return self._opener.open(request, timeout=_TIMEOUT_S)

    def _unreachable(self, error: Exception) -> UnavailableError:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        reason = getattr(reason, "strerror", None) or reason
        return UnavailableError(f"no Consort server answers at {self.url} ({reason}); `consort serve` starts one")

    def _error(self, path: str, status: int, document: Any) -> InvalidRequestError | UnavailableError:
        """Return the error for a status other than 200, with the server's message."""
        details = document.get("error") if isinstance(document, dict) else None
        details = details if isinstance(details, dict) else {}
        message = details.get("message") or f"{self.url}{path}: HTTP {status}"
        if status in _CALLERS_FAULT:
            return InvalidRequestError(message, field=details.get("param"))
        return UnavailableError(f"{self.url}: {message}")

    def _checked(self, document: Any) -> Any:
        if "error" in document:
            raise UnavailableError(f"{self.url}: {document['error']['message']}")
        return document


def _error_document(error: urllib.error.HTTPError) -> Any:
    try:
        return json.load(error)
    except ValueError:
        return {"error": {"message": f"HTTP {error.code} {error.reason}"}}
