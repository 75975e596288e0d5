"""Chooses chunks of a prompt, which keep their positions, by a small model's attention. Knows no messages.

SpecPrefill (Liu et al., arXiv 2502.02789, section 3): the small model reads the prompt and writes a few tokens ahead;
chunks that get most of their attention stay.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from decoding.errors import InvalidRequestError
from decoding.prompt_positions import PromptPositions
from deployments.compression.compressor import CompressionOptions
from deployments.compression.pieces import Piece, Stretch, force_last, split
from deployments.compression.selection import keep_chunks
from deployments.requests.prompt_fields import ShortenedPrompt

LOOK_AHEAD = 8  # tokens that the small model writes


class ChunkCompression:
    """One compression. Let the model attend to each of `passes`, then ask for the `result`."""

    def __init__(
        self,
        tokens: Sequence[int],
        parts: Sequence[Stretch],
        options: CompressionOptions,
        tokenizer: PreTrainedTokenizerBase,
        window: int,
    ) -> None:
        """
        options: its budget is of the whole prompt.
        tokens: the whole prompt, special tokens before the text included.
        parts: the prompt's text, and what of it may not be shortened.
        window: tokens that the model can read at once.

        Raises:
            InvalidRequestError: the prompt is too long for the model, its tokens are not those of its text, or the
                budget has no room for what may not be shortened.
        """
        (pieces,) = split(["".join(part.text for part in parts)], tokenizer, options.force_tokens)
        self._before = len(tokens) - sum(len(piece.tokens) for piece in pieces)
        if list(tokens[self._before :]) != [token for piece in pieces for token in piece.tokens]:
            raise _refused("the compressor has other tokens for this prompt; use sentence or perplexity")
        self.tokens, self._free = list(tokens), _are_free(pieces, parts)
        free = force_last([piece for piece, free in zip(pieces, self._free, strict=True) if free], options.keep_last)
        forced = iter(free)
        self._pieces = [next(forced) if free else piece for piece, free in zip(pieces, self._free, strict=True)]
        count = sum(len(piece.tokens) for piece in free)
        fixed = len(tokens) - count
        if options.budget is not None and options.budget <= fixed:
            reason = f"should be above {fixed}, the tokens that may not be shortened, not {options.budget}"
            raise InvalidRequestError(f"target_tokens: {reason}.", field="prompt_compression.target_tokens")
        self._budget = round((options.rate or 0) * count) if options.budget is None else options.budget - fixed
        self.passes = [] if self._budget >= count else [self.tokens]
        if self.passes and len(tokens) + LOOK_AHEAD > window:
            reason = f"attention reads the whole prompt, {len(tokens)} tokens, but the compressor can read"
            raise _refused(f"{reason} {window - LOOK_AHEAD}; use sentence or perplexity")

    def result(self, attention: Sequence[Sequence[float]]) -> ShortenedPrompt:
        """Return the prompt, shortened.

        attention: for each of the passes, how much the model attends to each of its tokens.
        """
        if not self.passes:
            return ShortenedPrompt(self.tokens, None, "".join(piece.text for piece in self._pieces))
        ends = list(accumulate((len(piece.tokens) for piece in self._pieces), initial=self._before))
        scores = [fmean(attention[0][start:end]) for start, end in pairwise(ends)]
        kept = keep_chunks(self._pieces, scores, self._free, max(0, self._budget))
        positions = list(range(self._before))
        for keep, start, end in zip(kept, ends, ends[1:], strict=False):
            positions += range(start, end) if keep else ()
        text = "".join(piece.text for piece, keep in zip(self._pieces, kept, strict=True) if keep)
        tokens = [self.tokens[position] for position in positions]
        return ShortenedPrompt(tokens, PromptPositions(positions, len(self.tokens)), text)


def _are_free(pieces: Sequence[Piece], parts: Sequence[Stretch]) -> list[bool]:
    """Return whether each piece may be removed: whether it is all in such parts."""
    free = [not part.protected for part in parts for _ in part.text]
    ends = list(accumulate((len(piece.text) for piece in pieces), initial=0))
    return [start < end and all(free[start:end]) for start, end in pairwise(ends)]


def _refused(reason: str) -> InvalidRequestError:
    field = "prompt_compression.method"
    return InvalidRequestError(f"{field}: {reason}.", field=field)
