"""How answers tell about single tokens: OpenAI's log-probabilities of both kinds, vLLM's of prompts, and sources."""

from collections.abc import Sequence

from pydantic import BaseModel

from actors.messages import MemberView
from actors.request import TokenSource
from decoding.logprobs import TokenLogprobs
from deployments.answers.parts import Part
from deployments.endpoints.vocabulary import Vocabulary

_LEAST_LOGPROB = -9999.0  # JSON has no minus infinity
_DIGITS = 4  # of what members thought


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


def completion_logprobs(part: Part, count: int, vocabulary: Vocabulary) -> CompletionLogprobs:
    """count: how many of the most probable tokens to tell in each place, beside the token itself."""

    def tops(told: TokenLogprobs) -> dict[str, float]:
        pairs = [(told.token, told.logprob), *told.top[:count]]
        return {vocabulary.text_of(token): _finite(logprob) for token, logprob in pairs}

    return CompletionLogprobs(
        tokens=[vocabulary.text_of(token) for token in part.tokens],
        token_logprobs=[None if told is None else _finite(told.logprob) for told in part.logprobs],
        top_logprobs=[None if told is None else tops(told) for told in part.logprobs],
        text_offset=list(part.offsets),
    )


def chat_logprobs(part: Part, count: int, vocabulary: Vocabulary) -> ChatLogprobs:
    """count: how many of the most probable tokens to tell in each place."""

    def fields(token: int, logprob: float) -> TopLogprob:
        data = list(vocabulary.bytes_of(token))
        return TopLogprob(token=vocabulary.text_of(token), logprob=_finite(logprob), bytes=data)

    def entry(told: TokenLogprobs) -> ChatLogprob:
        top = [fields(token, logprob) for token, logprob in told.top[:count]]
        return ChatLogprob(**fields(told.token, told.logprob).model_dump(), top_logprobs=top)

    return ChatLogprobs(content=[entry(told) for told in part.logprobs if told is not None])


def prompt_logprobs(told: Sequence[TokenLogprobs], count: int, vocabulary: Vocabulary) -> PromptLogprobs:
    """By token id in each place of the prompt: its own token, and the `count` most probable ones."""

    def place(one: TokenLogprobs) -> dict[int, PromptLogprob]:
        ranked = [(one.token, one.logprob, one.rank)]
        ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(one.top[:count], 1)]
        return {
            token: PromptLogprob(logprob=_finite(logprob), rank=rank, decoded_token=vocabulary.text_of(token))
            for token, logprob, rank in ranked
        }

    return [None, *map(place, told)]


def token_details(part: Part) -> list[TokenDetail]:
    """Of a part without an echoed prompt's tokens, whose source is the client."""
    count = len(part.sources)
    answered = zip(part.tokens[-count:], part.pieces[-count:], part.sources, strict=True) if count else ()
    details = [TokenDetail(id=token, text=text, source=source) for token, text, source in answered]
    for detail, views in zip(details, part.views, strict=False):  # of ensembles alone
        detail.members = [_member(view) for view in views]
    return details


def _member(view: MemberView) -> TokenMember:
    logprob, share = (round(value, _DIGITS) for value in (_finite(view.logprob), view.share))
    return TokenMember(model=view.model, logprob=logprob, agreed=view.agreed, share=share)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
