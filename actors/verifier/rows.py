"""The rows of a target that write texts, and what they run in a step."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace
from torch import Tensor

from actors.ensemble.rounds import EnsembleRounds
from actors.loops.row import RowKey, ServedRow
from actors.loops.row_table import RowTable
from actors.loops.scheduler import Share
from actors.verifier.row_drafts import RowDrafts
from actors.wire.messages import Admit
from decoding.drafts.draft import NO_DRAFT, Draft
from decoding.drafts.lookup import Lookup
from decoding.sampling.history import History, Positions
from decoding.sampling.logprobs import TokenLogprobs
from decoding.sampling.sampler import token_logprobs
from decoding.sampling.stopping import FinishReason, cut_at_stop
from engine.model.page_tables import PageTables
from engine.model.ragged_batch import RowInput, draft_input


class Verification(NamedTuple):
    """A draft of K tokens that was run, and which of the step's logits decide on it."""

    row: "TargetRow"
    draft: Draft
    rows: range  # [K + 1] the rows of the logits after the text, and after each draft token
    mask: Tensor | None  # [K + 1, ⌈V / 32⌉] int32, the tokens that the row's structure allows; None for all


class Companion(ServedRow):
    """Another prompt before a row's answer, for a term of its formula.

    It reads the prompt as a row of its own; then it takes part in the row's steps.
    """

    def __init__(self, owner: "TargetRow", index: int, admit: Admit, prompt: Sequence[int]) -> None:
        """index: among the row's texts. admit: the row's."""
        peer, _ = owner.key
        text = owner.text_after(prompt)
        super().__init__(f"{peer} {index}", replace(admit, tokens=text, prompt_length=len(prompt)))
        self._owner = owner

    @property
    def owner(self) -> ServedRow:
        return self._owner

    @property
    def due(self) -> bool:
        return self.ready and self.prefilling

    @property
    def withheld(self) -> int:
        return 1

    def take(self, logits: Tensor, rows: range) -> None:
        self.cached = self._chunk.end


