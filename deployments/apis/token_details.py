"""What answers say about single tokens: OpenAI's log-probabilities, vLLM's of prompts, and sources of tokens.

The models only document the format: functions encode the JSON, because there may be very many tokens.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec
from pydantic import BaseModel

from actors.wire.messages import MemberView, TokenSource
from decoding.drafts.draft import ProposerName
from decoding.sampling.logprobs import TokenLogprobs
from deployments.apis.decoder import TokenDecoder
from deployments.apis.parts import Part, TextToken

_LEAST_LOGPROB = -9999.0  # JSON has no minus infinity
_DIGITS = 4  # of the numbers of members
_encoder = msgspec.json.Encoder()

Json = Any  # values for msgspec, with msgspec.Raw for parts that are encoded already


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion; every list has one entry per token. null: the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(BaseModel):
    """A candidate token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token of the answer, with the most probable candidates at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a message."""

    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(BaseModel):
    """A token at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class TokenMember(BaseModel):
    """A blend member's view of a token."""

    model: str
    logprob: float  # under this member alone
    agreed: bool  # whether it was this member's most probable token
    share: float  # weight × probability, normalised over members


class TokenDetail(BaseModel):
    """A token of the answer, its text and its source. Unset fields are not sent."""

    id: int
    text: str
    source: TokenSource
    proposer: ProposerName | None = None  # who drafted it, if it was accepted
    members: list[TokenMember] | None = None


def completion_logprobs(part: Part, count: int, decoder: TokenDecoder) -> Json:
    """JSON of CompletionLogprobs. count: most probable tokens per position, beside the token itself."""

    def tops(token_logprobs: TokenLogprobs) -> dict[str, float]:
        pairs = [(token_logprobs.token, token_logprobs.logprob), *token_logprobs.top[:count]]
        return {decoder.text_of(token): _finite(logprob) for token, logprob in pairs}

    tokens = [*part.echoed, *part.tokens]
    logprobs = [each.token.logprobs for each in tokens]
    return {
        "tokens": [decoder.text_of(each.token.id) for each in tokens],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in logprobs],
        "top_logprobs": _encode_list(None if entry is None else tops(entry) for entry in logprobs),
        "text_offset": [each.offset for each in tokens],
    }


def content_logprobs(part: Part, count: int, decoder: TokenDecoder) -> Json:
    """JSON of a list of ChatLogprob."""

    def fields(token: int, logprob: float) -> dict[str, Any]:
        data = list(decoder.bytes_of(token))
        return {"token": decoder.text_of(token), "logprob": _finite(logprob), "bytes": data}

    def entry(position: TokenLogprobs) -> dict[str, Any]:
        top = [fields(token, logprob) for token, logprob in position.top[:count]]
        return {**fields(position.token, position.logprob), "top_logprobs": top}

    return _encode_list(entry(logprobs) for each in part.tokens if (logprobs := each.token.logprobs) is not None)


def prompt_logprobs(logprobs: Sequence[TokenLogprobs], count: int, decoder: TokenDecoder) -> Json:
    """JSON of PromptLogprobs: at each position by token id, the prompt's token and the `count` most probable ones."""

    def entry(position: TokenLogprobs) -> dict[int, Any]:
        ranked = [(position.token, position.logprob, position.rank)]
        ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(position.top[:count], 1)]
        return {
            token: {"logprob": _finite(logprob), "rank": rank, "decoded_token": decoder.text_of(token)}
            for token, logprob, rank in ranked
        }

    return _encode_list(chain([None], map(entry, logprobs)))


def token_details(part: Part) -> Json:
    """JSON of a list of TokenDetail, without the tokens of an echoed prompt."""

    def detail(each: TextToken) -> dict[str, Any]:
        token = each.token
        fields: dict[str, Any] = {"id": token.id, "text": each.text, "source": token.source}
        if token.proposer is not None:
            fields["proposer"] = token.proposer
        if token.views:
            fields["members"] = [_member(view) for view in token.views]
        return fields

    return _encode_list(map(detail, part.tokens))


def _member(view: MemberView) -> dict[str, Any]:
    logprob, share = (round(value, _DIGITS) for value in (_finite(view.logprob), view.share))
    return {"model": view.model, "logprob": logprob, "agreed": view.agreed, "share": share}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def _encode_list(items: Iterable[Any]) -> msgspec.Raw:
    """Encode a list as JSON, item by item: at once it would block other threads and take far more memory."""
    return msgspec.Raw(b"[" + b",".join(map(_encoder.encode, items)) + b"]")
