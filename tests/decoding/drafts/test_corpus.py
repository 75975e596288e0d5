"""Drafts from earlier texts: which they are, who sees them, and how much memory they take."""

import random
from pathlib import Path
from typing import Any

import pytest

from decoding.drafts.corpus import Corpus, CorpusLookup
from decoding.drafts.draft import NO_DRAFT
from decoding.drafts.lookup import MatchCalibration
from decoding.drafts.options import CorpusOptions

RNG = random.Random(3)
TEXT = [RNG.randrange(1000) for _ in range(1000)]


def corpus_of(*texts: list[int], tokens: int = 10_000, salt: str = "") -> Corpus:
    corpus = Corpus(CorpusOptions(tokens))
    for text in texts:
        corpus.add(text, salt)
    corpus.wait()
    return corpus


def draft(corpus: Corpus, text: list[int], *, salt: str = "", count: int = 4) -> list[int]:
    return CorpusLookup(corpus, salt, draft_length=count, calibration=MatchCalibration()).propose(text).tokens


def test_it_drafts_what_followed_in_another_text() -> None:
    corpus = corpus_of(TEXT)
    assert draft(corpus, [7, *TEXT[200:203]]) == TEXT[203:207]
    assert draft(corpus, TEXT[:990], count=32) == TEXT[990:]
    assert draft(corpus, [7, *TEXT[200:202]]) == []  # so short a match is chance


def test_the_newest_of_equal_matches_counts() -> None:
    corpus = corpus_of([1, 2, 3, 4], [5, 1, 2, 3, 6], [9, 9])
    assert draft(corpus, [8, 1, 2, 3]) == [6]


def test_texts_with_another_salt_are_unseen() -> None:
    corpus = corpus_of(TEXT, salt="secret")
    assert draft(corpus, TEXT[:500]) == draft(corpus, TEXT[:500], salt="other") == []
    assert draft(corpus, TEXT[:500], salt="secret") == TEXT[500:504]


def test_many_salts_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoding.drafts.corpus._MOST_SALTS", 3)
    corpus = corpus_of()
    for salt in "abcda":
        assert draft(corpus, TEXT[:5], salt=salt) == []
        corpus.add(TEXT[:9], salt)
        corpus.wait()
        assert draft(corpus, TEXT[:5], salt=salt) == TEXT[5:9]


def test_its_memory_is_bounded_and_the_oldest_goes_first() -> None:
    texts = [[RNG.randrange(50_000) for _ in range(500)] for _ in range(10)]
    corpus = corpus_of(*texts, tokens=2048)
    assert (corpus.tokens, corpus.size_bytes) == (2048, 40_960)
    drafted = [bool(draft(corpus, text[:300])) for text in texts]
    assert drafted == [False] * 6 + [True] * 4


@pytest.mark.parametrize("length", [1, 31, 32, 33, 256, 288, 289, 700, 1000])
def test_a_conversation_that_grows_is_kept_once(length: int) -> None:
    """Each text begins as the one before, as in an agent's loop; a little of it is the context of what is new."""
    corpus = corpus_of(TEXT[:length], TEXT, TEXT)
    assert corpus.tokens <= len(TEXT) + 2 * 33 + 3
    for end in (300, 600, 999):
        assert draft(corpus, TEXT[:end]) == TEXT[end : end + 4]


def test_the_next_replica_begins_with_the_texts_of_the_last(tmp_path: Path) -> None:
    """Also after a crash while one was written. Two replicas at a time have files of their own."""
    options = CorpusOptions(10_000, str(tmp_path / "texts"))
    first, second = Corpus(options), Corpus(options)
    for corpus, salt in ((first, "a"), (second, "b")):
        corpus.wait()
        corpus.add(TEXT[:600], salt)
        corpus.add(TEXT, salt)
        corpus.wait()
    size = (tmp_path / "texts" / "0.texts").stat().st_size
    assert size < 4 * (len(TEXT) + 40)
    assert (tmp_path / "texts" / "0.texts").stat().st_mode & 0o777 == 0o600
    del first, corpus
    with (tmp_path / "texts" / "0.texts").open("ab") as file:
        file.write(b"\x05\x00\x00\x00\x92")
    for _ in range(2):
        third = Corpus(options)
        third.wait()
        assert draft(third, TEXT[:900], salt="a") == TEXT[900:904]
        assert draft(third, TEXT[:900], salt="b") == []
        assert (tmp_path / "texts" / "0.texts").stat().st_size == size
        del third
    assert draft(second, TEXT[:900], salt="b") == TEXT[900:904]


def test_what_is_kept_is_bounded(tmp_path: Path) -> None:
    corpus = Corpus(CorpusOptions(1024, str(tmp_path)))
    texts = [[RNG.randrange(50_000) for _ in range(300)] for _ in range(20)]
    for text in texts:
        corpus.add(text, "")
    corpus.wait()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * 4 * 1024
    assert len(list(tmp_path.iterdir())) == 2
    del corpus
    again = Corpus(CorpusOptions(1024, str(tmp_path)))
    again.wait()
    assert [bool(draft(again, text[:100])) for text in texts[-3:]] == [True] * 3


def test_tokens_that_the_model_lacks_are_left_out() -> None:
    corpus = Corpus(CorpusOptions(1024), lambda tokens: max(tokens) < 500)
    corpus.add([*TEXT[:99], 500], "")
    corpus.wait()
    assert corpus.tokens == 0


def test_a_folder_that_cannot_be_written_costs_only_what_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    corpus = Corpus(CorpusOptions(1024, "/proc/no"))
    corpus.add(TEXT, "")
    corpus.wait()
    assert draft(corpus, TEXT[:500]) == TEXT[500:504]
    assert "can't be kept in /proc/no" in caplog.text


def test_nothing_is_drafted_from_nothing() -> None:
    looked_up: Any = CorpusLookup(corpus_of(), "", draft_length=4, calibration=MatchCalibration())
    assert looked_up.propose(TEXT) == NO_DRAFT
