"""A beam search on the target: one row of its table, as many slots as it may have beams, one token per beam and step.

Its first tokens come with the last chunk of its prompt, and nothing is told before the search is over.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from actors.loops.row_table import Row
from actors.model.forward_input import RowInput
from actors.model.kv_slots import SlotCache
from actors.target.beam_slots import BeamSlots
from actors.wire.messages import Admit, Beams
from decoding.beams.options import BeamOptions
from decoding.beams.search import BeamSearch, beam_noise
from decoding.errors import InvalidRequestError
from decoding.sampling.history import History, Position
from decoding.sampling.logprobs import TokenLogprobs, token_logprobs
from decoding.sampling.sampler import SamplingBatch, process


class BeamRow(Row):
    """`tokens` are the prompt: beams are never committed, so a search that moves to another replica begins anew."""

    def __init__(self, peer: str, admit: Admit, options: BeamOptions, cache: SlotCache) -> None:
        """cache: in which the row gets its slots."""
        super().__init__(peer, admit)
        del self.tokens[self.prompt_length :]
        self.slots_needed = options.num_beams
        self._options, self._cache = options, cache
        self._history = History(self.params, self.tokens, self.prompt_length)
        self.error: InvalidRequestError | None = None  # why a beam could not go on in its structure
        self._begin()

    def _begin(self) -> None:
        ends = self.params.end_token_ids
        self.search = BeamSearch(self._options, max_tokens=self.params.max_tokens, end_token_ids=ends)
        self.steps = 0  # of the target, the prefill's last included
        self._taking = False  # a step
        self._logprobs: dict[tuple[int, ...], list[TokenLogprobs]] = {(): []}  # by answer, if asked for
        self.__dict__.pop("_slots", None)

    def undo(self) -> None:
        if self._taking:
            self._begin()
            self.cached = self.prompt_length - 1  # the first of the slots still holds the prompt

    @property
    def prefilling(self) -> bool:
        return self.pending > 0

    @cached_property
    def _slots(self) -> BeamSlots:
        return BeamSlots(self._cache, [self.slot, *self.more_slots], self.tokens, beams=len(self.search.live))

    def inputs(self) -> list[RowInput]:
        """[B] the last token of each live beam, once the prompt is in the cache and `take` had the logits after it."""
        answers = self.search.live
        columns = [self.prompt_length + len(answer) - 1 for answer in answers]
        runs = zip(self._slots.of_beams, columns, answers, strict=True)
        return [RowInput(slot, column, answer[-1:]) for slot, column, answer in runs]

    def take(self, logits: Tensor) -> bool:
        """Follow a step; True if the search is over.

        logits: [B, V] of any float type, after each of `inputs`; the first time [1, V], after the prompt.
        """
        self.cached = self.prompt_length
        self._taking = True
        answers = self.search.live
        self._slots.wrote(answers)
        log_probs = logits.float().log_softmax(dim=-1).expand(len(answers), -1)
        fork = self.search.advance(self._process(log_probs, answers), self._noise(log_probs))
        if self.params.logprobs is not None:
            self._note_logprobs(log_probs, answers)
        self._slots.fork(fork.parents)
        self.steps += 1
        self._taking = False
        return self.search.done

    def found(self) -> Beams:
        """The answers, once the search is over."""
        answers = self.search.best()
        wanted = self.params.logprobs is not None
        logprobs = [self._logprobs[tuple(one.tokens)] for one in answers] if wanted else None
        return Beams(self.key[1], answers, self.steps, logprobs, self.admission)

    def _process(self, log_probs: Tensor, answers: Sequence[Sequence[int]]) -> Tensor:
        """[B, V] −∞ for all that may follow a beam that its structure can't go on from."""
        if self.structure is None:
            positions = [Position(self._history, answer) for answer in answers]
            return process(log_probs, SamplingBatch.build(positions, log_probs.shape[-1], log_probs.device))
        masks, errors = self.structure.follow(answers)
        positions = [Position(self._history, answer, mask) for answer, mask in zip(answers, masks, strict=True)]
        processed = process(log_probs, SamplingBatch.build(positions, log_probs.shape[-1], log_probs.device))
        lost = torch.tensor([error is not None for error in errors], device=log_probs.device)
        self.error = next(filter(None, errors), self.error)
        return processed.masked_fill(lost[:, None], -math.inf)

    def _note_logprobs(self, log_probs: Tensor, answers: Sequence[Sequence[int]]) -> None:
        """Remember those of every answer that this step has made one token longer. log_probs: [B, V]."""
        length = len(answers[0]) + 1
        ended = [one.tokens for one in self.search.finished if len(one.tokens) == length]
        longer = list({tuple(answer): None for answer in (*self.search.live, *ended)})
        beams = {tuple(answer): beam for beam, answer in enumerate(answers)}
        parents = torch.tensor([beams[answer[:-1]] for answer in longer], device=log_probs.device)
        tokens = [answer[-1] for answer in longer]
        found = token_logprobs(log_probs[parents], tokens, [self.params.logprobs or 0] * len(tokens))
        earlier = [tuple(one.tokens) for one in self.search.finished if len(one.tokens) < length]
        known = {answer: self._logprobs[answer] for answer in earlier}
        for answer, one in zip(longer, found, strict=True):
            known[answer] = [*self._logprobs[answer[:-1]], one]
        self._logprobs = known

    def _noise(self, log_probs: Tensor) -> Tensor | None:
        """[B, V] if continuations are drawn."""
        if self.params.greedy:
            return None
        beams, vocab_size = log_probs.shape
        position = self.prompt_length + len(self.search.live[0])
        return beam_noise(self.params.seed, position, beams, vocab_size, log_probs.device)

    def texts(self) -> list[tuple[int, list[int]]]:
        if self.prefilling:
            return [(self.slot, self.tokens[: self.cached]), *((slot, []) for slot in self.more_slots)]
        return self._slots.texts()
