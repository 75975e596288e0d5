"""How answers tell about single tokens: OpenAI's log-probabilities of both kinds, vLLM's of prompts, and sources.

There may be very many, so the models here only say what they look like, and functions write their JSON.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any

import msgspec
from pydantic import BaseModel

from actors.coordinator.request import TokenSource
from actors.wire.messages import MemberView
from decoding.sampling.logprobs import TokenLogprobs
from deployments.answers.parts import Part
from deployments.tokenizers.token_decoder import Vocabulary

_LEAST_LOGPROB = -9999.0  # JSON has no minus infinity
_DIGITS = 4  # of what members thought
_encoder = msgspec.json.Encoder()

Json = Any  # what msgspec writes as JSON, with parts that are written already


class CompletionLogprobs(BaseModel):
    """Of a completion's tokens; one entry for each in every list. null: nothing comes before."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(BaseModel):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token that came, and the most probable ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of a message's tokens."""

    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(BaseModel):
    """A token in a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class TokenMember(BaseModel):
    """What a member of a blend thought of a token."""

    model: str
    logprob: float  # to this member alone
    agreed: bool  # whether it was its own most probable token
    share: float  # weight × probability, of 1 in all members


class TokenDetail(BaseModel):
    """A token of the answer, what it adds to the text, and how it came to be. Fields that are not set are not sent."""

    id: int
    text: str
    source: TokenSource
    members: list[TokenMember] | None = None


def completion_logprobs(part: Part, count: int, vocabulary: Vocabulary) -> Json:
    """CompletionLogprobs. count: how many most probable tokens to tell in each place, beside the token itself."""

    def tops(told: TokenLogprobs) -> dict[str, float]:
        pairs = [(told.token, told.logprob), *told.top[:count]]
        return {vocabulary.text_of(token): _finite(logprob) for token, logprob in pairs}

    return {
        "tokens": [vocabulary.text_of(token) for token in part.tokens],
        "token_logprobs": [None if told is None else _finite(told.logprob) for told in part.logprobs],
        "top_logprobs": _written(None if told is None else tops(told) for told in part.logprobs),
        "text_offset": list(part.offsets),
    }


def chat_logprobs(part: Part, count: int, vocabulary: Vocabulary) -> Json:
    """ChatLogprobs. count: how many of the most probable tokens to tell in each place."""
    return {"content": content_logprobs(part, count, vocabulary), "refusal": None}


def content_logprobs(part: Part, count: int, vocabulary: Vocabulary) -> Json:
    """A list of ChatLogprob."""

    def fields(token: int, logprob: float) -> dict[str, Any]:
        data = list(vocabulary.bytes_of(token))
        return {"token": vocabulary.text_of(token), "logprob": _finite(logprob), "bytes": data}

    def entry(told: TokenLogprobs) -> dict[str, Any]:
        top = [fields(token, logprob) for token, logprob in told.top[:count]]
        return {**fields(told.token, told.logprob), "top_logprobs": top}

    return _written(entry(told) for told in part.logprobs if told is not None)


def prompt_logprobs(told: Sequence[TokenLogprobs], count: int, vocabulary: Vocabulary) -> Json:
    """PromptLogprobs, by token id in each place of the prompt: its own token, and the `count` most probable ones."""

    def entry(position: TokenLogprobs) -> dict[int, Any]:
        ranked = [(position.token, position.logprob, position.rank)]
        ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(position.top[:count], 1)]
        return {
            token: {"logprob": _finite(logprob), "rank": rank, "decoded_token": vocabulary.text_of(token)}
            for token, logprob, rank in ranked
        }

    return _written(chain([None], map(entry, told)))


def token_details(part: Part) -> Json:
    """A list of TokenDetail. Of a part without an echoed prompt's tokens, whose source is the client."""
    count = len(part.sources)
    answered = zip(part.tokens[-count:], part.pieces[-count:], part.sources, strict=True) if count else ()
    details = ({"id": token, "text": text, "source": source} for token, text, source in answered)
    views = chain(part.views, repeat(None))  # of ensembles alone
    return _written(
        detail if members is None else {**detail, "members": [_member(view) for view in members]}
        for detail, members in zip(details, views, strict=False)
    )


def _member(view: MemberView) -> dict[str, Any]:
    logprob, share = (round(value, _DIGITS) for value in (_finite(view.logprob), view.share))
    return {"model": view.model, "logprob": logprob, "agreed": view.agreed, "share": share}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def _written(items: Iterable[Any]) -> msgspec.Raw:
    """A list, as JSON. Item by item: all at once would hold up the other threads, and take far more memory."""
    return msgspec.Raw(b"[" + b",".join(map(_encoder.encode, items)) + b"]")
