"""Grammars get the right bytes of each token, for tokenizers of several kinds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from decoding.errors import ConfigError
from decoding.grammars.grammar import Grammar
from decoding.sampling.params import Structure
from engine.loading.grammar_tokenizer import structure_tokenizer
from tests.support.structures import allowed

CORPUS = ['the cat sat on the mat, {"a": 1} and {"b": [2, 3]}'] * 20
SPECIAL = {"unk_token": "[UNK]", "eos_token": "[SEP]"}


def fast(model: Any, trainer: Any, pre_tokenizer: Any, decoder: Any) -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def word_pieces() -> PreTrainedTokenizerBase:
    trainer = trainers.WordPieceTrainer(vocab_size=100, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    model = models.WordPiece(unk_token="[UNK]")
    return fast(model, trainer, pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False))


def unigrams() -> PreTrainedTokenizerBase:
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["[UNK]", "[SEP]"], unk_token="[UNK]", show_progress=False
    )
    return fast(models.Unigram(), trainer, pre_tokenizers.Metaspace(), decoders.Metaspace())


KINDS = {
    "byte-level": lambda: AutoTokenizer.from_pretrained(Path("models/target")),
    "word pieces": word_pieces,
    "unigrams": unigrams,
    "in Python": ByT5Tokenizer,
}


def allowed_texts(tokenizer: LLTokenizer, pattern: str) -> set[bytes]:
    """Return what the first token of an answer may write."""
    matcher = Grammar(Structure(kind="regex", definition=pattern), tokenizer).matcher()
    mask = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
    ends = {*tokenizer.eos_tokens}
    return {bytes(tokenizer.decode_bytes([token])) for token in allowed(mask) - ends}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_write_what_they_decode_to(kind: str) -> None:
    tokenizer: PreTrainedTokenizerBase = KINDS[kind]()
    known = structure_tokenizer(tokenizer)
    assert known.vocab_size == len(tokenizer)
    tokens: list[int] = tokenizer.encode(CORPUS[0], add_special_tokens=False)
    first = str(tokenizer.decode(tokens[:1]))
    for end in range(2, len(tokens) + 1):
        text = first + known.decode_bytes(tokens[1:end]).decode()
        assert text == str(tokenizer.decode(tokens[:end]))
    assert known.eos_tokens == [tokenizer.eos_token_id]
    texts = allowed_texts(known, "[a-z ]+")
    assert {text.decode().strip(" abcdefghijklmnopqrstuvwxyz") for text in texts} == {""}
    assert any(b"a" in text for text in texts)


def test_special_tokens_are_no_text() -> None:
    known = structure_tokenizer(AutoTokenizer.from_pretrained(Path("models/target")))
    assert all(not text.startswith(b"<|") for text in allowed_texts(known, "(.|\n)*"))


def test_the_end_tokens_of_the_model_count() -> None:
    tokenizer = AutoTokenizer.from_pretrained(Path("models/target"))
    assert structure_tokenizer(tokenizer, (0, 2, 4_000)).eos_tokens == [0, 2]
    assert structure_tokenizer(tokenizer, (4_000,)).eos_tokens == [2]


def test_without_an_end_token_there_is_no_structure() -> None:
    tokenizer = word_pieces()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="end token"):
        structure_tokenizer(tokenizer)


def test_a_decoder_that_looks_around_is_refused() -> None:
    class Shouting(ByT5Tokenizer):
        def decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str:
            text = str(super().decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs))
            return text.upper() if len(text) > 9 else text

    with pytest.raises(ConfigError, match="depends on those around it"):
        structure_tokenizer(Shouting())


def test_a_tokenizer_without_letters_is_refused() -> None:
    class Silent(ByT5Tokenizer):
        def encode(self, text: Any, *arguments: Any, **options: Any) -> list[int]:
            return []

    with pytest.raises(ConfigError, match="the letter a"):
        structure_tokenizer(Silent())
