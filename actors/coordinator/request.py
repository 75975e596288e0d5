"""A request at its coordinator: parameters, committed tokens, deltas for the client. Knows nothing of links."""

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import starmap
from typing import Literal

from actors.coordinator.prefix_table import Prefix, prefixes_of
from actors.coordinator.text_stream import Criterion, TextStream
from actors.coordinator.timeline import Timeline
from actors.heads.spec import HeadsKind
from actors.wire.addresses import ReplicaAddress
from actors.wire.messages import Adapter, Admit, Beams, Commit, Ensemble, Member, MemberShare, MemberView
from decoding.beams.group import Hypothesis
from decoding.beams.options import BeamOptions
from decoding.blending.ensemble_options import EnsembleOptions
from decoding.drafts.ngram import NgramOptions
from decoding.drafts.trie import ProposerName
from decoding.errors import ConsortError, InvalidRequestError, require
from decoding.prompt_positions import PromptPositions
from decoding.sampling.logprobs import TokenLogprobs
from decoding.sampling.params import SamplingParams
from decoding.sampling.stopping import FinishReason

# accepted: a draft token; recovered: replaces a rejected draft token; bonus: follows a fully accepted draft;
# plain: from a step without a draft.
TokenSource = Literal["accepted", "recovered", "bonus", "plain"]

_MAX_DRAFTERS_LOST = 3  # before the request goes on without a drafter


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

    @property
    def proposers(self) -> tuple[ProposerName, ...]:
        """All that draft for its requests."""
        has: dict[ProposerName, bool] = {"drafter": self.drafter is not None, "ngram": self.ngram is not None}
        names = [name for name, is_there in has.items() if is_there]
        return (*names, self.heads) if self.heads else tuple(names)


