"""Streamed text is what the tokenizer's own `decode` says, whatever its decoder rewrites."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from typing_extensions import override

from actors.coordinator.active_request import TextStream
from decoding.sampling.params import SamplingParams
from decoding.tokenizers.detokenizer import Detokenizer, TextDecoder
from deployments.apis.decoder import TokenDecoder, text_decoder
from tests.support.byte_level import byte_level_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]
MARKS = [".", ",", "!", "?", "'", "n", "n't", "'s", "'m", "'ve", "'re", "s", "r", "v", "é", "日", "a", "do", "the"]
PIECES = [*MARKS, "▁", "▁▁", *(f"▁{mark}" for mark in MARKS)]
INCOMPLETE = "\ufffd"


def _wrapped(tokenizer: Tokenizer, decoder: decoders.Decoder | None, **options: Any) -> PreTrainedTokenizerBase:
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<tag>", lstrip=True, rstrip=True), AddedToken("[x]", single_word=True)])
    tokenizer.add_special_tokens([AddedToken("<call>", lstrip=True, rstrip=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **options
    )


def _bpe(pieces: list[str], *steps: decoders.Decoder, **options: Any) -> PreTrainedTokenizerBase:
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys([*SPECIAL, *pieces]))}
    decoder = decoders.Sequence(list(steps)) if steps else None
    return _wrapped(Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>")), decoder, **options)


def _unigram(decoder: decoders.Decoder, **options: Any) -> PreTrainedTokenizerBase:
    pieces = [(piece, -1.0) for piece in [*SPECIAL, *BYTES, *PIECES]]
    return _wrapped(Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True)), decoder, **options)


def _wordpiece(*, cleanup: bool, **options: Any) -> PreTrainedTokenizerBase:
    words = [*SPECIAL, *MARKS, *(f"##{mark}" for mark in MARKS)]
    model = models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    return _wrapped(Tokenizer(model), decoders.WordPiece("##", cleanup=cleanup), **options)


class _Spelled(PreTrainedTokenizer):
    """A tokenizer in Python, of single characters, which cleans up its texts as it likes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(unk_token="?", **options)

    @property
    @override
    def vocab_size(self) -> int:
        return 128

    @override
    def get_vocab(self) -> dict[str, int]:
        return {chr(index): index for index in range(128)}

    @override
    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    @override
    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)

    @override
    def clean_up_tokenization(self, text: str) -> str:
        return " ".join(text.split())


REPLACE, FUSE, DATA = decoders.Replace("▁", " "), decoders.Fuse(), decoders.ByteFallback()
CLEAN = {"clean_up_tokenization_spaces": True}
FORCED = CLEAN | {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}
SUFFIXED = [*(f"{mark}</w>" for mark in MARKS), *MARKS]
KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte-level": lambda: _wrapped(Tokenizer.from_str(byte_level_tokenizer().to_str()), decoders.ByteLevel()),
    "llama": lambda: _bpe([*BYTES, *PIECES], REPLACE, DATA, FUSE, decoders.Strip(" ", 1, 0)),
    "llama, cleaned": lambda: _bpe([*BYTES, *PIECES], REPLACE, DATA, FUSE, decoders.Strip(" ", 1, 0), **FORCED),
    "llama, flag ignored": lambda: _bpe([*BYTES, *PIECES], REPLACE, DATA, FUSE, **CLEAN),
    "unigram": lambda: _unigram(decoders.Sequence([DATA, decoders.Metaspace()])),
    "unigram, cleaned": lambda: _unigram(decoders.Sequence([DATA, decoders.Metaspace()]), **CLEAN),
    "metaspace": lambda: _unigram(decoders.Metaspace()),
    "wordpiece": lambda: _wordpiece(cleanup=True),
    "wordpiece, plain": lambda: _wordpiece(cleanup=False),
    "wordpiece, cleaned": lambda: _wordpiece(cleanup=False, **CLEAN),
    "wordpiece, cleaned twice": lambda: _wordpiece(cleanup=True, **CLEAN),
    "suffix": lambda: _bpe(SUFFIXED, decoders.BPEDecoder("</w>")),
    "suffix, cleaned": lambda: _bpe(SUFFIXED, decoders.BPEDecoder("</w>"), **FORCED),
    "ctc": lambda: _bpe(["<pad>", "|", *MARKS], decoders.CTC()),
    "none": lambda: _bpe(MARKS),
    "none, cleaned": lambda: _bpe(MARKS, **FORCED),
    "stripped": lambda: _bpe(PIECES, REPLACE, FUSE, decoders.Strip(" ", 3, 0)),
    "fused first": lambda: _bpe([*BYTES, *PIECES], DATA, FUSE, REPLACE, decoders.Strip(" ", 1, 0)),
    "replaced across tokens": lambda: _bpe(PIECES, REPLACE, FUSE, decoders.Replace("n't", "not")),
    "replaced by pattern": lambda: _bpe(PIECES, REPLACE, FUSE, decoders.Replace(Regex(" +$"), "")),
    "python": _Spelled,
    "python, cleaned": lambda: _Spelled(**CLEAN),
}
NEVER_LATE = ("byte-level", "metaspace", "wordpiece", "wordpiece, plain", "suffix", "ctc", "none", "stripped", "python")


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerBase:
    return KINDS[kind]()


