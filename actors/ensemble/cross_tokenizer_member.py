"""A request of an ensemble on a member whose leader has another tokenizer: both go by the same text.

The member reads the text, and every draft, in tokens of its own, and answers in the leader's. Its tokens of a text are
a function of the text alone, so what it says is, too, whatever was drafted before.
"""

from msgspec.structs import replace
from torch import Tensor, cat

from actors.ensemble.member import MemberRow
from actors.model.forward_input import RowInput, tree_input
from actors.model.kv_slots import common_prefix
from actors.model.runner import Runner
from actors.tokenizers.logits_mapping import LogitsMapping, MemberContext
from actors.wire.messages import Join, LogitsReply
from decoding.drafts.token_tree import TokenTree
from decoding.drafts.trie import Draft
from decoding.tokenizers.copied_text import CopiedText
from decoding.tokenizers.text_aligner import TextAligner

_RUN_WITH_DRAFT = 32  # tokens of the text that a step computes, too; more are prefilled before it


class CrossTokenizerMember(MemberRow):
    """`tokens` are the member's own, of the text; the texts with the drafts are a tree in the columns behind them.

    What doesn't fit into one step, because the member's tokens are so much shorter than the leader's, takes several.
    """

    def __init__(
        self, peer: str, join: Join, runner: Runner, logits_mapping: LogitsMapping, text: TextAligner | CopiedText
    ) -> None:
        """text: the one of `join`."""
        self._logits_mapping = logits_mapping
        self._text = text
        super().__init__(peer, replace(join, tokens=logits_mapping.context(text).tokens), runner)
        self._length = len(join.tokens)
        self._readings: list[MemberContext] = []  # [K + 1] of the text, and of it with each draft token
        self._said: list[Tensor] = []  # [n, V] of the first of them, in the steps so far
        self._best: list[list[int]] = []  # of the same
        self._trunk = 0  # the tokens of the text that the last step did not compute
        self._tree = TokenTree()  # those that it did
        self._places: list[int] = []  # of the readings that it was about, in this tree

    @classmethod
    def make(
        cls, peer: str, join: Join, runner: Runner, logits_mapping: LogitsMapping
    ) -> "CrossTokenizerMember | None":
        """None: the leader has no such tokens, or the member can't write them, or has no room for the text."""
        if not join.tokens or not logits_mapping.can_map(join.tokens):
            return None
        text = logits_mapping.begin(join.tokens, join.prompt_length)
        can_run = runner.can_run(logits_mapping.context(text).tokens)
        return cls(peer, join, runner, logits_mapping, text) if can_run else None

    @property
    def length(self) -> int:
        return self._length

    @property
    def prefilling(self) -> bool:
        return self.pending > (_RUN_WITH_DRAFT if self.joined else 1)

    def _hear(self, new: list[int], draft: Draft) -> bool:
        if not self._logits_mapping.can_map([*new, *draft.tokens]):
            return False
        for token in new:
            self._text.commit([token])
        self._length += len(new)
        self._readings = self._read(draft)
        self._said, self._best = [], []
        tokens = self._readings[0].tokens
        if not self._runner.can_run(tokens):
            return False
        self._go_on(tokens)
        return True

    def _read(self, draft: Draft) -> list[MemberContext]:
        """What to run for the text, and for the text with each draft token. There is nothing to say without room."""
        texts = [self._text]
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            texts.append(texts[parent + 1].fork())
            texts[-1].commit([token])
        readings = map(self._logits_mapping.context, texts)
        return [one if self._runner.can_run(one.tokens) else one.as_unreadable() for one in readings]

    def _go_on(self, tokens: list[int]) -> None:
        """The text is in these tokens now: keep what of them has been computed."""
        computed = min(self.cached, common_prefix(self.tokens, tokens))
        if self._tree and computed >= self._trunk:
            path = [self._trunk + place for place in self._tree.find(tokens[self._trunk :])]
            self._runner.compact(self.slot, self._trunk, path)
            computed = max(computed, self._trunk + len(path))
        self._tree = TokenTree()
        self.cached = min(computed, len(tokens) - 1)
        self.tokens = tokens

    def step_input(self) -> RowInput:
        """The text and as many of the readings as there is room for; in later steps, of those that are left."""
        left = self._readings[self._done :]
        sequences = [self.tokens, *(reading.tokens for reading in left if not reading.unreadable)]
        shared = min(common_prefix(self.tokens, tokens) for tokens in sequences)
        self._trunk = min(self.cached, shared, min(map(len, sequences)) - 1)
        self._tree, self._places = TokenTree(), []
        if not self._done:
            self._tree.add(self.tokens[self._trunk :])
        for reading in left:
            rest = reading.tokens[self._trunk :]
            if not reading.unreadable and self._tree and self._tree.size_with(rest) > self._runner.max_query:
                break
            self._places.append(0 if reading.unreadable else self._tree.add(rest))
        return tree_input(self.slot, self._trunk, self._tree.draft)

    def answer(self, logits: Tensor) -> LogitsReply | None:
        self.cached = min(self.cached, self._trunk) if self._done else len(self.tokens)
        readings = self._readings[self._done :][: len(self._places)]
        said, best = self._logits_mapping.project(readings, logits[self._places], self._best_count)
        self._said.append(said)
        self._best += best
        if self._done < len(self._readings):
            return None
        return self._answer(cat(self._said), self._best)

    @property
    def _done(self) -> int:
        """How many readings were there room for in the steps so far."""
        return sum(map(len, self._said))
