"""Token ids as text and bytes, by transformers' tokenizers."""

import json
from collections.abc import Callable, Container, Sequence, Set
from functools import lru_cache, partial
from typing import Any

from transformers import PreTrainedTokenizerBase, PythonBackend, SentencePieceBackend, TokenizersBackend

from decoding.tokenizers.detokenizer import EVERY_TOKEN, Detokenizer, TextDecoder
from deployments.apis.formats import has_think_tags, response_template, tool_format
from engine.loading.tokenizers import copy_tokenizer

_DECODES = TokenizersBackend._decode, PythonBackend._decode, SentencePieceBackend._decode
# What `PreTrainedTokenizerBase.clean_up_tokenization` replaces, in its order.
_CLEAN_UP = (
    *((f" {mark}", mark) for mark in (".", "?", "!", ",")),
    (" ' ", "'"),
    *((f" {ending}", ending) for ending in ("n't", "'m", "'s", "'ve", "'re")),
)
_CACHED_TOKENS = 16_384  # log-probabilities name the same tokens again and again
_SPACE = "▁"  # how SentencePiece writes it


def text_decoder(tokenizer: PreTrainedTokenizerBase, size: int, *, hidden: Set[int] | None = None) -> TextDecoder:
    """Make a decoder to the text of the tokenizer's own `decode`, with a copy of the tokenizer.

    size: V, above all ids. hidden: tokens that are left out; None: the special ones.
    """
    copied, options = copy_tokenizer(tokenizer), {"skip_special_tokens": hidden is None}
    if not is_usual(copied):
        return TextDecoder(_decode(copied, options, hidden), EVERY_TOKEN if cleans_up(copied) else ())
    decode = _decode(copied, options | {"clean_up_tokenization_spaces": False}, hidden)
    return TextDecoder(decode, _unsettled(copied, size, hidden), _CLEAN_UP if cleans_up(copied) else ())


def is_usual(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer decodes by transformers' own methods."""
    kind = type(tokenizer)
    usual = PreTrainedTokenizerBase.decode, PreTrainedTokenizerBase.clean_up_tokenization
    return (kind.decode, kind.clean_up_tokenization) == usual and kind._decode in _DECODES


def cleans_up(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's `decode` removes spaces from the text, before a full stop for instance."""
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    if not isinstance(tokenizer, TokenizersBackend) or type(tokenizer.backend_tokenizer.model).__name__ != "BPE":
        return True
    return bool(tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output)


def decoder_steps(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the steps of the tokenizers library's decoder, as tokenizer.json writes them."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return []
    try:
        state = decoder.__getstate__()  # the state of the whole tokenizer takes 0.3 s
    except Exception:  # decoders written in Python raise a plain Exception
        return []
    return _steps(json.loads(state))


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a decoder's steps, those of sequences in sequences included."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def _decode(
    tokenizer: PreTrainedTokenizerBase, options: dict[str, bool], hidden: Set[int] | None
) -> Callable[[list[int]], str]:
    decode: Callable[[list[int]], Any] = partial(tokenizer.decode, **options)
    if is_usual(tokenizer) and isinstance(tokenizer, TokenizersBackend):  # half the time for the same text
        decode = partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=options["skip_special_tokens"])
    if hidden is None:
        return decode
    return lambda tokens: str(decode([token for token in tokens if token not in hidden]))


def _unsettled(tokenizer: PreTrainedTokenizerBase, size: int, hidden: Set[int] | None) -> Container[int]:
    """Return the tokens that may change the text before them.

    A run of bytes becomes U+FFFDs, each of them, if the whole run is no text. Tokens without a text don't end it.
    """
    steps = decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    if "Fuse" in kinds and not all(map(_is_local, steps[kinds.index("Fuse") :])):
        return EVERY_TOKEN
    if "ByteFallback" not in kinds:
        return ()
    assert isinstance(tokenizer, TokenizersBackend)
    backend = tokenizer.backend_tokenizer
    if hidden is None:
        hidden = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    data = {number for byte in range(256) if (number := backend.token_to_id(f"<0x{byte:02X}>")) is not None}
    return frozenset(data | hidden | {number for number in range(size) if backend.id_to_token(number) is None})


def _is_local(step: dict[str, Any]) -> bool:
    """Whether a step of a decoder, run on a whole text, looks at single characters or at its ends."""
    one_character = step["type"] == "Replace" and len(step["pattern"].get("String", "  ")) == 1
    return one_character or step["type"] in ("Fuse", "Strip", "Metaspace")


class TokenDecoder:
    """Decoder of a target's tokens, with its own copy of the tokenizer. Not thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        """size: V. Requests may name ids below it."""
        self.size = size
        self._tokenizer = copy_tokenizer(tokenizer)
        self._special = set(tokenizer.all_special_ids)
        self.bytes_of = lru_cache(_CACHED_TOKENS)(self._bytes_of)
        self.text_of = lru_cache(_CACHED_TOKENS)(self._text_of)
        self._is_byte_level = any(step["type"] == "ByteLevel" for step in decoder_steps(tokenizer))
        self._decodes_in_backend = is_usual(tokenizer) and not cleans_up(tokenizer)
        self.decode = text_decoder(tokenizer, size)  # without special tokens
        self.tool_format = tool_format(tokenizer.chat_template)
        self.has_think_tags = has_think_tags(tokenizer.chat_template)
        self.response_template = response_template(tokenizer)

    def _bytes_of(self, token: int) -> bytes:
        """UTF-8 bytes of a token; for a special token, its name."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):  # the embedding has more rows than the tokenizer has tokens
            return b""
        if self._is_byte_level and token not in self._special and all(char in _BYTES for char in piece):
            return bytes(_BYTES[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # SentencePiece spells a byte like this
            return bytes([int(piece[3:5], 16)])
        if piece.startswith(_SPACE) and token not in self._special:  # a lone token's space would be stripped
            return piece.replace(_SPACE, " ").encode()
        return str(self._tokenizer.decode([token])).encode()

    def _text_of(self, token: int) -> str:
        """Text of a token; OpenAI's `bytes:\\xe2\\x82` if its bytes are not whole characters."""
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def decode_with_special(self, tokens: list[int]) -> str:
        """Text of the tokens, special tokens by name. Releases the interpreter's lock where the tokenizer allows."""
        if self._decodes_in_backend:
            return str(self._tokenizer.backend_tokenizer.decode_batch([tokens], skip_special_tokens=False)[0])
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """Detokenizer that yields what each token after the prompt adds to the text."""
        return Detokenizer(self.decode, prompt=prompt)


def _byte_characters() -> dict[str, int]:
    """Byte of each printable character of byte-level tokenizers (Radford et al. 2019).

    Printable bytes stand for themselves, the others for the characters from 256 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()
