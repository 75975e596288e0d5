"""A streamed answer: its text, the sources of its tokens, and its times."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from decoding.errors import InvalidRequestError
from deployments.client import Client

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Text with one source: accepted, ngram and other proposers, recovered, bonus, plain, or "" if unknown.

    Accepted are a drafter's tokens; those of other proposers go by their names.
    """

    text: str
    source: str


class Attribution:
    """Matches the tokens of one answer with its text, which may come later than they do."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # tokens by source
        self._pending: deque[TextSpan] = deque()

    def split(self, text: str, details: Sequence[Mapping[str, Any]]) -> list[TextSpan]:
        """Split the next text where its source changes. If tokens and text don't match, the source is ""."""
        for detail in details:
            proposer = detail.get("proposer")
            source = detail["source"] if proposer in (None, "drafter") else proposer
            self.counts[source] += 1
            self._pending.append(TextSpan(detail["text"], source))
        spans: list[TextSpan] = []
        while text and self._pending:
            token = self._pending.popleft()
            if token.text.startswith(text):
                self._pending.appendleft(TextSpan(token.text[len(text) :], token.source))
                spans.append(TextSpan(text, token.source))
                return spans
            if not text.startswith(token.text):
                self._pending.clear()  # part of a character, or text cut by a stop string
                break
            text = text[len(token.text) :]
            spans.append(token)
        return [*spans, TextSpan(text, "")] if text else spans


@dataclass(slots=True)
class Generation:
    """An answer so far. Values that the server did not send are None."""

    text: str = ""
    finish_reason: str | None = None
    seed: int | None = None
    prompt_tokens: int | None = None
    tokens: int | None = None  # of the answer
    speculation: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, int] = field(default_factory=dict)  # tokens by source
    first_s: float = 0.0  # until the first text
    total_s: float = 0.0
    stopped: bool = False  # by Ctrl-C

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.total_s if self.tokens and self.total_s else None


class Generator:
    """Requests streamed answers, with the source of each token if the server supports it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.has_sources = True  # until the server refuses the field

    def run(self, path: str, body: Mapping[str, object], show: Callable[[TextSpan], None]) -> Generation:
        """Stream an answer and pass on its text as it comes. Ctrl-C hangs up, which also stops the server.

        Raises ConsortError as `Client.stream` does.
        """
        body = {**body, "stream_options": {"include_usage": True}}
        if self.has_sources:
            try:
                return self._run(path, {**body, "return_token_details": True}, show)
            except InvalidRequestError as error:
                if error.field != "return_token_details":
                    raise
                self.has_sources = False
        return self._run(path, body, show)

    def _run(self, path: str, body: Mapping[str, object], show: Callable[[TextSpan], None]) -> Generation:
        generation, attribution = Generation(), Attribution()
        began_s = time.perf_counter()
        try:
            with closing(self._client.stream(path, body)) as documents:
                for document in documents:
                    _update(generation, document)
                    for choice in document["choices"]:
                        text = _text_of(choice)
                        if text and not generation.first_s:
                            generation.first_s = time.perf_counter() - began_s
                        generation.text += text
                        for span in attribution.split(text, choice.get("token_details") or ()):
                            show(span)
        except KeyboardInterrupt:
            generation.stopped = True
        generation.total_s = time.perf_counter() - began_s
        generation.sources = attribution.counts
        if generation.tokens is None and attribution.counts:
            generation.tokens = attribution.counts.total()
        return generation


def _update(generation: Generation, document: Mapping[str, Any]) -> None:
    """Copy the values of a chunk that concern the whole answer."""
    usage = document.get("usage")
    if usage:
        generation.prompt_tokens, generation.tokens = usage["prompt_tokens"], usage["completion_tokens"]
    generation.speculation = document.get("speculation") or generation.speculation
    generation.seed = document.get("seed", generation.seed)
    for choice in document["choices"]:
        generation.finish_reason = choice.get("finish_reason") or generation.finish_reason


def _text_of(choice: Mapping[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""
