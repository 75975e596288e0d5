"""A beam search on the target: one row with a slot per beam, each of which grows by one token per step.

The last chunk of the prompt gives the first tokens. The coordinator hears nothing before the search has ended.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from actors.loops.row import ServedRow
from actors.wire.messages import Admit, Beams, Failed
from decoding.beams.options import BeamOptions
from decoding.beams.search import BeamSearch, beam_noise
from decoding.errors import InvalidRequestError, UnavailableError
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.logprobs import TokenLogprobs
from decoding.sampling.sampler import process, token_logprobs
from engine.model.page_tables import PageTables
from engine.model.ragged_batch import RowInput


class BeamRow(ServedRow):
    """`tokens` are the prompt. Beams are never committed, so on another replica the search begins anew."""

    def __init__(self, peer: str, admit: Admit, options: BeamOptions, cache: PageTables) -> None:
        """cache: where the row gets its slots."""
        super().__init__(peer, admit)
        del self.tokens[self.prompt_length :]
        self.slots_needed = options.num_beams
        self._options, self._cache = options, cache
        self._history = History(self.params, self.tokens, self.prompt_length)
        self.error: InvalidRequestError | None = None  # why a beam can't continue in its structure
        self._begin()

    def _begin(self) -> None:
        ends = self.params.end_token_ids
        self.search = BeamSearch(self._options, max_tokens=self.params.max_tokens, end_token_ids=ends)
        self.steps = 0  # of the target, including the last of the prefill
        self._is_taking = False  # true if `take` began but did not end
        self._is_broken = False  # true if there is nothing to choose from
        self._logprobs: dict[tuple[int, ...], list[TokenLogprobs]] = {(): []}  # by answer, if wanted
        self._by_beam = [0] * len(self.search.live)  # [B] the index in `slots` of each beam's slot

    def undo(self) -> None:
        if self._is_taking:
            for slot in self.slots:
                self._cache.clear(slot)
            self.resume(0)

    def resume(self, count: int) -> None:
        super().resume(count)
        self._begin()

    @property
    def due(self) -> bool:
        return self.ready

    @property
    def prefilling(self) -> bool:
        return self.pending > 0

    @property
    def step_tokens(self) -> int:
        return len(self.search.live)

    @property
    def done(self) -> bool:
        return self._is_broken or self.search.done

    def inputs(self, limit: int) -> list[RowInput]:
        """Return a chunk of the prompt; afterwards the last token of each live beam, [B]."""
        if self.prefilling:
            return super().inputs(limit)
        answers = self.search.live
        columns = [self.prompt_length + len(answer) - 1 for answer in answers]
        beams = zip(self._by_beam, columns, answers, strict=True)
        return [RowInput(self.slots[index], column, answer[-1:]) for index, column, answer in beams]

    def take(self, logits: Tensor, rows: range) -> Beams | Failed | None:
        """Advance every beam by one token. Returns the answers, or why there are none, once the search has ended.

        rows: [B] of the logits; first [1] after the prompt, before that none.
        """
        if self.prefilling:
            self.cached = self._chunk.end
            if self.prefilling:
                return None
        self._is_taking = True
        try:
            self._advance(logits[rows.start : rows.stop])
        except UnavailableError as error:
            self._is_broken = True
            return Failed(self.key[1], str(error), None, self.admission)
        self._is_taking = False
        return self._result() if self.done else None

    def _advance(self, logits: Tensor) -> None:
        answers = self.search.live
        log_probs = logits.float().log_softmax(dim=-1).expand(len(answers), -1)
        fork = self.search.advance(self._process(log_probs, answers), self._noise(log_probs))
        if self.params.logprobs is not None:
            self._note_logprobs(log_probs, answers)
        self._fork(fork.parents, self.prompt_length + len(answers[0]))
        self.steps += 1

    def _result(self) -> Beams | Failed:
        answers = self.search.best()
        if self.error is not None and not answers:
            return Failed(self.key[1], str(self.error), self.error.field, self.admission)
        wanted = self.params.logprobs is not None
        logprobs = [self._logprobs[tuple(answer.tokens)] for answer in answers] if wanted else None
        return Beams(self.key[1], answers, self.steps, logprobs, self.admission, self.reused or 0, self.preemptions)

    def _fork(self, parents: Sequence[int], end: int) -> None:
        """Make each beam j a continuation of the former beam parents[j]. end: number of columns that beams have.

        The first child of a beam keeps its slot. Each other child gets a free one, with the same pages.
        """
        by_beam = [self._by_beam[parent] for parent in parents]
        free = [index for index in range(self.slots_needed) if index not in by_beam]
        for index in free:
            self._cache.clear(self.slots[index])
        for beam, source in enumerate(by_beam):
            if source in by_beam[:beam]:
                by_beam[beam] = free.pop()
                self._cache.fork(self.slots[source], self.slots[by_beam[beam]], end)
        self._by_beam = by_beam

    def _process(self, log_probs: Tensor, answers: Sequence[Sequence[int]]) -> Tensor:
        """Apply the processors, [B, V]. All tokens after a beam that can't continue in its structure get −∞."""
        if self.structure is None:
            positions = [Position(self._history, answer) for answer in answers]
            return process(log_probs, SamplingBatch.build(positions, log_probs.shape[-1], log_probs.device))
        masks, errors = self.structure.follow(answers)
        positions = [Position(self._history, answer, mask) for answer, mask in zip(answers, masks, strict=True)]
        processed = process(log_probs, SamplingBatch.build(positions, log_probs.shape[-1], log_probs.device))
        stuck = torch.tensor([error is not None for error in errors], device=log_probs.device)
        self.error = next(filter(None, errors), self.error)
        return processed.masked_fill(stuck[:, None], -math.inf)

    def _note_logprobs(self, log_probs: Tensor, answers: Sequence[Sequence[int]]) -> None:
        """Keep the log-probabilities of every answer that this step made longer. log_probs: [B, V]."""
        length = len(answers[0]) + 1
        finished = [hypothesis.tokens for hypothesis in self.search.finished]
        ended = [answer for answer in finished if len(answer) == length]
        longer = list({tuple(answer): None for answer in (*self.search.live, *ended)})
        beams = {tuple(answer): beam for beam, answer in enumerate(answers)}
        longer_from = [beams[answer[:-1]] for answer in longer]
        parents = torch.tensor(longer_from, dtype=torch.int64, device=log_probs.device)  # there may be none
        tokens = [answer[-1] for answer in longer]
        new_logprobs = token_logprobs(log_probs[parents], tokens, [self.params.logprobs or 0] * len(tokens))
        kept = {tuple(answer): self._logprobs[tuple(answer)] for answer in finished if len(answer) < length}
        for answer, token_logprob in zip(longer, new_logprobs, strict=True):
            kept[answer] = [*self._logprobs[answer[:-1]], token_logprob]
        self._logprobs = kept

    def _noise(self, log_probs: Tensor) -> Tensor | None:
        """Return the noise of beam sampling, [B, V]; None if the search is greedy."""
        if self.params.greedy:
            return None
        beams, vocab_size = log_probs.shape
        position = self.prompt_length + len(self.search.live[0])
        return beam_noise(self.params.seed, position, beams, vocab_size, log_probs.device)
