"""Everything that crosses a link: frozen, typed, token ids only. All one-way; none has an answer.

    coordinator -> target, drafter:   Admit, Cancel, Heartbeat
    coordinator -> target:            AttachDrafter, MemberLost
    drafter -> coordinator:           Failed, Report
    drafter -> target:                Offer, ResendRequest, Report
    target -> drafter:                Advance, Report
    target -> coordinator:            Commit, Beams, Failed, Report
    leader of an ensemble -> member:  Join, LogitsRequest, Cancel, Report (both are targets)
    member -> leader:                 Joined, LogitsReply, Failed, Report

`request_id` is a random 63-bit integer, unique among all coordinators.
"""

import msgspec

from actors.wire.addresses import ReplicaAddress
from actors.wire.logits_codec import LogitsTransport, PackedLogits
from actors.wire.logits_memory import SharedOffer
from decoding.beams.group import Hypothesis
from decoding.beams.options import BeamOptions
from decoding.blending.ensemble_options import EnsembleOptions
from decoding.drafts.ngram import NgramOptions
from decoding.drafts.trie import Distribution
from decoding.sampling.logprobs import TokenLogprobs
from decoding.sampling.params import SamplingParams
from decoding.sampling.stopping import FinishReason


class Member(msgspec.Struct, frozen=True):
    """A model of an ensemble, and which of its replicas takes part; None: there is none."""

    model: str
    address: ReplicaAddress | None


class Ensemble(msgspec.Struct, frozen=True):
    """The models whose distributions become one. The leader is the target that the request is admitted to."""

    leader: str  # its model
    members: list[Member]  # the others
    options: EnsembleOptions


class MemberShare(msgspec.Struct, frozen=True):
    """What a member contributed to an answer, so far."""

    model: str
    weight: float  # now; 0: it is gone
    tokens: int  # to which it contributed
    agreement: float  # the share of these that were the most probable ones to itself
    latency_s: float  # mean, of its answers; 0 for the leader


class MemberView(msgspec.Struct, frozen=True):
    """What a member of an ensemble thought of a token that was committed."""

    model: str
    logprob: float  # of the token, to this member alone
    agreed: bool  # whether it was the most probable token to this member
    share: float  # weight × probability, of 1 in all members


class Admit(msgspec.Struct, frozen=True, tag=True):
    """Take up a request. `tokens` are its prompt and all committed tokens, so fail-over is one more Admit.

    `admission` counts a request's admissions. What replicas say about it comes with the number that it was admitted
    with, so that a request which has left a replica and come back is not taken for what it was there before.
    """

    request_id: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    draft_length: int  # most draft tokens to verify per step
    drafter: bool  # whether drafts are to be expected, be they made inside the target
    ngram: NgramOptions | None = None  # look drafts up, too
    ensemble: Ensemble | None = None  # to be led
    target: ReplicaAddress | None = None  # where a drafter sends its offers
    attached_drafter: str | None = None  # the drafter that a target tells how the text goes on
    beams: BeamOptions | None = None  # search; `tokens` are the prompt
    drafts_only: bool = False  # the receiver is to draft for `target`, which matters to one that can be both
    admission: int = 0


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Forget a request and free its slot; unknown ids are ignored."""

    request_id: int


class AttachDrafter(msgspec.Struct, frozen=True, tag=True):
    """Another drafter works on the request from now on; None: none."""

    request_id: int
    drafter: str | None


class ResendRequest(msgspec.Struct, frozen=True, tag=True):
    """From the request's drafter: something was lost. Tell me again how the text goes on from `known`."""

    request_id: int
    coordinator: str  # that admitted the request
    known: int


