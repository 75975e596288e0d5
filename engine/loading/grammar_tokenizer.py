"""Tokenizers for grammars, which need the bytes of each token. Knows nothing of grammars."""

from collections.abc import Collection

from llguidance import LLTokenizer, TokenizerWrapper
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from decoding.errors import ConfigError

_UNKNOWN = "\ufffd"  # what decoders return for bytes that are not a character
_STRIDE = 7919  # a prime; changes the order of the tokens


def structure_tokenizer(tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int] = ()) -> LLTokenizer:
    """Convert one of transformers' tokenizers. Takes up to a second for a large vocabulary, so keep the result.

    Args:
        eos_token_ids: the model's end tokens; empty: the tokenizer's.

    Raises:
        ConfigError: structured output is not possible with this tokenizer; the message says why.
    """
    named = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ends = [token for token in eos_token_ids if token < len(tokenizer)] or named
    if not ends:
        raise ConfigError("structured output needs an end token, and neither the model nor its tokenizer names one")
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        try:
            return from_tokenizer(tokenizer, eos_token=ends)
        except ValueError:
            pass  # the file of this kind lacks the bytes; decode the tokens instead
    return LLTokenizer(TokenizerWrapper(_DecodedTokens(tokenizer, ends[0])), eos_token=ends)


class _DecodedTokens:
    """Decodes each token to get its bytes, and gives them the form that `TokenizerWrapper` takes.

    Tokens for parts of a character are left out, so answers can't have characters that need them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_id: int) -> None:
        """Raise ConfigError if a token's text depends on the tokens around it."""
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos_token_id, tokenizer.bos_token_id
        self.special_token_ids = sorted({*tokenizer.all_special_ids, eos_token_id})
        self._first = self._ordinary_token()
        self._begin = self._decode([self._first])
        special = set(self.special_token_ids)
        texts = ["" if token in special else self._text(token) for token in range(len(tokenizer))]
        self._check(texts)
        self.tokens = [text.encode() for text in texts]
        for token in special:
            self.tokens[token] = str(tokenizer.convert_ids_to_tokens(token)).encode()

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenize a text; needed for forced text only, which masks don't use."""
        text = text.decode() if isinstance(text, bytes) else text
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _ordinary_token(self) -> int:
        """Return a token to put before others, because decoders treat a text's first token differently."""
        tokens: list[int] = self._tokenizer.encode("a", add_special_tokens=False)
        if not tokens:
            raise ConfigError("structured output is not possible with a tokenizer that has no token for the letter a")
        return tokens[-1]

    def _text(self, token: int) -> str:
        """Return the text of a token that follows another; "" if it is not complete text."""
        text = self._decode([self._first, token])
        return text[len(self._begin) :] if text.startswith(self._begin) and _UNKNOWN not in text else ""

    def _check(self, texts: list[str]) -> None:
        """Raise ConfigError if all tokens together decode to other text than one by one."""
        count = len(texts)
        order = [token for token in (index * _STRIDE % count for index in range(count)) if texts[token]]
        if self._decode([self._first, *order]) != self._begin + "".join(texts[token] for token in order):
            raise ConfigError(
                "structured output is not possible with this tokenizer: what a token writes depends on those around it"
            )
