"""What a member with another tokenizer must say: by strings, in float64, every text written anew and run as a whole.

Nothing of `decoding/tokenizers/projection.py`, `decoding/tokenizers/text_aligner.py` or `actors/` takes part.
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

_SPACED = "▁"  # tokenizers that have it write a space before a text


def adds_space(tokenizer: Tokenizer) -> bool:
    return tokenizer.token_to_id(_SPACED) is not None


def meaning(tokenizer: Tokenizer, token: int, *, fresh: bool) -> Meaning | None:
    """What a token stands for; fresh: at the beginning of a text."""
    found = vocabulary_of(tokenizer).meanings[token]
    return found.removeprefix(b" ") if fresh and adds_space(tokenizer) and isinstance(found, bytes) else found


@cache
def first_tokens(writer: Tokenizer, other: Tokenizer, *, fresh: bool = False) -> list[int]:
    """Return the first token of the writer's spelling of each of the other's tokens, or −1."""
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
    found = _written(writer, string, fresh)
    parts = (space + string[:end] for end in range(len(string) - 1, 0, -1))
    return found[0] if found else next((ids[part] for part in parts if part in ids), -1)


def _written(writer: Tokenizer, string: bytes, fresh: bool) -> list[int]:
    try:
        text = string.decode()
    except UnicodeDecodeError:
        return []
    context = "" if fresh or not adds_space(writer) else "\x01"  # written as a byte, so that nothing joins it
    tokens: list[int] = writer.encode(context + text, add_special_tokens=False).ids[2 * len(context) :]
    pieces = [meaning(writer, token, fresh=fresh and at == 0) for at, token in enumerate(tokens)]
    return tokens if b"".join(piece for piece in pieces if isinstance(piece, bytes)) == string else []


class SlowMember:
    """A model with its tokenizer, that reads what another tokenizer has written."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, leader: Tokenizer) -> None:
        self._model, self._tokenizer, self._leader = model, tokenizer, leader

    def read(self, tokens: Sequence[int]) -> tuple[list[int], bool] | None:
        """Its own tokens of a text that may begin with a control token, and whether there are no others.

        None: it can't write the bytes of a character that is not whole.
        """
        own, leader = vocabulary_of(self._tokenizer), vocabulary_of(self._leader)
        pieces = [(one, leader.meanings[one]) for one in tokens]
        data = b"".join(piece for _, piece in pieces if isinstance(piece, bytes))
        if adds_space(self._leader):
            data = data.removeprefix(b" ")
        decoder = getincrementaldecoder("utf-8")("replace")
        whole = decoder.decode(data)
        begin = [own.ids[piece] for _, piece in pieces if isinstance(piece, str) and piece in own.ids]
        pending = [own.ids.get(bytes([byte]), -1) for byte in decoder.getstate()[0]]
        if -1 in pending:
            return None
        text: list[int] = self._tokenizer.encode(whole, add_special_tokens=False).ids if whole else []
        return begin + text + pending, all(isinstance(piece, str) for _, piece in pieces)

    @torch.no_grad()
    def say(self, tokens: Sequence[int], count: int) -> tuple[Tensor, list[int]] | None:
        """[V] float64 log-probabilities of the leader's tokens, and those of them to which its `count` best tokens go.

        count: if not 0, tokens to which none goes have the probability of how the member begins to write them.
        """
        reading = self.read(tokens)
        if reading is None:
            return None
        own, fresh = reading
        probs = self._model(torch.tensor([own])).logits[0, -1].double().softmax(dim=-1).tolist()
        going = first_tokens(self._leader, self._tokenizer, fresh=fresh)
        masses: defaultdict[int, float] = defaultdict(float)
        for token, prob in enumerate(probs):
            masses[going[token]] += prob
        if count:
            for place, token in enumerate(first_tokens(self._tokenizer, self._leader, fresh=fresh)):
                if place not in masses and token >= 0:
                    masses[place] = probs[token]
        masses.pop(-1, None)
        found = torch.full((vocabulary_of(self._leader).size,), -math.inf, dtype=torch.float64)
        for place, mass in masses.items():
            found[place] = math.log(mass) if mass else -math.inf
        ranked = sorted(range(len(probs)), key=lambda token: -probs[token])[:count]
        return found, [going[token] for token in ranked if going[token] >= 0]
