"""A request in progress at its coordinator: committed tokens, replicas, text, and where stop strings end it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import NamedTuple

from actors.coordinator.replica_table import Prefix, prefixes_of
from actors.coordinator.request import Criterion, Delta, Request, Statistics, Timeline
from actors.wire.messages import Admit, Beams, Commit, Ensemble, Member, ReplicaAddress, Token, Weights
from decoding.beams.hypothesis import Hypothesis
from decoding.errors import InvalidRequestError
from decoding.sampling.logprobs import TokenLogprobs
from decoding.sampling.params import SamplingParams
from decoding.sampling.stopping import FinishReason, StopStrings
from decoding.tokenizers.detokenizer import Detokenizer

_MAX_DRAFTERS_LOST = 3  # before the request goes on without a drafter


class Piece(NamedTuple):
    """Text that some tokens add to an answer."""

    text: str
    used: int  # number of the tokens that belong to the answer
    finish: FinishReason | None
    stop_reason: str | int | None  # the stop string, stop token or criterion that ended it


class TextStream:
    """Incremental text of one answer."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt: Sequence[int],
        params: SamplingParams,
        criteria: Sequence[Criterion] = (),
    ) -> None:
        """decode: token ids to text. prompt: its end affects how the first tokens are decoded."""
        self._params, self._hidden = params, params.hidden_token_ids
        self._criteria = criteria
        self._detokenizer = Detokenizer(decode, prompt=prompt)
        self._stop_strings = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._tokens: list[int] = []
        self._text = ""  # the whole text, kept only for criteria

    def add(self, tokens: Sequence[int], finish: FinishReason | None) -> Piece:
        """Add the next tokens. finish: why the answer ends after them, if it does."""
        text, used = "", 0
        for chunk in self._chunks(tokens):
            used += len(chunk)
            self._tokens.extend(chunk)
            added, stop_reason = self._decode(chunk)
            text += added
            stop_reason = stop_reason or self._check_criteria(added)
            if stop_reason is not None:
                return Piece(text, used, "stop", stop_reason)
        if finish is None:
            return Piece(text, len(tokens), None, None)
        rest, stop_reason = self._stop_strings.add(self._detokenizer.flush(), may_end=self._has_min_tokens)
        text += rest
        if stop_reason is not None:
            return Piece(text, len(tokens), "stop", stop_reason)
        stop_token = tokens[-1] if finish == "stop" and tokens[-1] in self._params.stop_token_ids else None
        return Piece(text + self._stop_strings.flush(), len(tokens), finish, stop_token)

    def flush(self) -> str:
        text, _ = self._stop_strings.add(self._detokenizer.flush())
        return text + self._stop_strings.flush()

    def _chunks(self, tokens: Sequence[int]) -> Iterable[Sequence[int]]:
        """Split tokens into single ones if the answer may end at any of them."""
        by_token = self._params.stop or self._criteria
        return ([token] for token in tokens) if by_token else [tokens]

    def _decode(self, tokens: Sequence[int]) -> tuple[str, str | None]:
        """Return the text that is now certain, and the stop string that it completes, if any."""
        visible = [token for token in tokens if token not in self._hidden]  # stop tokens are not part of the text
        if not visible:
            return "", None
        # A stop string counts if it ends after min_tokens, as in vLLM.
        return self._stop_strings.add(self._detokenizer.add(visible), may_end=self._has_min_tokens)

    @property
    def _has_min_tokens(self) -> bool:
        return len(self._tokens) >= self._params.min_tokens

    def _check_criteria(self, text: str) -> str | None:
        if not self._criteria:
            return None
        self._text += text
        for criterion in self._criteria:
            if criterion(self._tokens, self._text):
                return getattr(criterion, "__name__", type(criterion).__name__)
        return None