class Advance(msgspec.Struct, frozen=True, tag=True):
    """How the text goes on from absolute position `base`: what the target tells the request's drafter."""

    request_id: int
    coordinator: str  # that admitted the request
    admission: int  # of the target
    base: int
    tokens: list[int]
    draft_length: int  # how long a draft would pay in a next step; 0: none would, so the drafter may rest
    rejected_at: int  # how long the text was when a token was last not what had been drafted in its place


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Proposed continuations from absolute position `base` on. A hint, checked by the target's trie.

    Without `parents`, tokens[j] follows tokens[j - 1]: a chain. With them it follows tokens[parents[j]], or the text
    where that is -1: a tree, parents first.
    """

    request_id: int
    base: int
    tokens: list[int]
    parents: list[int] | None = None
    probabilities: list[float] | None = None  # of each token, should those before it be the target's, to be so too
    distributions: list[Distribution | None] | None = None  # what each token was drawn from, for rejection sampling
    coordinator: str = ""  # that admitted the request

    def drawn_from(self) -> list[int]:
        """All tokens of the distributions."""
        return [token for one in self.distributions or () if one is not None for token in one.tokens]


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Tokens that became part of the text: `tokens` from absolute position `base` on, in one target step."""

    request_id: int
    base: int
    tokens: list[int]
    drafted: int  # draft tokens verified in this step
    accepted: int  # of these, how many the target also chose
    finish: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None  # of the tokens, if asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's from its second on, with the first tokens
    members: list[MemberShare] | None = None  # of an ensemble
    views: list[list[MemberView]] | None = None  # of an ensemble: for each token, of those who answered, if asked for
    rejected: bool = False  # whether the last token is not what was drafted in its place
    hit: bool = False  # if so, whether a draft for what follows it was there already
    admission: int = 0  # as in Admit


class Beams(msgspec.Struct, frozen=True, tag=True):
    """What a beam search found; none of it was committed before."""

    request_id: int
    answers: list[Hypothesis]  # best first; fewer than asked for where no more have the words that must appear
    steps: int  # of the target, the prefill's last included
    logprobs: list[list[TokenLogprobs]] | None = None  # of each answer's tokens, if asked for
    admission: int = 0  # as in Admit


class MemberLost(msgspec.Struct, frozen=True, tag=True):
    """A member's replica is gone."""

    request_id: int
    replica: str


class Join(msgspec.Struct, frozen=True, tag=True):
    """Become a member of an ensemble: take up the text, and say Joined when it is in the cache."""

    request_id: int
    tokens: list[int]
    leader: str  # its model, for members that read other tokens
    prompt_length: int  # of the text: what was not chosen by the members
    best_count: int = 0  # how many of its most probable tokens to tell with each answer
    shared: SharedOffer | None = None  # memory for the answers, where the member can see it
    admission: int = 0  # as in Admit, of the leader


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The member is ready to be asked."""

    request_id: int
    admission: int = 0  # as in Join


class LogitsRequest(msgspec.Struct, frozen=True, tag=True):
    """What may follow the text, and each of K draft tokens after it? `text` is what is new of it, from `base` on."""

    request_id: int
    step: int  # to be repeated in the answer
    base: int
    text: list[int]
    tokens: list[int]  # [K]
    parents: list[int]  # [K] as in Offer
    transport: LogitsTransport
    admission: int = 0  # as in Join


class LogitsReply(msgspec.Struct, frozen=True, tag=True):
    """A member's logits, [K + 1, V]."""

    request_id: int
    step: int
    logits: PackedLogits  # in the leader's tokens; −∞ throughout where the member has nothing to say
    best: list[list[int]]  # [K + 1] the leader's tokens that it finds most probable, as many as `Join` says
    admission: int = 0  # as in Join


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The replica can't go on with this request."""

    request_id: int
    error: str
    field: str | None = None  # of the request, if that is at fault
    admission: int = 0  # as in Admit or Join


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """A coordinator's sign of life; a replica forgets the requests of one that has died."""


class Report(msgspec.Struct, frozen=True, tag=True):
    """A sign of life from a replica's loop, with its load."""

    active: int  # requests that hold a slot
    waiting: int  # requests that wait for one
    slots: int
    request_ids: list[int]  # the receiver's requests among them
    drafting: bool = True  # of a target: whether drafts are wanted; not while plain decoding is faster
    attached_drafters: dict[int, str] = {}  # of a target: the drafters that it tells of the receiver's requests
    speculation_gain: float = 1.0  # of a target: how many times as fast as plain decoding, by trials; 1: unknown


Message = (
    Admit
    | Cancel
    | AttachDrafter
    | Offer
    | Advance
    | ResendRequest
    | Commit
    | Beams
    | MemberLost
    | Join
    | Joined
    | LogitsRequest
    | LogitsReply
    | Failed
    | Heartbeat
    | Report
)
