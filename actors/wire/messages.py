"""Messages that cross links. All are one-way: no sender waits for a reply, and any message may be lost.

docs/architecture.md says who sends what. `request_id` is a 63-bit integer, unique among all coordinators; later
requests have greater ones. Texts are token ids. Messages that each step sends once per row are hidden from the garbage
collector (`gc=False`), which is safe because no message is part of a reference cycle.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from actors.wire.shared_memory import SharedOffer
from decoding.beams.hypothesis import Hypothesis
from decoding.beams.options import BeamOptions
from decoding.blending.params import EnsembleOptions
from decoding.drafts.draft import Distribution, ProposerName
from decoding.drafts.options import NgramOptions
from decoding.prompt_positions import PromptPositions
from decoding.sampling.logprobs import TokenLogprobs
from decoding.sampling.params import SamplingParams
from decoding.sampling.stopping import FinishReason

# Version of the message format. Raise it when older and newer versions would misread each other: when a field is
# renamed, or a required one is added. A new field with a default needs no new version. Coordinators use only replicas
# of their own version.
PROTOCOL = 7


class ReplicaAddress(msgspec.Struct, frozen=True):
    """A replica's name, model and endpoint. Local links go by the name and leave `uri` and `public_key` empty."""

    name: str  # unique among replicas, also across restarts
    model: str  # the configured model that it runs
    uri: str = ""  # tcp://host:port
    public_key: bytes = b""  # CURVE, Z85
    protocol: int = PROTOCOL


class Member(msgspec.Struct, frozen=True):
    """A member of an ensemble, or a term of a formula, beside the leader's own text."""

    model: str  # or, of a term of the leader's own model, how it differs
    address: ReplicaAddress | None  # of the replica that runs it; None: there is none, or it is the leader's
    is_own: bool = False  # whether the leader's model reads it, beside the request
    prompt: list[int] | None = None  # that it reads in place of the request's, in the leader's tokens; None: the same
    layers: tuple[int, ...] = ()  # after which the leader's model predicts; of several, the most different one

    @property
    def is_there(self) -> bool:
        return self.is_own or self.address is not None


class Ensemble(msgspec.Struct, frozen=True):
    """What is blended, in order: the target that the request is admitted to leads."""

    leader: str  # the name of its model
    members: list[Member]  # without the leader
    options: EnsembleOptions


class MemberShare(msgspec.Struct, frozen=True):
    """A member's contribution to an answer so far."""

    model: str
    weight: float  # current; 0 once the member is gone
    tokens: int  # how many tokens it contributed to
    agreement: float  # fraction of these that were its own most probable token
    latency_s: float  # mean over its replies; 0 for the leader
    preferred: tuple[bool, ...] = ()  # of the last step's tokens, if there are several: whether each was that token

    def without_last(self, count: int) -> "MemberShare":
        """Return the share without so many of the last step's tokens."""
        left_out = self.preferred[-count:]
        tokens = self.tokens - len(left_out)
        agreed = round(self.agreement * self.tokens) - sum(left_out)
        return msgspec.structs.replace(self, tokens=tokens, agreement=agreed / max(tokens, 1), preferred=())


class MemberView(msgspec.Struct, frozen=True):
    """A member's view of one committed token."""

    model: str
    logprob: float  # of the token under this member alone
    agreed: bool  # whether it was this member's most probable token
    share: float  # weight × probability, divided by the sum over members


# accepted: a draft token; recovered: replaces a rejected draft token; bonus: follows a fully accepted draft;
# plain: from a step without a draft.
TokenSource = Literal["accepted", "recovered", "bonus", "plain"]


