"""Splits a text into pieces, paragraphs and sentences, and finds what must stay. Knows no probabilities.

Joined, the pieces are the text.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

_CODE = re.compile(r"^[ \t]*(```+|~~~+).*?(?:^[ \t]*\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_PARAGRAPH_END = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(r"(?:[.!?…][\"'”’)\]]*\s+|\n+)")


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
    """Split a text at what must stay: the last occurrence of the question, and fenced code.

    Args:
        question: None: the text has none.
        code: whether fenced code may be shortened.
    """
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
    """Return the pieces of each text.

    force_tokens: pieces with these texts are forced, with or without white space around them.
    """
    paragraph = sentence = 0
    split_texts: list[list[Piece]] = []
    for text in texts:
        paragraph_ends, sentence_ends = _ends(_PARAGRAPH_END, text), _ends(_SENTENCE_END, text)
        pieces: list[Piece] = []
        for start, end, tokens in _token_spans(text, tokenizer):
            shown = text[start:end]
            forced = shown in force_tokens or shown.strip() in force_tokens
            begin = start + len(shown) - len(shown.lstrip())  # many tokens begin with a space
            while paragraph_ends and begin >= paragraph_ends[0]:
                paragraph_ends.pop(0)
                paragraph += 1
            while sentence_ends and begin >= sentence_ends[0]:
                sentence_ends.pop(0)
                sentence += 1
            pieces.append(Piece(shown, tokens, forced, paragraph, sentence))
        paragraph, sentence = paragraph + 1, sentence + 1
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
    """Return begin, end and tokens of each piece."""
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
