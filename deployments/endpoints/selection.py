"""Splits a text into pieces, and chooses which to keep within a budget of tokens.

LLMLingua (Jiang et al., arXiv 2310.05736): a budget controller (section 3.1) drops whole paragraphs, then each segment
loses the tokens that the small model predicts best (section 3.2). Scores given a question are contrastive, as in
LongLLMLingua (arXiv 2310.06839, section 4.1). Unlike there, one pass scores the whole text, and the share that is
kept is met exactly.
"""

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress, groupby, pairwise
from statistics import fmean

from transformers import PreTrainedTokenizerBase

_CODE = re.compile(r"^[ \t]*(```+|~~~+).*?(?:^[ \t]*\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_PARAGRAPH_END = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(r"(?:[.!?…][\"'”’)\]]*\s+|\n+)")
SEGMENT = 200  # tokens; LLMLingua's
CHUNK = 16  # tokens
SMOOTHED = 13  # neighbouring tokens; SpecPrefill's
_COARSE = 2.0  # the budget controller leaves so many times the budget; LLMLingua's k


@dataclass(frozen=True, slots=True)
class Piece:
    """A token's text, or that of several which share a character."""

    text: str
    tokens: Sequence[int]
    forced: bool  # whether it stays whatever its score is
    paragraph: int  # number of its paragraph, over all texts
    sentence: int  # number of its sentence, over all texts


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a text. A protected one is neither scored nor shortened."""

    text: str
    protected: bool


def stretches(text: str, question: str | None, *, code: bool) -> list[Stretch]:
    """Split a text at what must stay: the last occurrence of the question, and fenced code unless `code` is true."""
    kept = [] if code else [match.span() for match in _CODE.finditer(text)]
    start = text.rfind(question) if question else -1
    if question and start >= 0:
        kept.append((start, start + len(question)))
    parts, end = [], 0
    for first, last in sorted(kept):
        if last > end:
            parts += [Stretch(text[end : max(first, end)], False), Stretch(text[max(first, end) : last], True)]
            end = last
    return [part for part in (*parts, Stretch(text[end:], False)) if part.text]


def last_paragraph(text: str) -> str:
    """Return the text after its last empty line, without white space around it; the question, by default."""
    return _PARAGRAPH_END.split(text.strip())[-1]


def split(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, force_tokens: Collection[str] = ()
) -> list[list[Piece]]:
    """Return the pieces of each text. Those with the texts `force_tokens`, or white space around, are forced."""
    paragraph = sentence = 0  # numbers of the text's first ones
    split_texts: list[list[Piece]] = []
    for text in texts:
        paragraph_ends, sentence_ends = _ends(_PARAGRAPH_END, text), _ends(_SENTENCE_END, text)
        pieces: list[Piece] = []
        for start, end, tokens in _token_spans(text, tokenizer):
            shown = text[start:end]
            forced = shown in force_tokens or shown.strip() in force_tokens
            begin = start + len(shown) - len(shown.lstrip())  # many tokens begin with a space
            numbers = paragraph + bisect_right(paragraph_ends, begin), sentence + bisect_right(sentence_ends, begin)
            pieces.append(Piece(shown, tokens, forced, *numbers))
        paragraph, sentence = paragraph + len(paragraph_ends) + 1, sentence + len(sentence_ends) + 1
        split_texts.append(pieces)
    return split_texts


def force_last(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """Force the pieces of the last tokens."""
    left, index = count, len(pieces)
    while left > 0 and index > 0:
        index -= 1
        left -= len(pieces[index].tokens)
    return [*pieces[:index], *(replace(piece, forced=True) for piece in pieces[index:])]


def _ends(pattern: re.Pattern[str], text: str) -> list[int]:
    return [match.end() for match in pattern.finditer(text)]


def _token_spans(text: str, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, int, list[int]]]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts: list[int] = []
    tokens: list[list[int]] = []
    for token, (start, _) in zip(encoded.input_ids, encoded.offset_mapping, strict=True):
        if starts and start <= starts[-1]:
            tokens[-1].append(token)
        else:
            starts.append(start if starts else 0)
            tokens.append([token])
    return [(start, end, piece) for (start, end), piece in zip(pairwise([*starts, len(text)]), tokens, strict=True)]


def keep_perplexity(pieces: Sequence[Piece], scores: Sequence[float], budget: int) -> list[bool]:
    """Choose pieces with high scores: first paragraphs, then within segments. budget: tokens to keep."""
    kept = keep_groups(pieces, scores, round(_COARSE * budget), [piece.paragraph for piece in pieces])
    chosen = iter(keep_tokens(list(compress(pieces, kept)), list(compress(scores, kept)), budget))
    return [keep and next(chosen) for keep in kept]


def keep_sentences(pieces: Sequence[Piece], scores: Sequence[float], budget: int) -> list[bool]:
    """Choose whole sentences by their mean score; those with a forced piece stay."""
    return keep_groups(pieces, scores, budget, [piece.sentence for piece in pieces])


def keep_chunks(pieces: Sequence[Piece], attention: Sequence[float], free: Sequence[bool], budget: int) -> list[bool]:
    """Choose chunks of consecutive free pieces by their mean attention. Pieces that are not free stay.

    SpecPrefill (Liu et al., arXiv 2502.02789, section 3): attention is smoothed over neighbours first.

    budget: free tokens to keep.
    """
    scores, chunks = list(compress(_smooth(attention), free)), list(compress(_chunks(pieces, free), free))
    chosen = iter(keep_groups(list(compress(pieces, free)), scores, budget, chunks))
    return [not is_free or next(chosen) for is_free in free]


def keep_groups(pieces: Sequence[Piece], scores: Sequence[float], budget: int, groups: Sequence[int]) -> list[bool]:
    """Choose groups by their mean score, those with a forced piece first, as long as they fit into the budget.

    The best group stays even if it alone is larger. groups: a number for each piece; equal ones are adjacent.
    """
    sizes: dict[int, int] = {}
    means: dict[int, float] = {}
    forced: set[int] = {group for group, piece in zip(groups, pieces, strict=True) if piece.forced}
    for group, members in groupby(range(len(pieces)), key=groups.__getitem__):
        indices = list(members)
        sizes[group] = sum(len(pieces[i].tokens) for i in indices)
        means[group] = fmean(scores[i] for i in indices)
    chosen = set(forced)
    room = budget - sum(sizes[group] for group in forced)
    for group in sorted(means.keys() - forced, key=lambda group: (-means[group], group)):
        if sizes[group] <= room or not chosen:
            chosen.add(group)
            room -= sizes[group]
    return [group in chosen for group in groups]


def keep_tokens(pieces: Sequence[Piece], scores: Sequence[float], budget: int) -> list[bool]:
    """Choose pieces, in each segment the same share of its tokens: forced ones, then the best; the first of equal ones.

    Only forced pieces exceed the budget.
    """
    total = sum(len(piece.tokens) for piece in pieces)
    kept = [False] * len(pieces)
    used = seen = 0
    for segment in _segments(pieces):
        seen += sum(len(pieces[i].tokens) for i in segment)
        room = budget * seen // max(total, 1) - used  # what earlier segments left is not lost
        for index in sorted(segment, key=lambda i: (not pieces[i].forced, -scores[i], i)):
            size = len(pieces[index].tokens)
            if pieces[index].forced or size <= room:
                kept[index] = True
                room -= size
                used += size
    return kept


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and its neighbours, at most SMOOTHED in all."""
    sums = list(accumulate(values, initial=0.0))
    half = SMOOTHED // 2
    spans = [(max(0, index - half), min(len(values), index + half + 1)) for index in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in spans]


def _chunks(pieces: Sequence[Piece], free: Sequence[bool]) -> list[int]:
    """Return the number of each piece's chunk; one ends where it has CHUNK tokens, or beside what is not free."""
    chunk = size = 0
    numbers: list[int] = []
    for piece, is_free in zip(pieces, free, strict=True):
        if size >= CHUNK or not is_free:
            chunk, size = chunk + 1, 0
        numbers.append(chunk)
        size = size + len(piece.tokens) if is_free else CHUNK
    return numbers


def _segments(pieces: Sequence[Piece]) -> Iterable[list[int]]:
    """Yield the indices of the pieces of each segment: consecutive pieces of at least SEGMENT tokens."""
    segment: list[int] = []
    size = 0
    for index, piece in enumerate(pieces):
        segment.append(index)
        size += len(piece.tokens)
        if size >= SEGMENT:
            yield segment
            segment, size = [], 0
    if segment:
        yield segment
