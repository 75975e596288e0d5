"""A member's row whose tokenizer differs from the leader's.

It reads the text and every draft in its own tokens, and replies in the leader's.
"""

from collections.abc import Sequence

from msgspec.structs import replace
from torch import Tensor, cat

from actors.ensemble.member import MemberRow
from actors.wire.messages import Join, LogitsReply
from decoding.drafts.draft import Draft, TokenTree
from decoding.tokenizers.logits_mapping import LogitsMapping, MemberContext
from decoding.tokenizers.text_aligner import CopiedText, TextAligner
from engine.kernels.attention import MAX_BRANCHES
from engine.model.ragged_batch import RowInput, tree_input
from engine.model.runner import Runner

_RUN_WITH_DRAFT = 32  # the most pending tokens of the text that a step computes, too; more are prefilled


class CrossTokenizerMember(MemberRow):
    """`tokens` are the text in the member's own tokens. Drafts form a tree in the cache columns behind them.

    A request takes several steps if its tree is too large for one: the member's tokens can be much shorter.
    """

    def __init__(
        self, peer: str, join: Join, runner: Runner, logits_mapping: LogitsMapping, text: TextAligner | CopiedText
    ) -> None:
        """text: the text of `join`, read by both tokenizers."""
        self._logits_mapping = logits_mapping
        self._limit = min(runner.max_query, MAX_BRANCHES)  # nodes of a step
        self._text = text
        super().__init__(peer, replace(join, tokens=logits_mapping.context(text).tokens), runner)
        self.join = join  # as it may be sent again
        self._length = len(join.tokens)
        self._readings: list[MemberContext] = []  # [K + 1] the text, and the text with each draft token
        self._logits: list[Tensor] = []  # [n, V] per step so far, of the first readings
        self._best: list[list[int]] = []  # most probable tokens, for the same readings
        self._tree_start = 0  # the cache column where the last step's tree begins
        self._tree = TokenTree()  # computed by the last step
        self._last_nodes: list[int] = []  # of the last step's readings: the tree node of the last token

    @classmethod
    def make(
        cls, peer: str, join: Join, runner: Runner, logits_mapping: LogitsMapping
    ) -> "CrossTokenizerMember | None":
        """Make a row, or return None: the leader has no such tokens, or the member can't run the text."""
        if not join.tokens or not logits_mapping.can_map(join.tokens):
            return None
        text = logits_mapping.begin(join.tokens, join.prompt_length)
        can_run = runner.can_run(logits_mapping.context(text).tokens)
        return cls(peer, join, runner, logits_mapping, text) if can_run else None

    @property
    def length(self) -> int:
        return self._length

    @property
    def max_length(self) -> int:
        return 0  # how many of its own tokens a text has depends on the text

    @property
    def prefilling(self) -> bool:
        return self.pending > (_RUN_WITH_DRAFT if self.joined else 1)

    @property
    def cached_prefix(self) -> int:
        return min(self.cached, self._tree_start) if self._tree else self.cached  # the next request may move the rest

    def resume(self, count: int) -> None:
        super().resume(count)
        self._tree = TokenTree()  # its columns mean nothing now

    def undo(self) -> None:
        self.cached = self.cached_prefix
        self._tree, self._logits, self._best = TokenTree(), [], []

    def _extend(self, new_tokens: list[int], draft: Draft) -> bool:
        if not self._logits_mapping.can_map([*new_tokens, *draft.tokens]):
            return False
        for token in new_tokens:
            self._text.commit([token])
        self._length += len(new_tokens)
        self._readings = self._read(draft)
        self._logits, self._best = [], []
        tokens = self._readings[0].tokens
        if not self._runner.can_run(tokens):
            return False
        self._set_tokens(tokens)
        return True

    def _read(self, draft: Draft) -> list[MemberContext]:
        """Return what to run for the text, and for the text with each draft token. What has no room is silent."""
        texts = [self._text]
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            texts.append(texts[parent + 1].fork())
            texts[-1].commit([token])
        readings = map(self._logits_mapping.context, texts)
        return [reading if self._runner.can_run(reading.tokens) else reading.as_unreadable() for reading in readings]

    def _set_tokens(self, tokens: list[int]) -> None:
        """Replace the text's tokens, and keep the cache columns that still hold."""
        common = _common_prefix(self.tokens, tokens)
        computed = min(self.cached, common)
        if self._tree and computed >= self._tree_start:
            columns = [self._tree_start + node for node in self._tree.find(tokens[self._tree_start :])]
            self._runner.compact(self.slot, self._tree_start, columns)
            computed = max(computed, self._tree_start + len(columns))
        self._tree = TokenTree()
        self.cached = min(computed, len(tokens) - 1)
        del self.page_keys[common // self._runner.cache.page_size :]
        self.tokens = tokens

    def _step_input(self) -> RowInput:
        """Return the text and as many readings as there is room for; in later steps, the next readings."""
        readings = self._readings[self._computed_readings :]
        sequences = [self.tokens, *(reading.tokens for reading in readings if not reading.unreadable)]
        shared = min(_common_prefix(self.tokens, tokens) for tokens in sequences)
        self._tree_start = min(self.cached, shared, min(map(len, sequences)) - 1)
        self._tree, self._last_nodes = TokenTree(), []
        if not self._computed_readings:
            self._tree.add(self.tokens[self._tree_start :])
        for reading in readings:
            path = reading.tokens[self._tree_start :]
            too_large = not reading.unreadable and self._tree.size_with(path) > self._limit
            if too_large and self._last_nodes:  # the first is the text itself, or has the tree to itself
                break
            self._last_nodes.append(0 if reading.unreadable else self._tree.add(path))
        return tree_input(self.slot, self._tree_start, self._tree.draft)

    def _reply(self, logits: Tensor) -> LogitsReply | None:
        first = self._computed_readings
        self.cached = min(self.cached, self._tree_start) if first else len(self.tokens)
        readings = self._readings[first : first + len(self._last_nodes)]
        mapped, best = self._logits_mapping.project(readings, logits[self._last_nodes], self._best_count)
        self._logits.append(mapped)
        self._best += best
        if self._computed_readings < len(self._readings):
            return None
        return self._make_reply(cat(self._logits), self._best)

    @property
    def _computed_readings(self) -> int:
        return sum(map(len, self._logits))


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    low, high = 0, min(len(first), len(second))  # bounds of the length
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
