"""Hugging Face tokenizers: for grammars and for texts of other tokenizers, which need the bytes of tokens."""

from collections.abc import Callable, Collection
from copy import copy, deepcopy
from itertools import groupby

from llguidance import LLTokenizer, TokenizerWrapper
from llguidance.hf import from_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, TokenizersBackend

from decoding.errors import ConfigError
from decoding.tokenizers.text_aligner import Speller
from decoding.tokenizers.vocabulary import Vocabulary

_UNKNOWN = "\ufffd"  # what decoders return for bytes that are not a character
_STRIDE = 7919  # a prime; changes the order of the tokens
_ROLES = ("eos", "bos", "unk", "pad", "sep", "cls", "mask")  # the first counts if a token has several


def copy_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy for another thread. The tokens themselves, which never change, are shared where that is possible.

    A deep copy writes and reads all tokens as JSON, which takes seconds for 262,144 of them.
    """
    if not isinstance(tokenizer, TokenizersBackend):
        return deepcopy(tokenizer)
    copied = copy(tokenizer)
    copied._tokenizer = _copy_backend(tokenizer.backend_tokenizer)
    return copied


def _copy_backend(backend: Tokenizer) -> Tokenizer:
    copied = Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(backend, part)) is not None:
            setattr(copied, part, value)
    added = sorted(backend.get_added_tokens_decoder().items())
    for special, tokens in groupby((token for _, token in added), key=lambda token: token.special):
        (copied.add_special_tokens if special else copied.add_tokens)([*tokens])
    if backend.truncation is not None:
        copied.enable_truncation(**backend.truncation)
    if backend.padding is not None:
        copied.enable_padding(**backend.padding)
    copied.encode_special_tokens = backend.encode_special_tokens
    same = sorted(copied.get_added_tokens_decoder().items()) == added
    return copied if same else deepcopy(backend)  # some number added tokens in another order


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


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, size: int) -> Vocabulary:
    """Return the tokenizer's tokens. size: V, how many logits the model has."""
    added = [token for token in tokenizer.added_tokens_decoder.values() if not token.special]
    return Vocabulary.build(
        tokenizer.get_vocab(), control=_control(tokenizer), added=[token.content for token in added], size=size
    )


def speller_of(tokenizer: PreTrainedTokenizerBase, size: int) -> Speller:
    """Return what writes texts in the tokenizer's tokens, over a copy of it. size: V, as in `vocabulary_of`."""
    return Speller(vocabulary_of(tokenizer, size), _encoder(tokenizer))


def begins_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer puts its "bos" token before a text."""
    begin: list[int] = tokenizer.encode("a")
    return tokenizer.bos_token_id is not None and begin[:1] == [tokenizer.bos_token_id]


def _control(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the role of each control token, or its name if it has no role."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    control = {token: token for token in (*special, *tokenizer.all_special_tokens)}
    named = ((getattr(tokenizer, f"{role}_token", None), role) for role in reversed(_ROLES))
    return control | {token: role for token, role in named if token is not None}


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Return a function from text to ids. Fast tokenizers treat the names of control tokens in it as text."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        own = copy_tokenizer(tokenizer)
        return lambda text: list(own.encode(text, add_special_tokens=False))
    backend = _copy_backend(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)