def ids(tokenizer: PreTrainedTokenizerBase, *pieces: str) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[piece] for piece in pieces]


def random_tokens(rng: random.Random, size: int) -> list[int]:
    """Draw tokens of all kinds, or of the last ones, among which are no bytes, or a few again and again."""
    few = [rng.randrange(size) for _ in range(3)]
    choices = rng.choice([range(size), range(max(0, size - 60), size), few])
    return [rng.choice(choices) for _ in range(rng.randint(1, 30))]


def streamed(decoder: TextDecoder, prompt: list[int], answer: list[int], rng: random.Random) -> str:
    stream = TextStream(decoder, prompt, SamplingParams(max_tokens=100, stop=("☃☃",)))
    cuts = sorted(rng.choices(range(len(answer) + 1), k=4))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    return "".join(stream.add(piece, None).text for piece in pieces if piece) + stream.flush()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [None, frozenset({1})])
def test_streamed_text_is_the_tokenizers_own(kind: str, hidden: frozenset[int] | None) -> None:
    """On 400 random texts, some after a prompt whose text the answer leaves as it is."""
    tokenizer, rng, compared = tokenizer_of(kind), random.Random(1), 0
    size = len(tokenizer) + 2  # some ids have no token
    decoder = text_decoder(tokenizer, size, hidden=hidden)

    def decode(tokens: list[int]) -> str:
        shown = [token for token in tokens if token not in (hidden or ())]
        return str(tokenizer.decode(shown, skip_special_tokens=hidden is None))

    for trial in range(400):
        tokens = random_tokens(rng, size if isinstance(tokenizer, PreTrainedTokenizerFast) else 128)
        length = rng.randint(0, len(tokens)) if trial % 3 == 0 else 0
        before, whole = decode(tokens[:length]), decode(tokens)
        assert decoder(tokens) == whole
        text = streamed(decoder, tokens[:length], tokens[length:], rng)
        if whole.startswith(before) and not before.endswith(INCOMPLETE):
            compared += 1
            assert text == whole[len(before) :]
    assert compared > 300


@pytest.mark.parametrize("kind", NEVER_LATE)
def test_what_no_token_can_change_is_shown_at_once(kind: str) -> None:
    tokenizer, rng = tokenizer_of(kind), random.Random(2)
    for _ in range(50):
        tokens = random_tokens(rng, len(tokenizer))
        detokenizer, text = Detokenizer(text_decoder(tokenizer, len(tokenizer))), ""
        for length, token in enumerate(tokens, 1):
            text += detokenizer.add([token])
            decoded = str(tokenizer.decode(tokens[:length], skip_special_tokens=True))
            assert text == decoded.rstrip(INCOMPLETE)


def test_only_spaces_that_may_go_wait() -> None:
    tokenizer = tokenizer_of("unigram, cleaned")
    detokenizer = Detokenizer(text_decoder(tokenizer, len(tokenizer)))
    pieces = ["▁the", "▁do", "▁n't", "a", "▁", "▁a", "▁n", "a", "▁'", "▁do", "▁'", "s", "▁", "."]
    texts = [detokenizer.add([token]) for token in ids(tokenizer, *pieces)]
    assert texts == ["the", " do", "n't", "a", "", "  a", "", " na", "", "'do", "", "'s", "", "."]


@pytest.mark.parametrize("piece", ["<0x41>", "<0xE6>", "<s>"])
def test_long_runs_are_decoded_a_few_times_at_most(piece: str) -> None:
    tokenizer, decoded = tokenizer_of("llama"), 0
    decoder = text_decoder(tokenizer, len(tokenizer))

    def watched(tokens: list[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return decoder.decode(tokens)

    detokenizer = Detokenizer(TextDecoder(watched, decoder.unsettled))
    token, other = ids(tokenizer, piece, "▁the")
    tokens = [*[other] * 7, *[token] * 3000, *[other] * 100]
    text = detokenizer.add(tokens) + detokenizer.flush()
    assert text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert decoded < 30_000


def test_a_stop_string_is_found_in_the_text_that_was_cleaned_up() -> None:
    tokenizer = tokenizer_of("unigram, cleaned")
    stream = TextStream(text_decoder(tokenizer, 999), [], SamplingParams(max_tokens=20, stop=("don't",)))
    piece = stream.add(ids(tokenizer, "▁a", "▁do", "▁n't", "▁the"), None)
    assert (piece.text, piece.used, piece.stop_reason) == ("a ", 3, "don't")


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        (["▁the", "▁"], ["."], "."),  # the prompt's space goes
        (["▁the", "▁"], ["a"], "a"),
        (["▁the", "▁n"], ["'", "▁"], "' "),
        (["▁the", "▁'"], ["▁s"], "s"),
        (["<0xE6>", "<0x97>"], ["<0xA5>", "."], "日."),
    ],
)
def test_an_answer_repeats_no_character_of_its_prompt(prompt: list[str], answer: list[str], text: str) -> None:
    tokenizer = tokenizer_of("unigram, cleaned")
    detokenizer = TokenDecoder(tokenizer, len(tokenizer)).detokenizer(ids(tokenizer, *prompt))
    assert detokenizer.add(ids(tokenizer, *answer)) + detokenizer.flush() == text
