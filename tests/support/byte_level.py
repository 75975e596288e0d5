"""A tiny byte-level BPE tokenizer: bytes and frequent pairs are tokens, so rare characters take several."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_CORPUS = [
    "the cat sat on the mat, the end.",
    "naïve café — 漢字 漢語 👩‍👩‍👧 👍🏽 🇮🇱 שלום שלום é é",
    "def f(x):\n    return x\n",
]


@cache
def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


@cache
def byte_level_tokenizer_with_end() -> Tokenizer:
    """Return the same tokenizer with an end token."""
    tokenizer = Tokenizer.from_str(byte_level_tokenizer().to_str())
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer
