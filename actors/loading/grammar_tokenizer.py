"""What grammars need to know of a tokenizer: the bytes that each token writes. From one of transformers' tokenizers."""

from collections.abc import Collection

from llguidance import LLTokenizer, TokenizerWrapper
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from decoding.errors import ConfigError

_UNKNOWN = "\ufffd"  # what a decoder writes for bytes that are no character
_STRIDE = 7919  # a prime, to put tokens in another order


def structure_tokenizer(tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int] = ()) -> LLTokenizer:
    """Takes up to a second for a large vocabulary; keep it.

    Args:
        eos_token_ids: the model's end tokens; none: those that the tokenizer names.

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
            pass  # a kind whose bytes are not written in its file; decoding tells them
    return LLTokenizer(TokenizerWrapper(_DecodedTokens(tokenizer, ends[0])), eos_token=ends)


class _DecodedTokens:
    """The tokens' bytes by what they decode to, in the form that `TokenizerWrapper` takes.

    Tokens that write only a part of a character are left out, so the answer can't have characters that need them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_id: int) -> None:
        """Raises ConfigError if what a token writes depends on those around it."""
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
        """Tokenize; asked for forced text only, which masks do without."""
        text = text.decode() if isinstance(text, bytes) else text
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _ordinary_token(self) -> int:
        """One to stand before the others: decoders treat a text's first token in its own way."""
        tokens: list[int] = self._tokenizer.encode("a", add_special_tokens=False)
        if not tokens:
            raise ConfigError("structured output is not possible with a tokenizer that has no token for the letter a")
        return tokens[-1]

    def _text(self, token: int) -> str:
        """What a token writes after another; nothing if that is no text."""
        text = self._decode([self._first, token])
        return text[len(self._begin) :] if text.startswith(self._begin) and _UNKNOWN not in text else ""

    def _check(self, texts: list[str]) -> None:
        """Whether all tokens in some order write their texts in that order."""
        count = len(texts)
        order = [token for token in (place * _STRIDE % count for place in range(count)) if texts[token]]
        if self._decode([self._first, *order]) != self._begin + "".join(texts[token] for token in order):
            raise ConfigError(
                "structured output is not possible with this tokenizer: what a token writes depends on those around it"
            )