class TargetRow(ServedRow):
    """`tokens` are all committed. While the row is running, all but the last are in the cache."""

    def __init__(self, peer: str, admit: Admit, *, acceptance: float, lookups: Sequence[Lookup] = ()) -> None:
        """
        acceptance, lookups: as in `RowDrafts`.

        Raises UnavailableError if too few members of its ensemble are there.
        """
        super().__init__(peer, admit)
        self.rejects = self.params.rejects  # whether it verifies by rejection sampling
        self.history = History(self.params, self.tokens, self.prompt_length)
        self.end = Positions(self.history)  # the position after the text, however long it is
        self.ensemble = None if admit.ensemble is None else EnsembleRounds(admit.ensemble)  # if it leads one
        own = [] if self.ensemble is None else [each.term.prompt for each in self.ensemble.own]
        prompts = [prompt for prompt in own if prompt is not None]
        self._companions = [Companion(self, index, admit, prompt) for index, prompt in enumerate(prompts, 1)]
        self.slots_needed = 1 + len(prompts)
        self.prompt_logprobs: list[TokenLogprobs] = []  # from the prompt's second token on, if wanted
        self._origin = replace(admit, tokens=[])
        self.prompt_positions = admit.prompt_positions
        if admit.prompt_positions is not None:  # pages hold keys at these positions
            self.cache_salt += f" {admit.prompt_positions.digest}"
        self.attached_drafter = admit.attached_drafter
        self.drafts = RowDrafts(self.key, self.tokens, admit, acceptance=acceptance, lookups=lookups)
        self.limit_draft()
        self.step_draft = NO_DRAFT  # that the next step verifies
        self.mask: Tensor | None = None  # as in Verification
        self._verification: Verification | None = None  # of the logits that were taken last

    @property
    def texts(self) -> Sequence[ServedRow]:
        return (self, *self._companions)

    def text_after(self, prompt: Sequence[int] | None) -> list[int]:
        """Return the text with another prompt; None: with its own."""
        return [*(self.tokens[: self.prompt_length] if prompt is None else prompt), *self.tokens[self.prompt_length :]]

    @property
    def due(self) -> bool:
        return self.ready and (len(self.tokens) - self.cached > 1 or self._may_step)

    @property
    def _may_step(self) -> bool:
        is_idle = self.ensemble is None or self.ensemble.is_idle
        return is_idle and not any(companion.prefilling for companion in self._companions)

    @property
    def step_tokens(self) -> int:
        return self.slots_needed

    @property
    def spans_replicas(self) -> bool:
        return self.ensemble is not None and bool(self.ensemble.others)

    @property
    def started(self) -> bool:
        return self.entered and (self.ensemble is None or self.ensemble.is_joined)

    @property
    def lends(self) -> bool:
        return self.ensemble is not None and self.ensemble.waits_for_slots

    @property
    def verifies(self) -> bool:
        return len(self.tokens) - self.cached <= 1 and self.ready and self._may_step

    @property
    def withheld(self) -> int:
        return 1 if self.ensemble else 0  # all members of an ensemble run the last token in the same step

    def ends_prompt(self, limit: int) -> bool:
        """Whether a token is chosen after a chunk of at most `limit` tokens, because the text ends there."""
        return not self.withheld and limit >= self.pending

    def inputs(self, limit: int) -> list[RowInput]:
        if not self.prefilling:
            inputs = [draft_input(text.slot, text.cached, text.tokens[-1], self.step_draft) for text in self.texts]
        else:
            inputs = super().inputs(limit)
            if self.wants_prompt_logprobs:
                inputs = [replace(chunk, wanted=None) for chunk in inputs]
        return [self._placed(row_input) for row_input in inputs]

    def take(self, logits: Tensor, rows: range) -> None:
        """Note what decides on the draft. The leader of an ensemble blends it with what others make of it."""
        if self.prefilling:
            self.history.read_ahead()
            if self.wants_prompt_logprobs:
                self._note_prompt(self._chunk, logits[rows.start : rows.stop])
            self.cached = self._chunk.end
            if self.pending:
                return
            self.cached -= 1  # as in a step, which runs the last token
            rows = rows[-1:]
        if self.ensemble is not None:
            self.ensemble.add_own_logits(logits[rows.start : rows.stop], self.mask)
        if not self.spans_replicas:
            own = rows[: len(self.step_draft.tokens) + 1]
            self._verification = Verification(self, self.step_draft, own, self.mask)
        self.step_draft, self.mask = NO_DRAFT, None

    def claim_verification(self) -> Verification | None:
        verification, self._verification = self._verification, None
        return verification

    def undo(self) -> None:
        self.step_draft, self.mask, self._verification = NO_DRAFT, None, None
        if self.ensemble is not None:
            self.ensemble.round = None  # the next step requests logits again

    @property
    def may_share(self) -> bool:
        return not self.wants_prompt_logprobs

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    def writes_text_of(self, admit: Admit) -> bool:
        """Whether another admission has the same prompt and all on which its text depends, and wants only the text."""
        needed = attrgetter("prompt_length", "params", "adapter", "cache_salt", "prompt_positions")
        params = self.params
        wants_more = params.logprobs is not None or params.prompt_logprobs is not None or params.prompt_attention
        alone = self.ensemble is None and admit.ensemble is None and admit.beams is None
        is_same = needed(self._origin) == needed(admit) and self.tokens[: self.prompt_length] == admit.tokens
        return alone and is_same and not wants_more and not self.rejects

    def limit_draft(self) -> None:
        """Find out how many draft tokens a step can use. The request's last token needs no draft."""
        end = self.prompt_length + self.params.max_tokens
        longest = None if self.ensemble is None else self.ensemble.max_length
        if longest is not None:
            end = min(end, longest)
        self.drafts.usable_length = max(0, min(self.draft_length, end - len(self.tokens) - 1))

    def cut(self, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """Return those of a step's tokens that belong to the answer, and the reason if it ends with them."""
        ends, most = self.history.end_token_ids, self.params.max_tokens
        return cut_at_stop(tokens, self.generated, end_token_ids=ends, max_tokens=most)

    def commit(self, tokens: list[int], *, rejected: bool) -> None:
        """Append what a step committed. rejected: whether the last token replaces a rejected draft token."""
        self.drafts.commit(tokens, rejected=rejected)
        for companion in self._companions:
            companion.tokens += tokens
        if self.draft_length:
            self.limit_draft()

    def attention_input(self) -> RowInput:
        """Return what the answer was drawn after, whose attention to the prompt is wanted once the answer is there."""
        start = self.prompt_length - 1
        return self._placed(RowInput(self.slot, start, self.tokens[start:-1], adapter=self.adapter_slot or 0))

    def _placed(self, row_input: RowInput) -> RowInput:
        """Return the input with its tokens' positions in the whole text, where the prompt is shortened."""
        if self.prompt_positions is None:
            return row_input
        return replace(row_input, positions=self.prompt_positions.translate(row_input.text_positions))

    def _note_prompt(self, chunk: RowInput, logits: Tensor) -> None:
        """Keep the prompt's log-probabilities. logits: [N, V], after each token of a prefill chunk."""
        following = self.tokens[chunk.start + 1 : min(chunk.end + 1, self.prompt_length)]
        counts = [self.params.prompt_logprobs or 0] * len(following)
        del self.prompt_logprobs[chunk.start :]  # left by a chunk that ran out of memory
        self.prompt_logprobs += token_logprobs(logits[: len(following)], following, counts)

    def wait_s(self, now_s: float) -> float:
        return self.drafts.wait_s(now_s) if self.verifies else 0.0


class TargetRows(RowTable[ServedRow]):
    """The row table of one target."""

    def __init__(self, cache: PageTables, removed: Callable[[ServedRow], None] = lambda row: None) -> None:
        super().__init__(cache, removed)
        self._writers: dict[RowKey, TargetRow] = {}

    def add_writer(self, row: TargetRow) -> None:
        self.add(row)
        self._writers[row.key] = row

    def remove(self, key: RowKey) -> None:
        self._writers.pop(key, None)
        super().remove(key)

    def writer(self, key: RowKey) -> TargetRow | None:
        return self._writers.get(key)

    @property
    def writers(self) -> list[TargetRow]:
        """All rows that write a text, waiting ones included."""
        return list(self._writers.values())

    @property
    def readers(self) -> list[ServedRow]:
        """Rows with a slot that are not writers."""
        return [row for key, row in self._active.items() if key not in self._writers]

    @property
    def running(self) -> list[TargetRow]:
        """Rows whose next step may begin."""
        return [row for row in self._writers.values() if row.slot >= 0 and row.verifies]

    @property
    def blendable(self) -> list[TargetRow]:
        """Rows of ensemble leaders that have the logits of all members."""
        leaders = [row for row in self._writers.values() if row.ensemble is not None]
        return [row for row in leaders if row.slot >= 0 and row.ensemble is not None and row.ensemble.is_complete]

    def sampling(self, shares: Iterable[Share[ServedRow]]) -> list[TargetRow]:
        """Return the rows that choose tokens after these shares."""
        writers = [(self._writers.get(row.key), limit, is_chunk) for row, limit, is_chunk in shares]
        return [row for row, limit, is_chunk in writers if row and (not is_chunk or row.ends_prompt(limit))]

    def verifying(self, shares: Iterable[Share[ServedRow]]) -> list[TargetRow]:
        """Return the rows whose drafts these shares verify."""
        writers = [self._writers.get(share.row.key) for share in shares if not share.is_chunk]
        return [row for row in writers if row is not None]

    def verifications(self, shares: Iterable[Share[ServedRow]]) -> list[Verification]:
        """Take what the rows of these shares have to verify, those excepted whose members have not answered."""
        rows = [self._writers.get(share.row.key) for share in shares]
        return [verification for row in rows if row and (verification := row.claim_verification()) is not None]
