"""Everything that crosses a link: frozen, typed, token ids only. All one-way; none has an answer.

    coordinator -> target, drafter:   Admit, Cancel, Alive
    coordinator -> target:            Offer (forwarded), Drafting
    coordinator -> drafter:           Commit (forwarded)
    drafter -> coordinator:           Offer, Failed, Report
    target -> coordinator:            Commit, Failed, Report

`request_id` is a random 63-bit integer, unique among all coordinators.
"""

import msgspec

from decoding.drafts import Distribution
from decoding.logprobs import TokenLogprobs
from decoding.ngram import NgramOptions
from decoding.params import SamplingParams
from decoding.stopping import FinishReason


class Admit(msgspec.Struct, frozen=True, tag=True):
    """Take up a request. `tokens` are its prompt and all committed tokens, so fail-over is one more Admit."""

    request_id: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    draft_length: int  # most draft tokens to verify per step
    drafter: bool  # whether a drafter works on the request
    ngram: NgramOptions | None = None  # look drafts up, too


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Forget a request and free its slot; unknown ids are ignored."""

    request_id: int


class Drafting(msgspec.Struct, frozen=True, tag=True):
    """A drafter was attached to the request, or taken from it."""

    request_id: int
    attached: bool


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Proposed continuations from absolute position `base` on. A hint, checked by the target's trie.

    Without `parents`, tokens[j] follows tokens[j - 1]: a chain. With them it follows tokens[parents[j]], or the text
    where that is -1: a tree, parents first.
    """

    request_id: int
    base: int
    tokens: list[int]
    parents: list[int] | None = None
    chances: list[float] | None = None  # of each token, should those before it be the target's, to be so too
    distributions: list[Distribution | None] | None = None  # what each token was drawn from, for rejection sampling


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Tokens that became part of the text: `tokens` from absolute position `base` on, in one target step."""

    request_id: int
    base: int
    tokens: list[int]
    drafted: int  # draft tokens verified in this step
    accepted: int  # of these, how many the target also chose
    finish: FinishReason | None
    draft_length: int  # how long a draft would pay in a next step; 0: none would, so the drafter may rest
    logprobs: list[TokenLogprobs] | None = None  # of the tokens, if asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's from its second on, with the first tokens
    rejected: bool = False  # whether the last token is not what was drafted in its place
    hit: bool = False  # if so, whether a draft for what follows it was there already


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The replica can't go on with this request."""

    request_id: int
    error: str


class Alive(msgspec.Struct, frozen=True, tag=True):
    """A coordinator's sign of life; a replica forgets the requests of one that has died."""


class Report(msgspec.Struct, frozen=True, tag=True):
    """A sign of life from a replica's loop, with its load."""

    active: int  # requests that hold a slot
    waiting: int  # requests that wait for one
    slots: int
    request_ids: list[int]  # the receiver's requests among them
    drafting: bool = True  # of a target: whether drafts are wanted; not while plain decoding is faster


Message = Admit | Cancel | Drafting | Offer | Commit | Failed | Alive | Report
