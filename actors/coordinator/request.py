"""A client's request, its timeline, and the deltas of its answer."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from actors.wire.messages import Adapter, MemberShare, Token
from decoding.beams.options import BeamOptions
from decoding.blending.params import EnsembleOptions
from decoding.drafts.draft import LONGEST_DRAFT, ProposerName
from decoding.drafts.options import NgramOptions
from decoding.errors import ConsortError, require
from decoding.prompt_positions import PromptPositions
from decoding.sampling.logprobs import TokenLogprobs
from decoding.sampling.params import SamplingParams
from decoding.sampling.stopping import FinishReason
from engine.heads.spec import HeadsKind

# Whether an answer should end, given its tokens and text so far. Like transformers' `StoppingCriteria`.
Criterion = Callable[[Sequence[int], str], bool]
Role = Literal["target", "drafter"]


@dataclass(slots=True)
class Stay:
    """A request's time on one replica."""

    role: Role
    replica: str
    began_ns: int
    first_ns: int | None = None  # when its first tokens were committed (target) or verified (drafter)
    last_ns: int | None = None  # likewise, the last tokens so far
    ended_ns: int | None = None
    messages: int = 0  # number of target steps; for a drafter, of those with drafts
    tokens: int = 0  # number committed (target) or verified (drafter)