class ActiveRequest:
    """A request in progress: its committed tokens, its replicas, and its text."""

    def __init__(
        self, request: Request, sink: Callable[[Delta], None], now_s: float, weights: Weights | None = None
    ) -> None:
        """weights: that the target is to run with; None: it has no others."""
        self.request = request
        self.weights = weights
        self.sink = sink
        self._timeline = request.timeline or Timeline()
        self.tokens = list(request.prompt)
        self.statistics = Statistics()
        self._target: str | None = None
        self._drafter: str | None = None
        self.members: list[Member] = []
        self.targets_lost = self.drafters_lost = 0
        self.admission = 0  # number of times it was released from its target
        self.began_s = self.unassigned_since_s = now_s

    def restart(self, weights: Weights | None) -> Delta | None:
        """Begin the text anew with other weights. Return what takes back the deltas so far, if there are any."""
        self.weights = weights
        for name in ("prefixes", "_text_stream"):
            self.__dict__.pop(name, None)
        if self.statistics == Statistics():
            return None
        self.tokens, self.statistics = list(self.request.prompt), Statistics()
        return Delta("", (), self.statistics, restarts=True)

    def needs(self, version: str) -> bool:
        """Whether the target must run with this version of its weights."""
        return self.weights is not None and self.weights.version == version

    @property
    def salt(self) -> str:
        """Only texts with the same salt share pages, states and a corpus: those of the same weights and client."""
        weights = self.weights or Weights()
        return ("" if weights == Weights() else f"weights {weights.version} ") + self.request.cache_salt

    @cached_property
    def prefixes(self) -> Sequence[Prefix]:
        adapter = self.request.endpoint.adapter
        version = "" if adapter is None else f"adapter {adapter.version} "  # as in the replicas' rows
        return prefixes_of(self.request.prompt, version + self.salt)

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
        return self._target

    @target.setter
    def target(self, replica: str | None) -> None:
        self._target = replica
        self._timeline.move("target", replica)

    @property
    def drafter(self) -> str | None:
        return self._drafter

    @drafter.setter
    def drafter(self, replica: str | None) -> None:
        self._drafter = replica
        self._timeline.move("drafter", replica)

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
        ensemble = Ensemble(request.endpoint.target, self.members, request.ensemble_options)
        colocated = request.endpoint.colocated and request.may_draft("drafter")
        has_drafter = self.drafter is not None or (colocated and max_draft_length > 0)
        ngram = request.endpoint.ngram if request.may_draft("ngram") else None
        heads = request.may_draft(request.endpoint.heads)
        # Under rejection sampling the noise that judges drafts may be that which wrote the prediction.
        prediction = () if request.params.rejects and request.seeded else request.prediction
        corpus = request.endpoint.corpus and request.may_draft("corpus")
        may_speculate = has_drafter or self.wants_drafter or ngram or heads or prediction or corpus
        return Admit(
            request_id=request.request_id,
            tokens=self.tokens.copy(),  # a copy: this list grows, and local links pass objects on
            prompt_length=len(request.prompt),
            params=request.params,
            draft_length=max_draft_length if may_speculate else 0,
            drafter=has_drafter,
            ngram=ngram,
            heads=heads,
            prediction=list(prediction),
            corpus=corpus,
            longest_draft=request.longest_draft if prediction or corpus else 0,
            beams=request.beams,
            ensemble=ensemble if request.members else None,
            target=target,
            attached_drafter=self.drafter,
            admission=self.admission,
            cache_salt=self.salt,
            weights=self.weights or Weights(),
            prompt_positions=request.prompt_positions,
            adapter=request.endpoint.adapter,
            arrived_at_s=request.arrived_at_s,
        )

    def has_member(self, replica: str) -> bool:
        return any(member.address is not None and member.address.name == replica for member in self.members)

    def has_timed_out(self, now_s: float) -> bool:
        return self.request.timeout_s is not None and now_s - self.began_s > self.request.timeout_s

    def has_reached_max_time(self, now_s: float) -> bool:
        """Whether the answer has reached `max_time_s` and must end as it is."""
        limit_s = self.request.params.max_time_s
        return limit_s is not None and now_s - self.began_s > limit_s

    def commit(self, message: Commit) -> Delta:
        """Append the tokens of a target step. The answer may end before the last of them."""
        ids = [token.id for token in message.tokens]
        piece = self._text_stream.add(ids, message.finish)
        self.tokens += ids[: piece.used]
        tokens, members = message.tokens[: piece.used], message.members
        if members and len(tokens) < len(ids):  # a stop string ends the answer before them
            members = [member.without_last(len(ids) - len(tokens)) for member in members]
        self._timeline.record_tokens("target", piece.used)
        if self.drafter is not None and message.drafted:
            self._timeline.record_tokens("drafter", message.drafted)
        self.statistics += Statistics(
            steps=1,
            drafted=message.drafted,
            accepted=sum([token.source == "accepted" for token in tokens]) if message.drafted else 0,
            committed=piece.used,
            missed=message.finish is None and message.tokens[-1].source == "recovered",
            hits=message.finish is None and message.hit,
            drafted_by=message.drafted_by,
            accepted_by=_count_proposed(tokens),
            cached=message.cached_tokens,
            preemptions=message.preemptions,
        )
        return Delta(
            piece.text,
            tokens,
            self.statistics,
            message.prompt_logprobs if len(self.tokens) - len(tokens) == len(self.request.prompt) else None,
            piece.finish,
            members,
            piece.stop_reason,
        )

    def finish_search(self, message: Beams) -> Delta:
        """Make the only delta of a beam search, from its answers.

        Raises InvalidRequestError if there are fewer answers than requested.
        """
        wanted = self.request.beams.num_return_sequences if self.request.beams else 0
        if len(message.answers) < wanted:
            field = "force_words" if self.request.beams and self.request.beams.force_words_ids else "n"
            reason = f"the search found {len(message.answers)} answers that the parameters allow, not {wanted}"
            raise InvalidRequestError(f"{field}: {reason}; more beams may find them.", field=field)
        logprobs: Sequence[Sequence[TokenLogprobs]] = message.logprobs or [()] * len(message.answers)
        make_delta = partial(self._make_search_delta, message.cached_tokens)
        best, *others = map(make_delta, message.answers, logprobs)
        self._timeline.record_tokens("target", len(best.tokens))
        self.statistics = Statistics(
            steps=message.steps,
            committed=len(best.tokens),
            cached=message.cached_tokens,
            preemptions=message.preemptions,
        )
        return replace(best, statistics=self.statistics, others=others)

    def _make_search_delta(self, cached: int, hypothesis: Hypothesis, logprobs: Sequence[TokenLogprobs]) -> Delta:
        piece = self._make_text_stream().add(hypothesis.tokens, hypothesis.finish)
        return Delta(
            piece.text,
            [
                Token(token, logprobs=each)
                for token, each in zip_longest(hypothesis.tokens[: piece.used], logprobs[: piece.used])
            ],
            Statistics(committed=piece.used, cached=cached),
            finish=piece.finish,
            stop_reason=piece.stop_reason,
            score=hypothesis.score,
        )

    def end_now(self) -> Delta:
        text = self._text_stream.flush()
        return Delta(text, (), self.statistics, finish="length", stop_reason="max_time")


def _count_proposed(tokens: Sequence[Token]) -> dict[str, int]:
    """Count accepted tokens by proposer. A Counter takes several times as long."""
    counts: dict[str, int] = {}
    for token in tokens:
        if token.proposer is not None:
            counts[token.proposer] = counts.get(token.proposer, 0) + 1
    return counts
