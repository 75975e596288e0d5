"""A request on the target: its draft trie, what draft it should wait for, and until when."""

from actors.messages import Admit
from actors.rows import Row
from decoding.draft_length import AcceptanceEstimate
from decoding.drafts import Draft, DraftTrie


class TargetRow(Row):
    """`tokens` are all committed; all but the last are in the cache while the row is running."""

    def __init__(self, peer: str, admit: Admit, *, acceptance: float) -> None:
        """acceptance: what to expect of its drafts."""
        super().__init__(peer, admit)
        self.trie = DraftTrie(self.tokens)
        self.acceptance = AcceptanceEstimate(expected=acceptance)
        self.trie.usual_chance = self.acceptance.value
        self.expects_drafts = self.draft_length > 0
        self.wanted_draft_length = self.draft_length  # what is worth waiting for
        self.useful_draft_length = self.draft_length  # what is worth verifying if it is there
        self.incomplete_since_s: float | None = None  # when waiting for that draft began, and it has not come
        self.drafted_at_plan = 0  # draft tokens that were there by then
        self.deadline_s = 0.0

    @property
    def prefilling(self) -> bool:
        return self.pending > 1

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
        return self.trie.best_draft(self.usable_draft_length, self.usable_draft_length)

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
