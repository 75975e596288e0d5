"""One row's input to a forward, and the columns that its tokens see.

It knows nothing of models or caches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.drafts.trie import Draft


@dataclass(frozen=True, slots=True)
class RowInput:
    """New tokens of one row, written to columns start, start + 1, … of the row's slot.

    Without `paths` they continue the text in columns 0 … start - 1. With `paths` they are nodes of a tree below the
    text in columns 0 … trunk - 1. paths[j] lists the columns of token j's ancestors below the text, topmost first,
    and its own column last. Columns from `trunk` to `start` may contain nodes of earlier calls.

    Logits are wanted after the last `wanted` tokens; None: after all.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    trunk: int = 0
    paths: Sequence[Sequence[int]] | None = None
    wanted: int | None = None

    @property
    def logits_count(self) -> int:
        """The number of tokens after which logits are wanted."""
        return len(self.tokens) if self.wanted is None else self.wanted

    @property
    def end(self) -> int:
        """The column after the last new token."""
        return self.start + len(self.tokens)

    def positions(self) -> Sequence[int]:
        """The tokens' positions in the text."""
        if self.paths is None:
            return range(self.start, self.end)
        return [self.trunk + len(path) - 1 for path in self.paths]


def draft_input(slot: int, start: int, token: int, draft: Draft) -> RowInput:
    """Return the input of a text's last token, written to column `start`, and K draft tokens: K + 1 in all."""
    return tree_input(slot, start, Draft([token, *draft.tokens], [-1, *(parent + 1 for parent in draft.parents)]))


def tree_input(slot: int, start: int, draft: Draft) -> RowInput:
    """Return the input of draft tokens below the text in columns 0 … start - 1."""
    if draft.is_chain:
        return RowInput(slot, start, draft.tokens)
    paths: list[list[int]] = []
    for index, parent in enumerate(draft.parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), start + index])
    return RowInput(slot, start, draft.tokens, trunk=start, paths=paths)


def visible_columns(rows: Sequence[RowInput], width: int, length: int, window: int | None) -> Tensor:
    """Return which of a slot's first L columns each token sees, at most `window` positions back: [B, Q, L] bool.

    width: Q. Beyond a row's tokens the values have no meaning, but at least one column is visible.
    """
    columns = torch.arange(length)
    own = (torch.tensor([row.start for row in rows])[:, None] + torch.arange(width))[:, :, None]
    visible = columns <= own
    if window is not None:
        visible &= columns > own - window
    for index, row in enumerate(rows):
        if row.paths is not None:
            _see_paths(row, visible[index], window or length)
    return visible


def _see_paths(row: RowInput, visible: Tensor, window: int) -> None:
    """Set `visible`, [Q, L] bool, to the text and the tokens' own paths."""
    assert row.paths is not None
    visible[: len(row.paths)] = False
    for j, path in enumerate(row.paths):
        position = row.trunk + len(path) - 1
        visible[j, max(0, position - window + 1) : row.trunk] = True
        visible[j, list(path[-window:])] = True
