"""One request as its coordinator sees it: what was asked, what is committed, and the text that goes to the client."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from actors.coordinator.text_stream import Criterion, TextStream
from actors.coordinator.timeline import Timeline
from actors.wire.addresses import ReplicaAddress
from actors.wire.messages import Admit, Beams, Commit, Ensemble, Member, MemberShare, MemberView
from decoding.beams.group import Hypothesis
from decoding.beams.options import BeamOptions
from decoding.blending.ensemble_options import EnsembleOptions
from decoding.drafts.ngram import NgramOptions
from decoding.errors import ConsortError, InvalidRequestError
from decoding.sampling.logprobs import TokenLogprobs
from decoding.sampling.params import SamplingParams
from decoding.sampling.stopping import FinishReason

# accepted: a draft token; recovered: the target's own where the draft differed; bonus: after a fully accepted draft;
# plain: of a step without a draft.
TokenSource = Literal["accepted", "recovered", "bonus", "plain"]

_MAX_DRAFTERS_LOST = 3  # before the request goes on without


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A name that clients ask for, and the models behind it."""

    name: str
    target: str
    drafter: str | None
    draft_length: int  # γ, the most draft tokens that one target step verifies
    decode: Callable[[list[int]], str]  # the target tokenizer's, special tokens skipped
    ngram: NgramOptions | None = None  # look drafts up in the text; None: don't
    members: Sequence[str] = ()  # models of an ensemble that the target leads
    ensemble: EnsembleOptions = field(default_factory=EnsembleOptions)  # how their distributions become one
    criteria: Sequence[Criterion] = ()
    inside: bool = False  # the drafter is inside the target's replicas, and has none of its own


