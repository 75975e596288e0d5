"""A beam search on the target: one row of its table, as many slots as it may have beams, one token per beam and step.

Its first tokens come with the last chunk of its prompt, and nothing is told before the search is over.
"""

from functools import cached_property

from torch import Tensor

from actors.beam_slots import BeamSlots
from actors.messages import Admit
from actors.row_input import RowInput
from actors.rows import Row
from actors.slots import SlotCache
from decoding.beam import BeamSearch, beam_noise
from decoding.beam_options import BeamOptions
from decoding.history import History, Position
from decoding.sampling import SamplingBatch, process


class BeamRow(Row):
    """`tokens` are the prompt: beams are never committed, so a search that moves to another replica begins anew."""

    def __init__(self, peer: str, admit: Admit, options: BeamOptions, cache: SlotCache) -> None:
        """cache: in which the row gets its slots."""
        super().__init__(peer, admit)
        del self.tokens[self.prompt_length :]
        self.slots_needed = options.num_beams
        self._options, self._cache = options, cache
        self._history = History(self.params, self.tokens, self.prompt_length)
        self._begin()

    def _begin(self) -> None:
        ends = self.params.end_token_ids
        self.search = BeamSearch(self._options, max_tokens=self.params.max_tokens, end_token_ids=ends)
        self.steps = 0  # of the target, the prefill's last included
        self._taking = False  # a step
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
        positions = [Position(self._history, answer) for answer in answers]
        batch = SamplingBatch.build(positions, logits.shape[-1], logits.device)
        log_probs = logits.float().log_softmax(dim=-1).expand(len(answers), -1)
        fork = self.search.advance(process(log_probs, batch), self._noise(log_probs))
        self._slots.fork(fork.parents)
        self.steps += 1
        self._taking = False
        return self.search.done

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
