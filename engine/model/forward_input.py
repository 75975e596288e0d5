"""One row's input to a forward. It knows nothing of models or caches."""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from decoding.drafts.draft import Draft
from decoding.prompt_positions import PromptPositions


class RowInput(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one row, written to columns start, start + 1, … of the row's slot.

    Without `paths` they continue the text in columns 0 … start - 1. With `paths` they are nodes of a tree below the
    text in columns 0 … trunk - 1. paths[j] lists the columns of token j's ancestors below the text, topmost first,
    and its own column last. Columns from `trunk` to `start` may contain nodes of earlier calls.

    Logits are wanted after the last `wanted` tokens; None: after all.

    The text's prompt may be a shortened one whose tokens keep their positions in the whole prompt.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    trunk: int = 0
    paths: Sequence[Sequence[int]] | None = None
    wanted: int | None = None
    prompt_positions: PromptPositions | None = None  # None: a token's position is its column
    adapter: int = 0  # the slot of the LoRA weights that its tokens get; 0: none

    @property
    def logits_count(self) -> int:
        """The number of tokens after which logits are wanted."""
        return len(self.tokens) if self.wanted is None else self.wanted

    @property
    def end(self) -> int:
        """The column after the last new token."""
        return self.start + len(self.tokens)


def with_adapter(rows: list[RowInput], adapter: int) -> list[RowInput]:
    """Return a row's inputs with the slot of its LoRA weights; 0: none."""
    return [replace(row, adapter=adapter) for row in rows] if adapter else rows


def token_adapters(rows: Sequence[RowInput]) -> list[int]:
    """Return the slot of the LoRA weights of each token, [N]; [] if none has any."""
    if not any(row.adapter for row in rows):
        return []
    return [row.adapter for row in rows for _ in row.tokens]


def draft_input(slot: int, start: int, token: int, draft: Draft) -> RowInput:
    """Return the input of a text's last token, written to column `start`, and K draft tokens: K + 1 in all."""
    tokens = [token, *draft.tokens]
    if draft.is_chain:
        return RowInput(slot, start, tokens)
    return tree_input(slot, start, Draft(tokens, [-1, *(parent + 1 for parent in draft.parents)]))


def tree_input(slot: int, start: int, draft: Draft) -> RowInput:
    """Return the input of draft tokens below the text in columns 0 … start - 1."""
    if draft.is_chain:
        return RowInput(slot, start, draft.tokens)
    paths: list[list[int]] = []
    for index, parent in enumerate(draft.parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), start + index])
    return RowInput(slot, start, draft.tokens, trunk=start, paths=paths)
