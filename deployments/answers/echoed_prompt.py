"""A prompt that the answer repeats first (`echo: true`). Choices of one prompt share its pieces."""

from collections.abc import Sequence
from functools import cached_property

from deployments.tokenizers.token_decoder import TokenDecoder


class EchoedPrompt:
    """The text and tokens of one prompt, and the text of each token, made when first needed."""

    def __init__(self, text: str, tokens: Sequence[int], decoder: TokenDecoder) -> None:
        self.text, self.tokens, self._decoder = text, tokens, decoder

    @cached_property
    def pieces(self) -> list[str]:
        splitter = self._decoder.detokenizer(())
        pieces = [splitter.add([token]) for token in self.tokens]
        return [*pieces[:-1], pieces[-1] + splitter.flush()] if pieces else []

    @cached_property
    def offsets(self) -> list[int]:
        """Index of the character at which each token begins."""
        return piece_offsets(self.pieces)


def piece_offsets(pieces: Sequence[str]) -> list[int]:
    """Index of the character at which each piece begins in the joined text."""
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end += len(piece)
    return offsets
