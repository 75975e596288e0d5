"""A request on the target: its draft trie, what draft it should wait for, and until when."""

from torch import Tensor

from actors.ensemble.rounds import EnsembleRounds
from actors.loops.row_table import Row
from actors.model.forward_input import RowInput, draft_input
from actors.wire.messages import Admit, Advance, Offer
from decoding.drafts.length import AcceptanceEstimate
from decoding.drafts.proposer import Proposer
from decoding.drafts.trie import Draft, DraftTrie
from decoding.sampling.history import History
from decoding.sampling.logprobs import TokenLogprobs, token_logprobs


class TargetRow(Row):
    """`tokens` are all committed; all but the last are in the cache while the row is running."""

    def __init__(self, peer: str, admit: Admit, *, acceptance: float, proposer: Proposer | None = None) -> None:
        """acceptance: what to expect of its drafts. proposer: drafts here, beside the drafter."""
        super().__init__(peer, admit)
        self.trie = DraftTrie(self.tokens, rejects=self.params.rejects)
        self.acceptance = AcceptanceEstimate(expected=acceptance)
        self.trie.default_probability = self.acceptance.value
        self.history = History(self.params, self.tokens, self.prompt_length)
        self.proposer = proposer
        self.ensemble: EnsembleRounds | None = None  # that it leads
        self.prompt_logprobs: list[TokenLogprobs] = []  # from the prompt's second token on, if asked for
        self.drafter = admit.drafter  # whether one works on the request
        self.attached_drafter = admit.attached_drafter
        self._told = len(self.tokens)  # so much of the text
        self._told_to_rest = False
        self.expects_drafts = self.drafter and self.draft_length > 0
        self.wanted_draft_length = self.draft_length  # what is worth waiting for
        self.useful_draft_length = self.draft_length  # what is worth verifying if it is there
        self.incomplete_since_s: float | None = None  # when waiting for that draft began, and it has not come
        self.drafted_at_plan = 0  # draft tokens that were there by then
        self.deadline_s = 0.0
        self.rejected_at = 0  # the length of the text when a draft token was last rejected

    def undo(self) -> None:
        if self.ensemble is not None:
            self.ensemble.round = None  # the next step asks the members again

    @property
    def prefilling(self) -> bool:
        return self.pending > 1

    @property
    def can_step(self) -> bool:
        """Whether its next step may begin."""
        if self.ensemble is not None and (self.ensemble.round is not None or not self.ensemble.joined):
            return False
        return self.ready and not self.prefilling

    def step_input(self, draft: Draft) -> RowInput:
        """The text's last token and a draft of what follows it."""
        return draft_input(self.slot, self.cached, self.tokens[-1], draft)

    def next_input(self, limit: int) -> RowInput:
        """The leader of an ensemble runs the last token when the others do."""
        return super().next_input(min(limit, self.pending - 1) if self.ensemble else limit)

    @property
    def may_share(self) -> bool:
        return not self.wants_prompt_logprobs

    @property
    def speculates(self) -> bool:
        """Whether drafts may come at all."""
        return self.draft_length > 0 and (self.drafter or self.proposer is not None)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def usable_draft_length(self) -> int:
        """The most draft tokens that a step can use: the request's last token needs no draft."""
        return min(self.draft_length, self.params.max_tokens - self.generated - 1)

    def draft(self) -> list[int]:
        """The most probable chain of what is there, as much of it as a step can use."""
        return self.trie.best_path(self.usable_draft_length)

    def best_draft(self) -> Draft:
        """The most probable tokens of what is there, a chain or a tree, as many as a step can use."""
        draft = self.trie.best_draft(self.usable_draft_length, self.usable_draft_length)
        # Rejection sampling needs to see a draft's tokens, the impossible ones too, as they were drawn.
        return draft if self.structure is None or self.params.rejects else self.structure.prune(draft)

    def offer(self, offer: Offer) -> bool:
        """Take in a draft, which has the target's tokens only; True if any of it fits."""
        return self.trie.offer(offer.base, offer.tokens, offer.parents, offer.probabilities, offer.distributions)

    def propose(self) -> None:
        """Take in what the proposer drafts for the text as it is."""
        if self.proposer is not None and self.draft_length > 0:
            draft = self.proposer.propose(self.tokens)
            self.trie.offer(len(self.tokens), draft.tokens, draft.parents, draft.probabilities)

    def commit(self, tokens: list[int], *, rejected: bool) -> None:
        """Append what a step committed. rejected: the last token is not what was drafted in its place."""
        self.trie.commit(tokens)
        if rejected:
            self.rejected_at = len(self.tokens)
        if rejected and self.params.rejects:
            self.trie.fence()

    def draft_with(self, drafter: str | None) -> None:
        """Another drafter works on it from now on, or none. Should it know less of the text, it will ask."""
        self.attached_drafter = drafter
        self.drafter = self.expects_drafts = drafter is not None
        self.tell_from(len(self.tokens))

    def tell_from(self, known: int) -> None:
        """The attached_drafter knows so much of the text."""
        self._told, self._told_to_rest = known, False

    def news(self, draft_length: int) -> Advance | None:
        """What to tell the attached_drafter. One that may rest, because no draft would pay, is told that once.

        draft_length: how long a draft would pay in the next step.
        """
        resting = self._told_to_rest and draft_length == 0
        if self.attached_drafter is None or resting or self._told >= len(self.tokens):
            return None
        advance = self.advance(self._told, draft_length)
        self._told, self._told_to_rest = len(self.tokens), draft_length == 0
        return advance

    def advance(self, base: int, draft_length: int) -> Advance:
        """What a drafter needs to know that knows the text up to `base`."""
        coordinator, request_id = self.key
        return Advance(
            request_id, coordinator, self.admission, base, self.tokens[base:], draft_length, self.rejected_at
        )

    def note_prompt(self, chunk: RowInput, logits: Tensor) -> None:
        """Keep the log-probabilities of the prompt's tokens. logits: [N, V], after each token of a prefill chunk."""
        following = self.tokens[chunk.start + 1 : min(chunk.end + 1, self.prompt_length)]
        counts = [self.params.prompt_logprobs or 0] * len(following)
        del self.prompt_logprobs[chunk.start :]  # there are some if the chunk is computed anew
        self.prompt_logprobs += token_logprobs(logits[: len(following)], following, counts)

    def has_wanted_draft(self) -> bool:
        return len(self.draft()) >= min(self.wanted_draft_length, self.usable_draft_length)

    def wait_s(self, now_s: float) -> float:
        """How much longer the row is worth waiting for, in seconds; 0: it is ready."""
        if not self.expects_drafts or self.has_wanted_draft():
            return 0.0
        return max(0.0, self.deadline_s - now_s)

    def await_draft(self, now_s: float, patience_s: float) -> None:
        """From now on, wait for what is missing of the wanted draft, up to `patience_s`."""
        self.drafted_at_plan = len(self.draft())
        self.incomplete_since_s = None if self.has_wanted_draft() or not self.expects_drafts else now_s
        self.deadline_s = now_s + patience_s
