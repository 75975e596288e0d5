"""A small HTTP client for our own commands: JSON in, JSON or server-sent events out. Standard library only."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from decoding.errors import UnavailableError

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer's status and its JSON document."""

    status: int
    document: Any


class Client:
    """A server, by its base URL."""

    def __init__(self, url: str) -> None:
        """url: with or without http:// and OpenAI's /v1."""
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")

    def get(self, path: str) -> Reply:
        """Raises UnavailableError if nothing answers, or what answers is not JSON."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=_TIMEOUT_S) as response:
                return Reply(response.status, json.load(response))
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, self._error_document(error))
        except (OSError, ValueError) as error:
            raise UnavailableError(f"no Consort server answers at {self.url}: {error}") from error

    def stream(self, path: str, body: Mapping[str, object]) -> Iterator[Any]:
        """The documents of a stream's events, up to [DONE].

        Raises:
            UnavailableError: the request was refused, the stream broke off, or it brought an error.
        """
        request = urllib.request.Request(
            self.url + path, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                for line in response:
                    data = line.decode().removeprefix("data: ").strip()
                    if data == "[DONE]":
                        return
                    if data:
                        yield self._checked(json.loads(data))
        except urllib.error.HTTPError as error:
            with error:
                self._checked(self._error_document(error))
        except OSError as error:
            raise UnavailableError(f"{self.url}{path}: {error}") from error
        raise UnavailableError(f"{self.url}{path}: the stream broke off")

    def _checked(self, document: Any) -> Any:
        if "error" in document:
            raise UnavailableError(f"{self.url}: {document['error']['message']}")
        return document

    @staticmethod
    def _error_document(error: urllib.error.HTTPError) -> Any:
        try:
            return json.load(error)
        except ValueError:
            return {"error": {"message": f"HTTP {error.code} {error.reason}"}}
