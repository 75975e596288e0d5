"""Reference for members with another tokenizer: by strings, in float64, encoding and running every text from scratch.

Uses nothing of `decoding/tokenizers/logits_mapping.py`, `decoding/tokenizers/text_aligner.py` or `actors/`.
"""

import math
from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from decoding.tokenizers.vocabulary import Meaning
from tests.support.tokenizers import vocabulary_of

_SPACED = "▁"  # tokenizers with this token write a space before a text


def adds_space(tokenizer: Tokenizer) -> bool:
    return tokenizer.token_to_id(_SPACED) is not None


def meaning(tokenizer: Tokenizer, token: int, *, fresh: bool) -> Meaning | None:
    """Return the bytes or role that a token stands for. fresh: at the beginning of a text."""
    value = vocabulary_of(tokenizer).meanings[token]
    return value.removeprefix(b" ") if fresh and adds_space(tokenizer) and isinstance(value, bytes) else value


@cache
def first_tokens(writer: Tokenizer, other: Tokenizer, *, fresh: bool = False) -> list[int]:
    """Return the first token with which `writer` spells each token of `other`, or −1."""
    return [
        _first_token(writer, meaning(other, token, fresh=fresh), fresh) for token in range(vocabulary_of(other).size)
    ]


def _first_token(writer: Tokenizer, string: Meaning | None, fresh: bool) -> int:
    ids = vocabulary_of(writer).ids
    if not isinstance(string, bytes):
        return -1 if string is None else ids.get(string, -1)
    space = b" " if fresh and adds_space(writer) else b""
    if space + string in ids:  # "a" is written as " a" at the beginning, or else as " " and "a"
        return ids[space + string]
    tokens = _spell(writer, string, fresh)
    parts = (space + string[:end] for end in range(len(string) - 1, 0, -1))
    return tokens[0] if tokens else next((ids[part] for part in parts if part in ids), -1)


def _spell(writer: Tokenizer, string: bytes, fresh: bool) -> list[int]:
    try:
        text = string.decode()
    except UnicodeDecodeError:
        return []
    context = "" if fresh or not adds_space(writer) else "\x01"  # a byte that no merge joins to the text
    tokens: list[int] = writer.encode(context + text, add_special_tokens=False).ids[2 * len(context) :]
    pieces = [meaning(writer, token, fresh=fresh and index == 0) for index, token in enumerate(tokens)]
    return tokens if b"".join(piece for piece in pieces if isinstance(piece, bytes)) == string else []


class SlowMember:
    """A model with its tokenizer that reads the tokens of another tokenizer, the leader's."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, leader: Tokenizer) -> None:
        self._model, self._tokenizer, self._leader = model, tokenizer, leader

    def read(self, tokens: Sequence[int]) -> tuple[list[int], bool] | None:
        """Return its own tokens for a text, and whether the text has control tokens only.

        None: it can't spell the bytes of an incomplete character.
        """
        own, leader = vocabulary_of(self._tokenizer), vocabulary_of(self._leader)
        pieces = [leader.meanings[token] for token in tokens]
        data = b"".join(piece for piece in pieces if isinstance(piece, bytes))
        if adds_space(self._leader):
            data = data.removeprefix(b" ")
        decoder = getincrementaldecoder("utf-8")("replace")
        whole = decoder.decode(data)
        begin = [own.ids[piece] for piece in pieces if isinstance(piece, str) and piece in own.ids]
        pending = [own.ids.get(bytes([byte]), -1) for byte in decoder.getstate()[0]]
        if -1 in pending:
            return None
        text: list[int] = self._tokenizer.encode(whole, add_special_tokens=False).ids if whole else []
        return begin + text + pending, all(isinstance(piece, str) for piece in pieces)

    @torch.no_grad()
    def say(self, tokens: Sequence[int], count: int) -> tuple[Tensor, list[int]] | None:
        """Return log-probabilities of the leader's tokens, [V] float64, and its `count` best tokens as the leader's.

        count: if not 0, a token to which no own token maps gets the probability of the first own token that spells it.
        """
        reading = self.read(tokens)
        if reading is None:
            return None
        own, fresh = reading
        probs = self._model(torch.tensor([own])).logits[0, -1].double().softmax(dim=-1).tolist()
        mapping = first_tokens(self._leader, self._tokenizer, fresh=fresh)
        masses: defaultdict[int, float] = defaultdict(float)
        for token, prob in enumerate(probs):
            masses[mapping[token]] += prob
        if count:
            for leaders, token in enumerate(first_tokens(self._tokenizer, self._leader, fresh=fresh)):
                if leaders not in masses and token >= 0:
                    masses[leaders] = probs[token]
        masses.pop(-1, None)
        log_probs = torch.full((vocabulary_of(self._leader).size,), -math.inf, dtype=torch.float64)
        for leaders, mass in masses.items():
            log_probs[leaders] = math.log(mass) if mass else -math.inf
        ranked = sorted(range(len(probs)), key=lambda token: -probs[token])[:count]
        return log_probs, [mapping[token] for token in ranked if mapping[token] >= 0]
