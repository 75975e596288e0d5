"""What speculation needs of one row: its trie of drafts, who drafts for it, how much, and how long the row waits."""

from collections.abc import Sequence

from actors.loops.row import RowKey
from actors.wire.messages import Admit, Advance, Offer
from decoding.drafts.draft import NO_DRAFT, Draft
from decoding.drafts.length import AcceptanceEstimate
from decoding.drafts.lookup import Lookup
from decoding.drafts.trie import DraftTrie
from decoding.grammars.structure import StructureState


class RowDrafts:
    """The drafts of a row that writes a text. Nothing here can change the text."""

    def __init__(
        self, key: RowKey, tokens: list[int], admit: Admit, *, acceptance: float, lookups: Sequence[Lookup]
    ) -> None:
        """
        tokens: the row's text, shared with it.
        acceptance: the expected acceptance rate.
        lookups: draft without a model; of a token that several draft, the first count as its proposers.
        """
        self._key, self._tokens, self._admission = key, tokens, admit.admission
        self._draft_length, self._rejects = admit.draft_length, admit.params.rejects
        self.trie = DraftTrie(tokens, rejects=self._rejects)
        self.acceptance = AcceptanceEstimate(expected=acceptance)
        self.trie.default_probability = self.acceptance.value
        self.lookups = lookups
        self.drafter = admit.drafter  # whether a drafter works on the request
        self.heads = admit.heads and admit.draft_length > 0  # whether heads of the target draft for it
        self._acknowledged_length = len(tokens)  # of the text that the attached drafter has
        self._read_length = 0  # of the text that a drafter has read, as its offers tell
        self._drafter_rests = False
        self.usable_length = max(admit.draft_length, admit.longest_draft)  # the most draft tokens that a step can use
        self.wanted_length = admit.draft_length  # worth waiting for
        self.useful_length = admit.draft_length  # worth verifying without a wait
        self.in_step_length = admit.draft_length  # worth the time by which drafting delays the step
        self.expected = self.drafter and admit.draft_length > 0  # whether to wait for drafts
        self.incomplete_since_s: float | None = None  # start of the wait for the wanted draft, while it is incomplete
        self.length_at_plan = 0  # draft tokens that were there when the wait began
        self.deadline_s = 0.0
        self.rejected_at = 0  # length of the text when a draft token was last rejected

    @property
    def wanted(self) -> bool:
        return self._draft_length > 0 and (self.drafter or self.heads or bool(self.lookups))

    @property
    def model_length(self) -> int:
        """The most tokens that a model should draft for a step. Copies cost nothing, so they may be longer."""
        return min(self._draft_length, self.usable_length)

    @property
    def missed_tokens(self) -> int:
        """Tokens that its drafter has to read before it can draft again. Heads don't catch up."""
        return max(0, len(self._tokens) - self._read_length) if self.drafter and not self.heads else 0

    @property
    def length(self) -> int:
        """The length of the most probable draft chain, as much of it as a step can use."""
        return min(self.trie.best_length, self.usable_length)

    @property
    def is_complete(self) -> bool:
        """Whether the draft that the row waits for is there."""
        return self.trie.best_length >= min(self.wanted_length, self.usable_length)

    def best(self, structure: StructureState | None = None, *, branching: bool = True) -> Draft:
        """Return the most probable draft tokens, as many as a step can use: a tree if it may branch, or a chain.

        structure: the grammar's state after the text.
        """
        if self.usable_length <= 0:
            return NO_DRAFT
        draft = self.trie.best_draft(self.usable_length, self.usable_length, branching=branching)
        # Rejection sampling needs all tokens as they were drawn, also those that the structure forbids.
        return draft if structure is None or self._rejects else structure.prune(draft)

    def offer(self, offer: Offer) -> bool:
        """Add a draft in the target's tokens to the trie. Returns whether any of it fits the text."""
        self._read_length = offer.base
        return self.trie.offer(offer.base, offer.tokens, offer.parents, offer.probabilities, offer.distributions)

    def look_up(self) -> None:
        """Add what look-ups find for the current text to the trie."""
        for lookup in self.lookups:
            draft = lookup.propose(self._tokens)
            self.trie.offer(len(self._tokens), draft.tokens, draft.parents, draft.probabilities, proposer=lookup.name)

    def commit(self, tokens: list[int], *, rejected: bool) -> None:
        """Append what a step committed. rejected: whether the last token replaces a rejected draft token."""
        self.trie.commit(tokens)
        if rejected:
            self.rejected_at = len(self._tokens)
            if self._rejects:
                self.trie.fence()

    def note_verdict(self, *, drafted: int, accepted: int) -> None:
        self.acceptance.note(drafted=drafted, accepted=accepted)
        self.trie.default_probability = self.acceptance.value

    def attach(self, drafter: str | None) -> None:
        """Note which drafter is attached now; None for no drafter. One that lacks some of the text will ask for it."""
        self.drafter = self.expected = drafter is not None
        self.acknowledge(len(self._tokens))

    def acknowledge(self, length: int) -> None:
        """Note how many tokens of the text the attached drafter has."""
        self._acknowledged_length, self._drafter_rests = length, False

    def next_advance(self, draft_length: int) -> Advance | None:
        """Return the update for the attached drafter, if it needs one, and count it as acknowledged.

        draft_length: how long a draft would pay in the next step; after one update with 0 the drafter rests. Without
        new text, the update only lets it rest or go on.
        """
        rests, rested = draft_length == 0, self._drafter_rests
        knows_text = self._acknowledged_length >= len(self._tokens)
        if (rests and rested) or (knows_text and rests == rested):
            return None
        advance = self.advance(self._acknowledged_length, draft_length)
        self._acknowledged_length, self._drafter_rests = len(self._tokens), rests
        return advance

    def rest(self) -> Advance:
        """Return the update that lets the attached drafter rest, with the text that it may lack."""
        return self.advance(self._acknowledged_length, 0)

    def advance(self, base: int, draft_length: int) -> Advance:
        """Return the update for a drafter that has the first `base` tokens of the text."""
        coordinator, request_id = self._key
        text = self._tokens[base:]
        return Advance(request_id, coordinator, self._admission, base, text, draft_length, self.rejected_at)

    def wait(self, now_s: float, patience_s: float) -> None:
        """Begin to wait for the wanted draft, for at most `patience_s`."""
        self.incomplete_since_s = None
        if not self.is_complete:
            self.incomplete_since_s, self.deadline_s, self.length_at_plan = now_s, now_s + patience_s, self.length

    def wait_s(self, now_s: float) -> float:
        waits = self.incomplete_since_s is not None and self.expected
        return max(0.0, self.deadline_s - now_s) if waits else 0.0
