"""A prompt that begins its answers: what all of them have in common is made once."""

from collections.abc import Sequence
from functools import cached_property

from deployments.tokenizers.token_decoder import Vocabulary


class Echo:
    """Of one prompt."""

    def __init__(self, text: str, tokens: Sequence[int], vocabulary: Vocabulary) -> None:
        self.text, self.tokens, self._vocabulary = text, tokens, vocabulary

    @cached_property
    def pieces(self) -> list[str]:
        """What each token adds to the text."""
        splitter = self._vocabulary.pieces(())
        return [splitter.add([token]) for token in self.tokens]

    @cached_property
    def offsets(self) -> list[int]:
        """Where in the text each token begins, in characters."""
        return begins(self.pieces)


def begins(pieces: Sequence[str]) -> list[int]:
    """Where each piece begins, if one follows the other."""
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end += len(piece)
    return offsets
