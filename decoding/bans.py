"""Forbidden tokens of a position, which depend on the text before it, draft tokens included.

Only `Bans` touches logits: [P, V] float32 of P positions, in place.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from decoding.history import Position
from decoding.token_lists import Entries, TokenLists


def repeated_ngrams(position: Position) -> Iterable[int]:
    """Return tokens that would repeat an n-gram of prompt or answer: `no_repeat_ngram_size` of transformers.

    Paulus et al., arXiv 1705.04304, section 2.5.
    """
    size = position.history.params.no_repeat_ngram_size
    if not size:
        return ()
    recent = position.tail(size - 1 + len(position.path))
    if len(recent) < size - 1:
        return ()
    prefix = recent[len(recent) - size + 1 :]
    banned = position.history.ngrams.followers(tuple(prefix))
    in_path = [recent[end] for end in range(size - 1, len(recent)) if recent[end - size + 1 : end] == prefix]
    return [*banned, *in_path]


def bad_words(position: Position) -> Iterable[int]:
    """Yield the last token of each forbidden sequence whose other tokens come just before: `bad_words_ids`.

    As in transformers, an end-of-text token alone is not forbidden.
    """
    params = position.history.params
    longest = max(map(len, params.bad_words_ids), default=1)
    recent = tuple(position.tail(longest - 1))
    for *before, last in params.bad_words_ids:
        if (before and recent[-len(before) :] == tuple(before)) or (not before and last not in params.eos_token_ids):
            yield last


def early_ends(position: Position) -> Iterable[int]:
    """Return all end tokens while the answer is shorter than `min_tokens`, as vLLM does."""
    params = position.history.params
    return params.end_token_ids if position.answer_length < params.min_tokens else ()


def suppressed(position: Position) -> Iterable[int]:
    """Return `suppress_tokens`, and `begin_suppress_tokens` at the answer's first token that is not forced.

    As in transformers; `decoding.constraints.forced_token` says which tokens are forced.
    """
    params = position.history.params
    first_free = 0 if params.forced_bos_token_id is None else 1
    if position.answer_length != first_free:
        return params.suppress_tokens
    return (*params.suppress_tokens, *params.begin_suppress_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Bans:
    """Sets the logits of tokens to −∞."""

    entries: Entries

    @classmethod
    def build(
        cls,
        kinds: Sequence[Callable[[Position], Iterable[int]]],
        positions: Sequence[Position],
        vocab_size: int,
        device: torch.device | str,
    ) -> "Bans | None":
        """Build from these kinds of forbidden tokens; None if no position has any."""
        lists = TokenLists()
        for row, position in enumerate(positions):
            for kind in kinds:
                lists.add(row, kind(position))
        return cls(lists.entries(vocab_size, device)) if lists else None

    def apply_(self, logits: Tensor) -> None:
        """Change logits, [P, V], in place."""
        logits[self.entries.rows, self.entries.tokens] = -inf