class Token(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A committed token, and what is known about it."""

    id: int
    source: TokenSource = "plain"
    proposer: ProposerName | None = None  # who offered it first, if it was accepted
    logprobs: TokenLogprobs | None = None  # if requested
    views: tuple[MemberView, ...] = ()  # of the members of an ensemble that replied, if requested


class Adapter(msgspec.Struct, frozen=True):
    """LoRA weights that a model applies to a request. A replica loads them when it first needs them."""

    name: str  # by which clients ask for it
    path: str  # a folder or a Hub id
    version: str  # digest of the files, as only equal weights give equal texts
    drafter: "Adapter | None" = None  # what the drafter of such requests applies; None: it drafts without
    heads: "Adapter | None" = None  # the same of heads


class Weights(msgspec.Struct, frozen=True):
    """The weights that a model runs with."""

    version: str = "0"  # a number that grows, and a digest of the files; "0": as configured
    path: str = ""  # a folder or a .gguf file; empty: the configured one

    @staticmethod
    def numbered(number: int, digest: str, path: str) -> "Weights":
        return Weights(f"{number}-{digest}".removesuffix("-"), path)

    @property
    def order(self) -> tuple[int, str]:
        """Number and digest: the current version of a model is the last of those that were announced."""
        number, _, digest = self.version.partition("-")
        return int(number), digest

    def is_same(self, other: "Weights") -> bool:
        """Whether both versions are the same files."""
        return (self.path, self.order[1]) == (other.path, other.order[1])


class Admit(msgspec.Struct, frozen=True, tag=True):
    """Start to work on a request. `tokens` are its prompt and all committed tokens, so fail-over is one more Admit.

    `admission` numbers a request's admissions. Replicas repeat the number in what they send about the request. So late
    messages from an earlier admission are recognised, even if the request returned to the same replica.
    """

    request_id: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    draft_length: int  # maximum number of draft tokens to verify per step
    drafter: bool  # whether a drafter works on the request, colocated or not
    ngram: NgramOptions | None = None  # propose drafts by n-gram look-up, too
    heads: bool = False  # propose drafts by heads on the target's hidden states, too
    prediction: list[int] = []  # of the answer, to draft from
    corpus: bool = False  # copy drafts from earlier texts, too
    longest_draft: int = 0  # maximum number of draft tokens where they are copied, if more than `draft_length`
    ensemble: Ensemble | None = None  # for the receiver to lead
    target: ReplicaAddress | None = None  # where a drafter sends its offers
    attached_drafter: str | None = None  # the drafter to which a target sends Advance
    beams: BeamOptions | None = None  # run a beam search; `tokens` are the prompt
    drafts_only: bool = False  # for replicas that run both loops: only draft, for `target`
    admission: int = 0
    cache_salt: str = ""  # KV pages and drafts are shared only with requests of the same salt
    prompt_positions: PromptPositions | None = None  # of a shortened prompt; drafters number its tokens consecutively
    adapter: Adapter | None = None  # for the receiver
    arrived_at_s: float = 0.0  # by the coordinator's wall clock; older requests come first on all replicas
    weights: Weights = Weights()  # that a target's row runs with, if they can be replaced


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Forget a request and free its slot. Unknown ids are ignored."""

    request_id: int


class SetWeights(msgspec.Struct, frozen=True, tag=True):
    """Weights to have once no row needs others. A row of a target runs with those that its admission names."""

    weights: Weights
    rest: int = 0  # grows with each sleep and each wake; odd: hold no weights and pages while no row needs them


class Remember(msgspec.Struct, frozen=True, tag=True):
    """A finished text, for the corpora of all targets with the endpoint's model. To lose it costs drafts only."""

    tokens: list[int]  # prompt and answer
    cache_salt: str = ""  # as in Admit


class AttachDrafter(msgspec.Struct, frozen=True, tag=True):
    """Names the drafter that works on the request from now on; None: no drafter does."""

    request_id: int
    drafter: str | None


class ResendRequest(msgspec.Struct, frozen=True, tag=True):
    """A drafter's request to send Advance again from position `base`, because one was lost."""

    request_id: int
    coordinator: str  # that admitted the request
    base: int


class Advance(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Committed tokens from position `base` on, for the request's drafter. Without any it sets only `draft_length`."""

    request_id: int
    coordinator: str  # that admitted the request
    admission: int  # as in the target's Admit
    base: int
    tokens: list[int]
    draft_length: int  # useful length of the next draft; 0: no draft would pay, so the drafter may rest
    rejected_at: int  # length of the text when a draft token was last rejected


class Offer(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Draft tokens from absolute position `base` on. The target checks them before use.

    Without `parents` they are a chain: tokens[j] follows tokens[j - 1]. With `parents` they are a tree, parents first:
    tokens[j] follows tokens[parents[j]], or the text if parents[j] is -1.
    """

    request_id: int
    base: int
    tokens: list[int]
    parents: list[int] | None = None
    probabilities: list[float] | None = None  # that the target accepts each token, given its parents
    distributions: list[Distribution | None] | None = None  # that each token was drawn from, for rejection sampling
    coordinator: str = ""  # that admitted the request

    def all_tokens(self) -> list[int]:
        """Return the draft tokens, and those of all distributions."""
        if self.distributions is None:
            return self.tokens
        drawn_from = filter(None, self.distributions)
        return [*self.tokens, *[token for distribution in drawn_from for token in distribution.tokens]]


class Commit(msgspec.Struct, frozen=True, tag=True, gc=False, omit_defaults=True):
    """Tokens that one target step added to the text, from absolute position `base` on."""

    request_id: int
    base: int
    tokens: list[Token]
    finish: FinishReason | None = None
    drafted: int = 0  # number of draft tokens verified in this step
    drafted_by: dict[str, int] = {}  # of these, how many each proposer offered first
    hit: bool = False  # if the last token was recovered: whether a draft already followed it
    admission: int = 0  # as in Admit
    preemptions: int = 0  # of the row since the previous Commit
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt from its second token on, in the first Commit
    members: list[MemberShare] | None = None  # of an ensemble
    cached_tokens: int = 0  # in the first Commit: prompt tokens whose KV pages were already cached


class PromptAttention(msgspec.Struct, frozen=True, tag=True):
    """How much the answer attends to each token of the prompt, if requested. Sent before the last Commit."""

    request_id: int
    weights: list[float]
    admission: int = 0  # as in Admit


class Beams(msgspec.Struct, frozen=True, tag=True):
    """The result of a beam search. None of it was committed before."""

    request_id: int
    answers: list[Hypothesis]  # best first; fewer than requested if no more contain the forced words
    steps: int  # of the target, the last prefill step included
    logprobs: list[list[TokenLogprobs]] | None = None  # of each answer's tokens, if requested
    admission: int = 0  # as in Admit
    cached_tokens: int = 0  # as in Commit
    preemptions: int = 0  # of the row


class MemberLost(msgspec.Struct, frozen=True, tag=True):
    """Tells a leader that the replica of a member is gone."""

    request_id: int
    replica: str


class LeaderLost(msgspec.Struct, frozen=True, tag=True):
    """Tells a member that a request has left its leader, which may be dead."""

    request_id: int
    leader: str  # the replica
    admission: int  # as in the leader's Admit; later admissions of the request stay valid


class Join(msgspec.Struct, frozen=True, tag=True):
    """Become a member of an ensemble: prefill the text, then send Joined."""

    request_id: int
    tokens: list[int]
    leader: str  # the name of its model, for members with another tokenizer
    prompt_length: int
    best_count: int = 0  # number of most probable tokens to name in each reply
    shared: SharedOffer | None = None  # memory for replies from the same node
    admission: int = 0  # as in the leader's Admit
    cache_salt: str = ""  # as in the leader's Admit
    arrived_at_s: float = 0.0  # as in the leader's Admit
    invitation: int = 0  # repeated in all answers; a leader that lost its slot invites again, with the next number


class Joined(msgspec.Struct, frozen=True, tag=True):
    """Tells the leader that the member is ready for a LogitsRequest."""

    request_id: int
    admission: int = 0  # as in Join
    max_length: int = 0  # text and draft must be shorter, in the leader's tokens; 0: the limit depends on the text
    invitation: int = 0  # as in Join; 0: from a member of a version without invitations


@dataclass(frozen=True, slots=True)
class LogitsTransport:
    """Precision at which logits are sent.

    float32 is exact. 16 bits halve the traffic. The relative error of a logit is then up to 2^-9 (bfloat16) or 2^-12
    (float16, whose range ends at 65504). With `top_k` only the largest logits are sent; all other tokens get
    probability 0, as in top-k sampling.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    top_k: int = 0  # 0: all


class PackedLogits(msgspec.Struct, frozen=True):
    """[N, V] logits, or the k largest at each of N positions."""

    positions: int
    vocab_size: int
    dtype: str
    values: bytes
    tokens: bytes | None = None  # int32, with top-k
    shared: bool = False  # the values are in the memory that the leader shares with the member


class LogitsRequest(msgspec.Struct, frozen=True, tag=True):
    """A request for logits after the text and after each of K draft tokens."""

    request_id: int
    step: int  # repeated in the reply
    base: int  # absolute position of the first token of `text`
    text: list[int]  # tokens committed since the last request
    tokens: list[int]  # [K] draft
    parents: list[int]  # [K] as in Offer
    transport: LogitsTransport
    admission: int = 0  # as in Join
    invitation: int = 0  # as in Join


class LogitsReply(msgspec.Struct, frozen=True, tag=True):
    """A member's logits, [K + 1, V]."""

    request_id: int
    step: int
    logits: PackedLogits  # over the leader's vocabulary; all −∞ where the member abstains
    best: list[list[int]]  # [K + 1] its most probable tokens, in the leader's vocabulary; `best_count` each
    admission: int = 0  # as in Join
    invitation: int = 0  # as in Joined


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Reports that the replica can't go on with a request."""

    request_id: int
    error: str
    field: str | None = None  # of the request, if it is invalid
    admission: int = 0  # as in Admit or Join
    invitation: int = 0  # of a member: as in Joined


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """A coordinator's sign of life. Replicas forget the requests of a silent coordinator."""


class AdaptationState(msgspec.Struct, frozen=True):
    """What online adaptation has done for a drafter. Acceptance is measured on recent texts that were held out."""

    updates: int = 0  # weights published since the start
    texts: int = 0  # in the last measurement of acceptance
    acceptance_before: float | None = None  # share of their tokens that the original weights would have drafted
    acceptance_after: float | None = None  # share that the present weights would have drafted


class WeightsState(msgspec.Struct, frozen=True):
    """The weights of a replica."""

    present: Weights = Weights()
    unfit: str = ""  # the version that could not be loaded last
    error: str = ""  # why; without `unfit`: why the replica can't sleep
    asleep: bool = False
    rest: int = 0  # the greatest of SetWeights


class Report(msgspec.Struct, frozen=True, tag=True):
    """A sign of life of a replica's loop, with its load. Sent to every peer once a second."""

    active: int  # requests that hold a slot, or whose grammar or adapter is being made ready
    waiting: int  # requests that wait for a slot or for KV pages
    slots: int
    request_ids: list[int]  # the receiver's requests among them; waiting ones last
    drafting: bool = True  # of a target: whether it wants drafts; False while plain decoding is faster
    attached_drafters: dict[int, str] = {}  # of a target: drafters by the receiver's requests
    speculation_gain: float = 1.0  # of a target: speed relative to plain decoding, measured in trials; 1: unknown
    pages: int = 0  # of the KV cache
    used_pages: int = 0  # that requests hold
    shared_pages: int = 0  # that more than one holds
    adaptation: AdaptationState | None = None  # of a drafter that adapts
    own_waiting: int = 0  # how many of `request_ids` wait
    corpus_tokens: int = 0  # of a target
    corpus_bytes: int = 0  # of memory for them
    proposer_shares: dict[str, float] = {}  # of a target: of its time with requests, what each proposer took
    weights: WeightsState = WeightsState()

    @property
    def capacity(self) -> int:
        """How many requests can run at once: one per slot, or only the active ones while others wait."""
        return self.active if self.waiting and self.active else self.slots


Message = (
    Admit
    | Cancel
    | SetWeights
    | Remember
    | AttachDrafter
    | Offer
    | Advance
    | ResendRequest
    | Commit
    | PromptAttention
    | Beams
    | MemberLost
    | LeaderLost
    | Join
    | Joined
    | LogitsRequest
    | LogitsReply
    | Failed
    | Heartbeat
    | Report
)