def new_request_id() -> int:
    """Return a random 63-bit id."""
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request, with the prompt as token ids."""

    endpoint: Endpoint
    prompt: Sequence[int]
    params: SamplingParams
    speculate: bool = True
    proposers: frozenset[ProposerName] | None = None  # that may draft; None: all of the endpoint's
    draft_length: int | None = None  # None: the endpoint's
    ensemble: EnsembleOptions | None = None  # None: the endpoint's
    seeded: bool = False  # whether the client chose the seed, so that an equal request may get the same answer
    timeout_s: float | None = None  # from submission; after that the request fails
    beams: BeamOptions | None = None  # run a beam search
    timeline: Timeline | None = None  # filled in by the coordinator
    cache_salt: str = ""  # cached text is shared only with requests of the same salt
    may_cache: bool = True  # whether its whole answer may be cached
    prompt_positions: PromptPositions | None = None  # of a shortened prompt; None: the prompt is whole
    request_id: int = field(default_factory=new_request_id)

    def __post_init__(self) -> None:
        if self.prompt_positions is not None:
            count = len(self.prompt_positions.kept)
            require(count == len(self.prompt), "positions", count, f"one for each of {len(self.prompt)} tokens")
            alone = self.beams is None and not self.endpoint.members
            require(alone, "positions", "a shortened prompt", "a whole one for beam searches and ensembles")

    @property
    def ensemble_options(self) -> EnsembleOptions:
        """Options of the ensemble: the request's own, or the endpoint's."""
        return self.ensemble or self.endpoint.ensemble

    @property
    def max_draft_length(self) -> int:
        """Maximum number of draft tokens per target step; 0 without speculation."""
        length = self.endpoint.draft_length if self.draft_length is None else self.draft_length
        return length if self.speculate and self.beams is None else 0

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
    tokens: Sequence[int]
    statistics: Statistics  # of the request so far
    sources: Sequence[TokenSource] = ()  # of each token
    logprobs: Sequence[TokenLogprobs] | None = None  # of each token, if requested
    prompt_logprobs: Sequence[TokenLogprobs] | None = None  # of the prompt from its second token on, in the first delta
    finish: FinishReason | None = None
    members: Sequence[MemberShare] | None = None  # of an ensemble, so far
    stop_reason: str | int | None = None  # the stop string, stop token or criterion that ended the answer
    views: Sequence[Sequence[MemberView]] | None = None  # of an ensemble: of each token, if requested
    error: ConsortError | None = None
    score: float | None = None  # of a beam search
    proposers: Sequence[ProposerName | None] = ()  # of each token: who drafted it, if it was accepted
    prompt_attention: Sequence[float] | None = None  # to each token of the prompt, if requested, in the last delta
    others: "Sequence[Delta]" = ()  # further answers of the beam search, best first


class ActiveRequest:
    """A request in progress: its committed tokens, its replicas, and its text."""

    def __init__(self, request: Request, sink: Callable[[Delta], None], now_s: float) -> None:
        self.request = request
        self.sink = sink
        self.tokens = list(request.prompt)
        self.statistics = Statistics()
        self._target: str | None = None
        self._drafter: str | None = None
        self.members: list[Member] = []
        self.targets_lost = self.drafters_lost = 0
        self.admission = 0  # number of times it was released from its target
        self.began_s = self.unassigned_since_s = now_s

    @cached_property
    def prefixes(self) -> Sequence[Prefix]:
        """Prefixes of the prompt, by which it is led to replicas that have read them."""
        adapter = self.request.endpoint.adapter
        version = "" if adapter is None else f"adapter {adapter.version} "  # as in the replicas' rows
        return prefixes_of(self.request.prompt, version + self.request.cache_salt)

    @cached_property
    def _text_stream(self) -> TextStream:
        return self._make_text_stream()

    def _make_text_stream(self) -> TextStream:
        request = self.request
        return TextStream(request.endpoint.decode, request.prompt, request.params, request.endpoint.criteria)

    def decode_prompt(self) -> None:
        """Decode the end of the prompt, on which the answer's text depends. Raises what the tokenizer raises."""
        _ = self._text_stream

    @property
    def target(self) -> str | None:
        """Name of its target replica."""
        return self._target

    @target.setter
    def target(self, replica: str | None) -> None:
        self._target = replica
        if self.request.timeline is not None:
            self.request.timeline.move("target", replica)

    @property
    def drafter(self) -> str | None:
        """Name of its drafter replica, unless colocated."""
        return self._drafter

    @drafter.setter
    def drafter(self, replica: str | None) -> None:
        self._drafter = replica
        if self.request.timeline is not None:
            self.request.timeline.move("drafter", replica)

    @property
    def wants_drafter(self) -> bool:
        """Whether it should have a drafter replica."""
        endpoint = self.request.endpoint
        disaggregated = endpoint.drafter not in (None, endpoint.target) and not endpoint.colocated
        speculates = disaggregated and self.request.max_draft_length > 0 and self.request.may_draft("drafter")
        return speculates and self.drafters_lost <= _MAX_DRAFTERS_LOST

    def admit(self, target: ReplicaAddress) -> Admit:
        """Make the message by which a replica continues the request from its committed tokens."""
        request = self.request
        max_draft_length = request.max_draft_length
        colocated = request.endpoint.colocated and request.may_draft("drafter")
        has_drafter = self.drafter is not None or (colocated and max_draft_length > 0)
        ngram = request.endpoint.ngram if request.may_draft("ngram") else None
        heads = request.may_draft(request.endpoint.heads)
        may_speculate = has_drafter or self.wants_drafter or ngram or heads
        return Admit(
            request_id=request.request_id,
            tokens=self.tokens.copy(),  # a copy: this list grows, and local links pass objects on
            prompt_length=len(request.prompt),
            params=request.params,
            draft_length=max_draft_length if may_speculate else 0,
            drafter=has_drafter,
            ngram=ngram,
            heads=heads,
            beams=request.beams,
            ensemble=self._ensemble(),
            target=target,
            attached_drafter=self.drafter,
            admission=self.admission,
            cache_salt=request.cache_salt,
            prompt_positions=request.prompt_positions,
            adapter=request.endpoint.adapter,
        )

    def _ensemble(self) -> Ensemble | None:
        if not self.request.endpoint.members:
            return None
        return Ensemble(self.request.endpoint.target, self.members, self.request.ensemble_options)

    def has_member(self, replica: str) -> bool:
        """Whether the replica is a member of the request's ensemble."""
        return any(member.address is not None and member.address.name == replica for member in self.members)

    def has_timed_out(self, now_s: float) -> bool:
        """Whether the request has exceeded `timeout_s` and must fail."""
        return self.request.timeout_s is not None and now_s - self.began_s > self.request.timeout_s

    def has_reached_max_time(self, now_s: float) -> bool:
        """Whether the answer has reached `max_time_s` and must end as it is."""
        limit_s = self.request.params.max_time_s
        return limit_s is not None and now_s - self.began_s > limit_s

    def commit(self, message: Commit) -> Delta:
        """Append the tokens of a target step. The answer may end before the last of them."""
        piece = self._text_stream.add(message.tokens, message.finish)
        tokens = message.tokens[: piece.used]
        self.tokens.extend(tokens)
        if self.request.timeline is not None:
            self.request.timeline.record_tokens("target", piece.used)
            if self.drafter is not None and message.drafted:
                self.request.timeline.record_tokens("drafter", message.drafted)
        accepted = min(message.accepted, piece.used)
        before = self.statistics
        self.statistics = Statistics(
            steps=before.steps + 1,
            drafted=before.drafted + message.drafted,
            accepted=before.accepted + accepted,
            committed=before.committed + piece.used,
            missed=before.missed + message.rejected,
            hits=before.hits + message.hit,
            drafted_by=_added(before.drafted_by, message.drafted_by),
            accepted_by=_added(before.accepted_by, Counter(message.accepted_from[:accepted])),
            cached=before.cached + message.cached_tokens,
        )
        own: TokenSource = "recovered" if message.rejected else "bonus" if message.drafted else "plain"
        sources: list[TokenSource] = ["accepted"] * accepted
        return Delta(
            piece.text,
            tokens,
            self.statistics,
            sources + [own] * (piece.used - accepted),
            message.logprobs and message.logprobs[: piece.used],
            message.prompt_logprobs if len(self.tokens) - len(tokens) == len(self.request.prompt) else None,
            piece.finish,
            message.members,
            piece.stop_reason,
            message.views and message.views[: piece.used],
            proposers=[
                *message.accepted_from[:accepted],
                *[None] * (piece.used - len(message.accepted_from[:accepted])),
            ],
            prompt_attention=message.prompt_attention,
        )

    def finish_search(self, message: Beams) -> Delta:
        """Make the only delta of a beam search, from its answers.

        Raises:
            InvalidRequestError: there are fewer answers than requested.
        """
        wanted = self.request.beams.num_return_sequences if self.request.beams else 0
        if len(message.answers) < wanted:
            field = "force_words" if self.request.beams and self.request.beams.force_words_ids else "n"
            reason = f"the search found {len(message.answers)} answers that the parameters allow, not {wanted}"
            raise InvalidRequestError(f"{field}: {reason}; more beams may find them.", field=field)
        logprobs: Sequence[list[TokenLogprobs] | None] = message.logprobs or [None] * len(message.answers)
        make_delta = partial(self._make_search_delta, message.cached_tokens)
        best, *others = starmap(make_delta, zip(message.answers, logprobs, strict=True))
        if self.request.timeline is not None:
            self.request.timeline.record_tokens("target", len(best.tokens))
        self.statistics = Statistics(steps=message.steps, committed=len(best.tokens), cached=message.cached_tokens)
        return replace(best, statistics=self.statistics, others=others)

    def _make_search_delta(self, cached: int, hypothesis: Hypothesis, logprobs: list[TokenLogprobs] | None) -> Delta:
        piece = self._make_text_stream().add(hypothesis.tokens, hypothesis.finish)
        return Delta(
            piece.text,
            hypothesis.tokens[: piece.used],
            Statistics(committed=piece.used, cached=cached),
            ["plain"] * piece.used,
            logprobs and logprobs[: piece.used],
            finish=piece.finish,
            stop_reason=piece.stop_reason,
            score=hypothesis.score,
        )

    def end_now(self) -> Delta:
        """Make the last delta of an answer that has reached `max_time_s`."""
        text = self._text_stream.flush()
        return Delta(text, (), self.statistics, finish="length", stop_reason="max_time")
