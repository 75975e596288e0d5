"""Token ids as text and bytes, for answers. Knows no requests."""

import copy
from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from decoding.tokenizers.detokenizer import Detokenizer
from deployments.tokenizers.response_templates import response_template
from deployments.tokenizers.text_decoder import cleans_up, decoder_steps, is_usual, text_decoder
from deployments.tokenizers.tool_format import has_think_tags, tool_format

_CACHED_TOKENS = 16_384  # log-probabilities name the same tokens again and again
_SPACE = "▁"  # how SentencePiece writes it


class TokenDecoder:
    """Decoder of a target's tokens, with its own copy of the tokenizer. Not thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        """size: V. Requests may name ids below it."""
        self.size = size
        self._tokenizer = copy.deepcopy(tokenizer)
        self._special = set(tokenizer.all_special_ids)
        self._cached_bytes = lru_cache(_CACHED_TOKENS)(self._token_bytes)
        self._cached_text = lru_cache(_CACHED_TOKENS)(self._token_text)
        self._is_byte_level = any(step["type"] == "ByteLevel" for step in decoder_steps(tokenizer))
        self._decodes_in_backend = is_usual(tokenizer) and not cleans_up(tokenizer)
        self.decode = text_decoder(tokenizer, size)  # without special tokens
        self.tool_format = tool_format(tokenizer.chat_template)
        self.has_think_tags = has_think_tags(tokenizer.chat_template)
        self.response_template = response_template(tokenizer)

    def bytes_of(self, token: int) -> bytes:
        """UTF-8 bytes of a token; for a special token, its name."""
        return self._cached_bytes(token)

    def _token_bytes(self, token: int) -> bytes:
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

    def text_of(self, token: int) -> str:
        """Text of a token; OpenAI's `bytes:\\xe2\\x82` if its bytes are not whole characters."""
        return self._cached_text(token)

    def _token_text(self, token: int) -> str:
        return _text_or_bytes(self.bytes_of(token))

    def decode_with_special(self, tokens: list[int]) -> str:
        """Text of the tokens, special tokens by name. Releases the interpreter's lock where the tokenizer allows."""
        if self._decodes_in_backend:
            return str(self._tokenizer.backend_tokenizer.decode_batch([tokens], skip_special_tokens=False)[0])
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """Detokenizer that yields what each token after the prompt adds to the text."""
        return Detokenizer(self.decode, prompt=prompt)


def _text_or_bytes(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _byte_characters() -> dict[str, int]:
    """Byte of each printable character of byte-level tokenizers (Radford et al. 2019).

    Printable bytes stand for themselves, the others for the characters from 256 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()
