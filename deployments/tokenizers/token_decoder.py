"""Tokens as clients see them: their texts and bytes. One thread uses it; it has a tokenizer of its own."""

import copy
import json
from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase, TokenizersBackend

from decoding.sampling.detokenizer import Detokenizer
from deployments.tokenizers.tool_format import tool_format

_KNOWN = 16_384  # tokens whose bytes are kept: log-probabilities name many, most of them again and again
_SPACE = "▁"  # how SentencePiece writes it


class Vocabulary:
    """A target's tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        """size: V; requests may name ids below it."""
        self.size = size
        self._tokenizer = copy.deepcopy(tokenizer)
        self._special = set(tokenizer.all_special_ids)
        self._known = lru_cache(_KNOWN)(self._look_up)
        self._texts = lru_cache(_KNOWN)(self._spell_token)
        self._is_byte_level = _is_byte_level(tokenizer)
        self.tool_format = tool_format(tokenizer.chat_template)  # how texts have calls of tools

    def bytes_of(self, token: int) -> bytes:
        """What the token stands for; of a special token its name."""
        return self._known(token)

    def _look_up(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):  # the model has more rows than the tokenizer has tokens
            return b""
        if self._is_byte_level and token not in self._special and all(char in _BYTES for char in piece):
            return bytes(_BYTES[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # SentencePiece's way to spell a byte
            return bytes([int(piece[3:5], 16)])
        if piece.startswith(_SPACE) and token not in self._special:  # a lone token's space would be stripped
            return piece.replace(_SPACE, " ").encode()
        return str(self._tokenizer.decode([token])).encode()

    def text_of(self, token: int) -> str:
        """The same as text; `bytes:\\xe2\\x82` where it is not whole characters, as OpenAI has it."""
        return self._texts(token)

    def _spell_token(self, token: int) -> str:
        return _spelled(self.bytes_of(token))

    def decode(self, tokens: list[int]) -> str:
        """The tokens as text, special ones left out."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def spell(self, tokens: list[int]) -> str:
        """The tokens as text, special ones by their names. Other threads run meanwhile, however long it takes."""
        if uses_backend(self._tokenizer):
            return str(self._tokenizer.backend_tokenizer.decode_batch([tokens], skip_special_tokens=False)[0])
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def pieces(self, prompt: Sequence[int]) -> Detokenizer:
        """Splits the text after a prompt into what each of its tokens adds."""
        return Detokenizer(self.decode, prompt=prompt)


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether tokens are written with a printable character for each byte."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return False
    try:
        state = decoder.__getstate__()  # of the decoder alone: the whole tokenizer's takes 0.3 s
    except Exception:  # the library raises no narrower one for a decoder written in Python
        return False
    return _mentions_byte_level(json.loads(state))


def uses_backend(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer decodes as the tokenizers library does, and adds nothing of its own."""
    usual = PreTrainedTokenizerBase.decode, TokenizersBackend._decode
    is_usual = (type(tokenizer).decode, getattr(type(tokenizer), "_decode", None)) == usual
    return is_usual and not tokenizer.clean_up_tokenization_spaces


def _spelled(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _mentions_byte_level(decoder: dict[str, object] | None) -> bool:
    """Whether a decoder of the tokenizers library, or one of those that it is a sequence of, is GPT-2's."""
    if decoder is None:
        return False
    parts = decoder.get("decoders")
    inner = isinstance(parts, list) and any(_mentions_byte_level(part) for part in parts)
    return decoder.get("type") == "ByteLevel" or inner


def _byte_characters() -> dict[str, int]:
    """The printable characters with which byte-level tokenizers write bytes: itself if it is one, else the next free
    one from 256 on (Radford et al. 2019)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()
