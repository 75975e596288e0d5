"""Grammars for the bundled tokenizer, and answers under their masks from random logits."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from llguidance import LLTokenizer
from torch import Tensor

from decoding.drafts.draft import Draft
from decoding.drafts.verification import accepted_path
from decoding.grammars.grammar import Grammar
from decoding.grammars.structure import StructureState
from decoding.sampling.params import Structure, StructureKind

END = 2
VOCAB_SIZE = 2048
NO_DRAFT = Draft([], [])
_TOKENIZER = Path(__file__).parents[2] / "models" / "target" / "tokenizer.json"


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(str(_TOKENIZER), eos_token=END)


@cache
def compiled(kind: StructureKind, definition: str) -> Grammar:
    return Grammar(Structure(kind=kind, definition=definition), tokenizer())


def matches(grammar: Grammar, text: str) -> bool:
    """Whether a text is a whole answer of the grammar."""
    matcher = grammar.matcher()
    tokens = tokenizer().tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def follow(grammar: Grammar, tokens: Sequence[int], *, vocab_size: int = VOCAB_SIZE) -> StructureState:
    """Return the grammar's state after an answer without a prompt."""
    return StructureState(grammar, tokens, 0, end_token_ids=(END,), vocab_size=vocab_size)


def unpacked(mask: Tensor) -> Tensor:
    """Unpack one row of a mask, [⌈V / 32⌉] int32, to [V] bool."""
    return (mask.view(torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten().bool()


def allowed(mask: Tensor) -> set[int]:
    """Return the tokens that one row of a mask, [⌈V / 32⌉] int32, allows."""
    return set(unpacked(mask).nonzero()[:, 0].tolist())


@cache
def _scores(greedy: bool) -> Tensor:
    """Return logits plus noise of 4099 positions, [4099, V]. Blanks are rare, else answers would consist of them."""
    random = torch.Generator().manual_seed(int(greedy))
    blank = [tokenizer().decode_bytes([token]).isspace() for token in range(VOCAB_SIZE)]
    logits = torch.randn(4099, VOCAB_SIZE, generator=random) - 6 * torch.tensor(blank).float()
    return logits if greedy else logits - torch.empty_like(logits).exponential_(generator=random).log()


class Writer:
    """A target without a model: its logits and noise are a function of the position alone."""

    def __init__(self, seed: int, *, greedy: bool) -> None:
        self._seed, self._scores = seed, _scores(greedy)

    def choose(self, position: int, mask: Tensor) -> int:
        """Return the best allowed token of a position."""
        scores = self._scores[(1009 * self._seed + position) % len(self._scores)]
        return int(scores.masked_fill(~unpacked(mask), -torch.inf).argmax())

    def write(self, grammar: Grammar, limit: int = 1000) -> list[int]:
        """Write an answer token by token, end token included."""
        tokens: list[int] = []
        state = follow(grammar, tokens)
        while (not tokens or tokens[-1] != END) and len(tokens) < limit:
            tokens.append(self.choose(len(tokens), state.masks(NO_DRAFT)[0]))
            assert state.error_after(-1) is None
        return tokens

    def write_with(self, grammar: Grammar, drafts: "Drafts", limit: int = 1000) -> list[int]:
        """Write the same answer by verifying drafts."""
        tokens: list[int] = []
        state = follow(grammar, tokens)
        while (not tokens or tokens[-1] != END) and len(tokens) < limit:
            draft = state.prune(drafts.draft(len(tokens)))
            masks = state.masks(draft)
            positions = [len(tokens) + depth for depth in (0, *draft.depths())]
            sampled = [self.choose(position, mask) for position, mask in zip(positions, masks, strict=True)]
            path, _ = accepted_path(sampled, draft)
            tokens += [*(draft.tokens[index] for index in path), sampled[path[-1] + 1 if path else 0]]
        return tokens[: tokens.index(END) + 1] if END in tokens else tokens


class Drafts:
    """Draft trees that follow a given answer for a few tokens, with wrong tokens among them."""

    def __init__(self, answer: Sequence[int], seed: int) -> None:
        self._answer = answer
        self._random = torch.Generator().manual_seed(seed)

    def _below(self, limit: int) -> int:
        return int(torch.randint(limit, (), generator=self._random))

    def draft(self, position: int) -> Draft:
        tokens = [*self._answer[position : position + self._below(8)]]
        parents = list(range(-1, len(tokens) - 1))
        for _ in range(self._below(5)):
            tokens.append(self._below(VOCAB_SIZE))
            parents.append(self._below(len(tokens)) - 1)
        return Draft(tokens, parents)