@dataclass(slots=True)
class Timeline:
    """Which replicas worked on one request, and when, in nanoseconds since 1970. Read it when the request has ended."""

    received_ns: int = field(default_factory=time.time_ns)
    admitted_ns: int | None = None  # when it left the queue
    stays: list[Stay] = field(default_factory=list)

    def move(self, role: Role, replica: str | None) -> None:
        """Record that another replica, or none, works on the request from now on."""
        now_ns = time.time_ns()
        for stay in self.stays:
            if stay.role == role and stay.ended_ns is None:
                stay.ended_ns = now_ns
        if replica is not None:
            self.stays.append(Stay(role, replica, now_ns))

    def record_tokens(self, role: Role, count: int) -> None:
        """Record one step that committed (target) or verified (drafter) `count` tokens of the current replica."""
        stay = next((stay for stay in reversed(self.stays) if stay.role == role), None)
        if stay is None:
            return
        stay.last_ns = time.time_ns()
        stay.first_ns = stay.first_ns or stay.last_ns
        stay.messages += 1
        stay.tokens += count


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A name that clients ask for and the models behind it."""

    name: str
    target: str
    drafter: str | None
    draft_length: int  # γ, the maximum number of draft tokens per target step
    decode: Callable[[list[int]], str]  # by the target's tokenizer, without special tokens
    ngram: NgramOptions | None = None  # n-gram look-up of drafts; None: off
    heads: HeadsKind | None = None  # heads that draft in the target's replicas; None: there are none
    members: Sequence[str] = ()  # the other models of an ensemble that the target leads
    ensemble: EnsembleOptions = field(default_factory=EnsembleOptions)  # how distributions are blended
    criteria: Sequence[Criterion] = ()
    colocated: bool = False  # the drafter runs in the target's replicas and has none of its own
    adapter: Adapter | None = None  # LoRA weights that the target applies
    corpus: bool = False  # whether the target's replicas copy drafts from earlier texts

    @property
    def proposers(self) -> tuple[ProposerName, ...]:
        has: dict[ProposerName, bool] = {
            "drafter": self.drafter is not None,
            "ngram": self.ngram is not None,
            "corpus": self.corpus,
        }
        names = [name for name, is_there in has.items() if is_there]
        return (*names, self.heads) if self.heads else tuple(names)


def new_request_id() -> int:
    """Return a 63-bit id, greater than those of earlier seconds until the clock's 20 bits repeat, after 13 days."""
    return (time.time_ns() >> 30) % 2**20 << 43 | secrets.randbits(43)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """What is blended with the target's distribution after the request's text."""

    name: str  # in answers and errors; of another model: its name
    is_own: bool = False  # whether the target's own model reads it, in the same forwards
    prompt: tuple[int, ...] | None = None  # in the target's tokens, before the same answer; None: the request's
    layers: tuple[int, ...] = ()  # after which the target's model predicts; of several, the most different one


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request, with the prompt as token ids.

    Raises InvalidRequestError if fields don't go together; the error names one.
    """

    endpoint: Endpoint
    prompt: Sequence[int]
    params: SamplingParams
    speculate: bool = True
    proposers: frozenset[ProposerName] | None = None  # that may draft; None: all of the endpoint's
    prediction: Sequence[int] = ()  # of the answer, in the target's tokens, to draft from
    draft_length: int | None = None  # None: the endpoint's
    ensemble: EnsembleOptions | None = None  # None: the endpoint's
    terms: Sequence[Term] | None = None  # of a formula, beside its own text; None: the endpoint's members
    seeded: bool = False  # whether the client chose the seed, so that an equal request may get the same answer
    timeout_s: float | None = None  # from submission; after that the request fails
    beams: BeamOptions | None = None  # run a beam search
    timeline: Timeline | None = None  # filled in by the coordinator
    cache_salt: str = ""  # cached text is shared only with requests of the same salt
    streamed: bool = True  # whether what is committed may have been seen, so that it can't be computed anew
    may_cache: bool = True  # whether its whole answer may be cached
    prompt_positions: PromptPositions | None = None  # of a shortened prompt; None: the prompt is whole
    prompt_attention: list[float] = field(default_factory=list)  # filled in by the coordinator, if `params` want it
    request_id: int = field(default_factory=new_request_id)
    arrived_at_s: float = field(default_factory=time.time)  # older requests come first, whatever coordinator has them

    def __post_init__(self) -> None:
        if self.beams is not None:  # its answers come at its end, and nothing of them before
            for field_name, value in (
                ("max_time", self.params.max_time_s),
                ("prompt_logprobs", self.params.prompt_logprobs),
            ):
                require(value is None, field_name, value, "absent from a beam search")
            require(not self.members, "use_beam_search", "a beam search", "absent from ensembles and formulas")
        if self.prompt_positions is not None:
            count = len(self.prompt_positions.kept)
            require(count == len(self.prompt), "positions", count, f"one for each of {len(self.prompt)} tokens")
            alone = self.beams is None and not self.members
            require(alone, "positions", "a shortened prompt", "a whole one for beam searches, ensembles and formulas")

    @property
    def members(self) -> Sequence[Term]:
        """What is blended with the target's distribution of the request's own text."""
        return [Term(name=model) for model in self.endpoint.members] if self.terms is None else self.terms

    @property
    def ensemble_options(self) -> EnsembleOptions:
        return self.ensemble or self.endpoint.ensemble

    @property
    def max_draft_length(self) -> int:
        """Maximum number of draft tokens per target step; 0 without speculation."""
        length = self.endpoint.draft_length if self.draft_length is None else self.draft_length
        return length if self.speculate and self.beams is None else 0

    @property
    def longest_draft(self) -> int:
        """Maximum number of draft tokens per target step where they are copied from a text."""
        length = self.max_draft_length
        return max(length, LONGEST_DRAFT) if length and self.draft_length is None else length

    def may_draft(self, proposer: ProposerName | None) -> bool:
        """Whether a proposer of the endpoint may draft for the request."""
        return proposer is not None and (self.proposers is None or proposer in self.proposers)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of speculation for a request so far, or for many requests."""

    steps: int = 0  # target steps, prefill included
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    missed: int = 0  # target steps that rejected a draft token
    hits: int = 0  # of these, those with a draft ready that continues the recovered token
    drafted_by: Mapping[str, int] = field(default_factory=dict)  # `drafted` by proposer
    accepted_by: Mapping[str, int] = field(default_factory=dict)  # `accepted` by proposer
    cached: int = 0  # tokens of the prompt whose KV pages were there already
    preemptions: int = 0  # how often others needed its KV pages

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(
            steps=self.steps + other.steps,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            committed=self.committed + other.committed,
            missed=self.missed + other.missed,
            hits=self.hits + other.hits,
            drafted_by=_added(self.drafted_by, other.drafted_by),
            accepted_by=_added(self.accepted_by, other.accepted_by),
            cached=self.cached + other.cached,
            preemptions=self.preemptions + other.preemptions,
        )

    @property
    def acceptance_rate(self) -> float:
        """α: accepted / drafted, 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def hit_rate(self) -> float:
        """hits / missed, 0 if nothing was rejected."""
        return self.hits / self.missed if self.missed else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per target step, the recovered or bonus token included."""
        return self.committed / self.steps if self.steps else 0.0


def _added(left: Mapping[str, int], right: Mapping[str, int]) -> Mapping[str, int]:
    """Return the sums of two counts by name. Most steps have no draft to count."""
    if not right or not left:
        return left or right
    return {name: left.get(name, 0) + right.get(name, 0) for name in sorted({*left, *right})}


@dataclass(frozen=True, slots=True)
class Delta:
    """What one target step added to the answer. The last delta has `finish` or `error`."""

    text: str
    tokens: Sequence[Token]
    statistics: Statistics  # of the request so far
    prompt_logprobs: Sequence[TokenLogprobs] | None = None  # of the prompt from its second token on, in the first delta
    finish: FinishReason | None = None
    members: Sequence[MemberShare] | None = None  # of an ensemble, so far
    stop_reason: str | int | None = None  # the stop string, stop token or criterion that ended the answer
    error: ConsortError | None = None
    score: float | None = None  # of a beam search
    restarts: bool = False  # whether it takes back all deltas before it, for the text is computed anew
    weights: str | None = None  # version that the target runs with; None: it is always the same
    others: "Sequence[Delta]" = ()  # further answers of the beam search, best first

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of the tokens; none if they were not requested."""
        return [token.logprobs for token in self.tokens if token.logprobs is not None]
