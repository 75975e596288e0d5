"""A typed client of a Consort server. Importing it loads no model library."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from consort.text_model import Body, Route, TextModel
from decoding.errors import UnavailableError
from deployments.client import Client as HttpClient
from deployments.fields.loopback import DEFAULT_URL

_CONNECTIONS = 32  # requests that one call has in progress at once
_STRICT = {"strict": True}  # unknown fields are mistakes here


class Client(TextModel):
    """A model on a server: `Client().chat([{"role": "user", "content": "Hello!"}]).text`. Has the methods of `LLM`."""

    def __init__(self, url: str = DEFAULT_URL, *, model: str | None = None, api_key: str | None = None) -> None:
        """
        url: with or without http:// and OpenAI's /v1.
        model: an endpoint's name; None: the first that the server lists.
        """
        self._http = HttpClient(url, api_key)
        self._wanted = model

    @cached_property
    def model(self) -> str:
        if self._wanted is not None:
            return self._wanted
        names = self.models()
        if not names:
            raise UnavailableError(f"{self._http.url} serves no models")
        return names[0]

    def models(self) -> list[str]:
        return [card["id"] for card in self._http.document("/v1/models")["data"]]

    def close(self) -> None:
        """Do nothing: between requests a client holds no connection. As in `LLM`, so that code works with both."""

    def _answer(self, route: Route, bodies: Sequence[Body]) -> Sequence[Mapping[str, Any]]:
        if not bodies:
            return []
        model = self.model

        def ask(body: Body) -> Mapping[str, Any]:
            reply = self._http.post(route, {"model": model, **_STRICT, **body})
            document: Mapping[str, Any] = self._http.checked(route, reply)
            return document

        with ThreadPoolExecutor(min(len(bodies), _CONNECTIONS)) as connections:
            return list(connections.map(ask, bodies))

    def _stream(self, route: Route, body: Body) -> Iterator[Mapping[str, Any]]:
        return self._http.stream(route, {"model": self.model, **_STRICT, **body})
