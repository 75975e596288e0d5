"""Texts are split without loss, and shortened by the probabilities that the passes get."""

import math
from collections.abc import Sequence

import pytest
from transformers import PreTrainedTokenizerBase

from decoding.errors import InvalidRequestError
from deployments.configuration.paths import ROOT
from deployments.endpoints.compressor import CompressionOptions, Compressor
from deployments.endpoints.selection import last_paragraph, split, stretches
from engine.loading.settings import load_tokenizer

TEXT = "One day. It rained, naïve 日本 🙂!\n\nThe cat sat on the mat. And then?\nYes: it stayed."


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(str(ROOT / "models" / "target"))


def by_id(passes: Sequence[Sequence[int]]) -> list[list[float]]:
    """Score as a model would in which a token's surprise is its id."""
    return [[-float(token) for token in line[1:]] for line in passes]


def shorten(compressor: Compressor, texts: Sequence[str], **options: object) -> list[str]:
    compression = compressor.begin(texts, CompressionOptions(**{"method": "perplexity", **options}))  # type: ignore[arg-type]
    return compression.result(by_id(compression.passes))


def test_the_pieces_of_a_text_are_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    (pieces,) = split([TEXT], tokenizer)
    assert "".join(piece.text for piece in pieces) == TEXT
    assert [token for piece in pieces for token in piece.tokens] == tokenizer(TEXT, add_special_tokens=False).input_ids
    sentences = ["".join(piece.text for piece in pieces if piece.sentence == number) for number in range(5)]
    assert next(sentence.strip() for sentence in sentences if sentence.strip()) == "One day."
    assert {piece.paragraph for piece in pieces} == {0, 1}


def test_code_and_the_question_are_protected() -> None:
    text = "Look:\n```python\nx = 1\n\ny = 2\n```\nWhat is x? Tell me.\n\nWhat is x?"
    parts = stretches(text, "What is x?", code=False)
    assert "".join(part.text for part in parts) == text
    assert [part.text for part in parts if part.protected] == ["```python\nx = 1\n\ny = 2\n```", "What is x?"]
    assert [part.protected for part in stretches(text, None, code=True)] == [False]
    assert last_paragraph(text) == "What is x?"


def test_rate_1_changes_nothing_and_computes_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    compression = Compressor("m", tokenizer, 1024).begin([TEXT, "more"], CompressionOptions("sentence", rate=1))
    assert compression.passes == []
    assert compression.result([]) == [TEXT, "more"]


@pytest.mark.parametrize("method", ["perplexity", "sentence"])
def test_windows_cover_every_token_once(tokenizer: PreTrainedTokenizerBase, method: str) -> None:
    texts = [TEXT * 30]
    options = {"method": method, "rate": 0.4, "question": "Who sat?"}
    wide, narrow = (shorten(Compressor("m", tokenizer, size), texts, **options) for size in (4000, 400))
    assert wide == narrow  # with scores that depend on the token alone
    count = len(tokenizer(texts[0], add_special_tokens=False).input_ids)
    kept = len(tokenizer(wide[0], add_special_tokens=False).input_ids)
    assert 0.2 * count < kept < 0.6 * count


def test_surprising_tokens_and_forced_ones_stay(tokenizer: PreTrainedTokenizerBase) -> None:
    compressor = Compressor("m", tokenizer, 1024)
    (text,) = shorten(compressor, ["a b c d e f g h"], rate=0.5)
    ids = {piece.text: piece.tokens[0] for piece in split(["a b c d e f g h"], tokenizer)[0]}
    best = sorted(ids, key=lambda shown: -ids[shown])[: round(len(ids) / 2)]
    assert text == "".join(shown for shown in ids if shown in best)
    (kept,) = shorten(compressor, ["a b c d e f g h"], rate=0.25, force_tokens=frozenset("a"), keep_last=1)
    assert kept.startswith("a")
    assert kept.endswith("h")


def test_tokens_that_the_model_lacks_are_surprising(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "a b c d e f g h"
    lacking = split([text], tokenizer)[0][6].tokens[0]
    for question, kept in (("", "a b c g"), ("Who?", "a b c d")):  # a question changes nothing of what it lacks
        compression = Compressor("m", tokenizer, 1024).begin(
            [text], CompressionOptions("perplexity", rate=0.5, question=question)
        )
        scores = [[-math.inf if token == lacking else -1.0 for token in line[1:]] for line in compression.passes]
        assert compression.result(scores) == [kept]


def test_a_question_must_fit(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(InvalidRequestError, match=r"^question: "):
        shorten(Compressor("m", tokenizer, 300), [TEXT], rate=0.5, question="why? " * 300)