def new_request_id() -> int:
    """A number that no other request has."""
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for, with the prompt as token ids."""

    endpoint: Endpoint
    prompt: Sequence[int]
    params: SamplingParams
    speculate: bool = True
    draft_length: int | None = None  # None: the endpoint's
    ensemble: EnsembleOptions | None = None  # None: the endpoint's
    seeded: bool = False  # the client chose the seed, so the same request may get the same answer
    timeout_s: float | None = None  # from submission on; after that it fails
    beams: BeamOptions | None = None  # search, instead of writing token by token
    timeline: Timeline | None = None  # is written if it is there
    request_id: int = field(default_factory=new_request_id)

    @property
    def ensemble_options(self) -> EnsembleOptions:
        """How the members are blended, if there are any."""
        return self.ensemble or self.endpoint.ensemble

    @property
    def most_drafted(self) -> int:
        """The most draft tokens that one target step may verify."""
        length = self.endpoint.draft_length if self.draft_length is None else self.draft_length
        return length if self.speculate and self.beams is None else 0


@dataclass(frozen=True, slots=True)
class Statistics:
    """How speculation went for a request, so far or in all."""

    steps: int = 0  # target steps, the prefill's included
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    missed: int = 0  # target steps that rejected a draft token and went another way
    hits: int = 0  # of these, those after which a draft of that other way was there already

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(
            steps=self.steps + other.steps,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            committed=self.committed + other.committed,
            missed=self.missed + other.missed,
            hits=self.hits + other.hits,
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


@dataclass(frozen=True, slots=True)
class Delta:
    """What one target step added to the answer. The last one has `finish` or `error`; statistics so far are in each."""

    text: str
    tokens: Sequence[int]
    statistics: Statistics
    sources: Sequence[TokenSource] = ()  # of each token
    logprobs: Sequence[TokenLogprobs] | None = None  # of each token, if asked for
    prompt_logprobs: Sequence[TokenLogprobs] | None = None  # of the prompt's from its second on, in the first delta
    finish: FinishReason | None = None
    members: Sequence[MemberShare] | None = None  # of an ensemble: what each contributed so far
    stop_reason: str | int | None = None  # the stop string, stop token, or name of the rule that ended the answer
    views: Sequence[Sequence[MemberView]] | None = None  # of an ensemble: of each token, if asked for
    error: ConsortError | None = None
    score: float | None = None  # of an answer that was searched for
    others: "Sequence[Delta]" = ()  # the next best answers of the same search


class ActiveRequest:
    """The truth about a request that is being served: committed tokens, where it is placed, what was shown."""

    def __init__(self, request: Request, sink: Callable[[Delta], None], now_s: float) -> None:
        self.request = request
        self.sink = sink
        self.tokens = list(request.prompt)
        self.statistics = Statistics()
        self._target: str | None = None
        self._drafter: str | None = None
        self.members: list[Member] = []
        self.targets_lost = self.drafters_lost = 0
        self.admission = 0  # how often it has left its target
        self.began_s = self.unplaced_since_s = now_s

    @cached_property
    def _answer(self) -> TextStream:
        request = self.request
        return TextStream(request.endpoint.decode, request.prompt, request.params, request.endpoint.criteria)

    def read_prompt(self) -> None:
        """Decode what of the prompt the answer's text depends on; raises what the tokenizer does."""
        _ = self._answer

    @property
    def target(self) -> str | None:
        """The name of the target replica that works on it."""
        return self._target

    @target.setter
    def target(self, replica: str | None) -> None:
        self._target = replica
        if self.request.timeline is not None:
            self.request.timeline.move("target", replica)

    @property
    def drafter(self) -> str | None:
        """The same of the drafter."""
        return self._drafter

    @drafter.setter
    def drafter(self, replica: str | None) -> None:
        self._drafter = replica
        if self.request.timeline is not None:
            self.request.timeline.move("drafter", replica)

    @property
    def wants_drafter(self) -> bool:
        """Whether a replica that drafts should work on it."""
        endpoint = self.request.endpoint
        apart = endpoint.drafter not in (None, endpoint.target) and not endpoint.inside
        drafts = apart and self.request.most_drafted > 0
        return drafts and self.drafters_lost <= _MAX_DRAFTERS_LOST

    def admit(self, target: ReplicaAddress) -> Admit:
        """The message that lets a replica take the request up where it is."""
        request = self.request
        drafted_for = self.drafter is not None or (request.endpoint.inside and request.most_drafted > 0)
        return Admit(
            request_id=request.request_id,
            tokens=self.tokens.copy(),  # this list will grow, and links of one process hand objects on
            prompt_length=len(request.prompt),
            params=request.params,
            draft_length=request.most_drafted if drafted_for or self.wants_drafter or request.endpoint.ngram else 0,
            drafter=drafted_for,
            ngram=request.endpoint.ngram,
            beams=request.beams,
            ensemble=self._ensemble(),
            target=target,
            attached_drafter=self.drafter,
            admission=self.admission,
        )

    def _ensemble(self) -> Ensemble | None:
        if not self.request.endpoint.members:
            return None
        return Ensemble(self.request.endpoint.target, self.members, self.request.ensemble_options)

    def has_member(self, replica: str) -> bool:
        """Whether the replica is a member of the request's ensemble."""
        return any(member.address is not None and member.address.name == replica for member in self.members)

    def is_late(self, now_s: float) -> bool:
        """Whether the request should have ended by now, with an error."""
        return self.request.timeout_s is not None and now_s - self.began_s > self.request.timeout_s

    def is_out_of_time(self, now_s: float) -> bool:
        """Whether its answer should end here, as it is."""
        limit_s = self.request.params.max_time_s
        return limit_s is not None and now_s - self.began_s > limit_s

    def commit(self, message: Commit) -> Delta:
        """Append what a target step committed. The answer may end in the midst of the step's tokens."""
        piece = self._answer.add(message.tokens, message.finish)
        tokens = message.tokens[: piece.used]
        self.tokens.extend(tokens)
        if self.request.timeline is not None:
            self.request.timeline.heard("target", piece.used)
            if self.drafter is not None and message.drafted:
                self.request.timeline.heard("drafter", message.drafted)
        accepted = min(message.accepted, piece.used)
        before = self.statistics
        self.statistics = Statistics(
            steps=before.steps + 1,
            drafted=before.drafted + message.drafted,
            accepted=before.accepted + accepted,
            committed=before.committed + piece.used,
            missed=before.missed + message.rejected,
            hits=before.hits + message.hit,
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
        )

    def found(self, message: Beams) -> Delta:
        """What a search found: whole answers, the best one first.

        Raises:
            InvalidRequestError: there are fewer than were asked for.
        """
        wanted = self.request.beams.num_return_sequences if self.request.beams else 0
        if len(message.answers) < wanted:
            field = "force_words" if self.request.beams and self.request.beams.force_words_ids else "n"
            reason = f"the search found {len(message.answers)} answers that the parameters allow, not {wanted}"
            raise InvalidRequestError(f"{field}: {reason}; more beams may find them.", field=field)
        logprobs: Sequence[list[TokenLogprobs] | None] = message.logprobs or [None] * len(message.answers)
        best, *others = [self._found(*one) for one in zip(message.answers, logprobs, strict=True)]
        if self.request.timeline is not None:
            self.request.timeline.heard("target", len(best.tokens))
        self.statistics = Statistics(steps=message.steps, committed=len(best.tokens))
        return replace(best, statistics=self.statistics, others=others)

    def _found(self, one: Hypothesis, logprobs: list[TokenLogprobs] | None) -> Delta:
        request = self.request
        answer = TextStream(request.endpoint.decode, request.prompt, request.params, request.endpoint.criteria)
        piece = answer.add(one.tokens, one.finish)
        return Delta(
            piece.text,
            one.tokens[: piece.used],
            Statistics(committed=piece.used),
            ["plain"] * piece.used,
            logprobs and logprobs[: piece.used],
            finish=piece.finish,
            stop_reason=piece.stop_reason,
            score=one.score,
        )

    def end_here(self) -> Delta:
        """The end of an answer that has run out of time."""
        text = self._answer.flush()
        return Delta(text, (), self.statistics, finish="length", stop_reason="max_time")
