"""Which tokens a structured answer may go on with: after its text, and after each token of a draft.

A state belongs to one request and follows its text. Knows nothing of logits, devices, messages or how grammars work.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from decoding.drafts import Draft
from decoding.errors import InvalidRequestError
from decoding.grammar import NO_TOKEN, Grammar, structure_error
from decoding.token_tree import TokenTree

_RENEWALS = 8  # of one request's matcher; each compiles the grammar again

T = TypeVar("T")


class StructureState:
    """Where a request's answer is in its grammar. For one thread at a time.

    End tokens are allowed where the answer may end, and nowhere else.
    """

    def __init__(
        self,
        grammar: Grammar,
        tokens: Sequence[int],
        prompt_length: int,
        *,
        end_token_ids: Collection[int],
        vocab_size: int,
    ) -> None:
        """
        tokens: prompt and answer, shared with the owner, who only appends. prompt_length: how many are the prompt's.
        vocab_size: V of the logits; tokens that the tokenizer does not have are never allowed.

        Raises:
            InvalidRequestError: no end token is given, so that nothing could follow a complete answer.
        """
        if not end_token_ids:
            raise InvalidRequestError("ignore_eos: a structured answer ends with an end token.", field="ignore_eos")
        self._ends = frozenset(end_token_ids)
        self._grammar, self._matcher = grammar, grammar.matcher()
        self._tokens, self._prompt_length, self._followed = tokens, prompt_length, prompt_length
        self._path: list[int] = []  # draft tokens that the matcher has consumed after the text
        self._renewals = 0
        self._left: InvalidRequestError | None = None  # the text has left the grammar
        self._errors: dict[int, InvalidRequestError] = {}
        self._width, self._matcher_width = _words(vocab_size), _words(grammar.tokenizer.vocab_size)
        known, ends = (1 << vocab_size) - 1, _bits(self._ends)
        room = max(self._width, self._matcher_width)
        self._end_mask = _mask(ends & known, room)
        self._inside_mask = _mask(known & ~ends, room)  # what may be allowed where the answer may not end
        self._open_mask = _mask(known & ~_bits(grammar.tokenizer.eos_tokens), room)  # and, with the ends, where it may

    @property
    def complete(self) -> bool:
        """Whether nothing but an end token may follow the text."""
        self._catch_up()
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def error_after(self, place: int) -> InvalidRequestError | None:
        """Why nothing can follow a draft token (-1: the text), as found when masks were last computed.

        A request that comes to that place must fail: its grammar asks for what no token has, or for too much work.
        """
        return self._left or self._errors.get(place)

    def prune(self, draft: Draft) -> Draft:
        """The draft without the tokens that break the grammar, and without what follows these or an end token."""
        self._catch_up()
        fits = [False] * len(draft.tokens)
        for place, follows in self._walk(draft):
            fits[place] = follows or (draft.tokens[place] in self._ends and self._matcher.is_accepting())
        return draft if all(fits) else _part(draft, fits)

    def masks(self, draft: Draft) -> Tensor:
        """[K + 1, ⌈V / 32⌉] int32 on the CPU: what may follow the text, then each draft token. A bit for each token.

        Below draft tokens that break the grammar and below end tokens, and where `error_after` finds an error, only
        end tokens may. The GIL is released for nearly all of the time.
        """
        return self._masks(draft, range(-1, len(draft.tokens)))

    def masks_after(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """[N, ⌈V / 32⌉] int32 on the CPU: what may follow each of N paths from the text on, as `masks` has it."""
        masks, _ = self.follow(paths)
        return masks

    def follow(self, paths: Sequence[Sequence[int]]) -> tuple[Tensor, list[InvalidRequestError | None]]:
        """What `masks_after` gives, and for each path why nothing can follow it, if so."""
        tree = TokenTree()
        nodes = [tree.add(path) for path in paths]
        masks = self._masks(tree.draft, set(nodes))[[node + 1 for node in nodes]]
        return masks, [self.error_after(node) for node in nodes]

    def _masks(self, draft: Draft, wanted: Collection[int]) -> Tensor:
        """As `masks`; only those after the wanted places are right."""
        self._catch_up()
        self._errors = {}
        masks = torch.zeros(len(draft.tokens) + 1, len(self._end_mask), dtype=torch.int32)
        may_end = [True] * len(masks)
        if -1 in wanted and self._left is None:
            may_end[0] = self._fill(masks, -1)
        for place, follows in self._walk(draft):
            if follows and place in wanted:
                may_end[place + 1] = self._fill(masks, place)
        at_end = masks & self._open_mask | self._end_mask
        masks = torch.where(torch.tensor(may_end)[:, None], at_end, masks & self._inside_mask)[:, : self._width]
        for row in (masks == 0).all(dim=-1).nonzero()[:, 0].tolist():
            if row - 1 in wanted:
                self._errors[row - 1] = structure_error(self._grammar.structure, NO_TOKEN)
            masks[row] = self._end_mask[: self._width]
        return masks

    def _fill(self, masks: Tensor, place: int) -> bool:
        """Compute the mask after a draft token, which the matcher has consumed. True if the answer may end there."""
        address = masks[place + 1].data_ptr()
        self._attempt(lambda: self._matcher.unsafe_compute_mask_ptr(address, 4 * self._matcher_width))
        if not self._note_error(place):
            return self._matcher.is_accepting()
        masks[place + 1] = 0
        return True

    def _walk(self, draft: Draft) -> Iterator[tuple[int, bool]]:
        """Consume the draft's tokens, depth first. At each: its place, and whether the matcher has consumed it.

        What is below a token that it has not is left out.
        """
        for place, depth in _depth_first(draft):
            if depth <= len(self._path):
                self._retreat(depth)
                yield place, draft.tokens[place] not in self._ends and self._consume(place, draft.tokens[place])
        self._retreat(0)

    def _consume(self, place: int, token: int) -> bool:
        """One draft token; True if the grammar has it there."""
        known = 0 <= token < self._grammar.tokenizer.vocab_size and self._left is None
        if not known or not self._attempt(lambda: self._matcher.try_consume_tokens([token])):
            self._note_error(place)
            return False
        self._path.append(token)
        return True

    def _retreat(self, depth: int) -> None:
        """Take back all draft tokens but the first `depth`."""
        if depth < len(self._path):
            self._matcher.rollback(len(self._path) - depth)
            del self._path[depth:]

    def _catch_up(self) -> None:
        """Consume the text that is new."""
        text = self._text(self._followed)
        self._followed = len(self._tokens)
        if not text:
            return
        known = all(0 <= token < self._grammar.tokenizer.vocab_size for token in text)
        consumed = self._matcher.try_consume_tokens(text) if known else 0
        if self._matcher.is_error():
            self._renew()
        elif consumed < len(text):
            self._left = structure_error(self._grammar.structure, f"the answer left it with {text[consumed:]}")

    def _text(self, start: int) -> list[int]:
        """The text from an absolute position on, without end tokens, which matchers need not see."""
        return [token for token in self._tokens[start:] if token not in self._ends]

    def _attempt(self, action: Callable[[], T]) -> T:
        """What the matcher does; what a new one does if it fails.

        Matchers of one grammar share a lexer, which others may have brought to its limits.
        """
        result = action()
        if self._matcher.is_error():
            self._renew()
            result = action()
        return result

    def _note_error(self, place: int) -> bool:
        """Whether the matcher has failed, a new one too; another takes its place."""
        if not self._matcher.is_error():
            return False
        self._errors[place] = self._grammar.error(self._matcher)
        self._renew()
        return True

    def _renew(self) -> None:
        """Go on where this matcher is, with one that shares nothing with those of other requests."""
        if self._renewals < _RENEWALS:
            self._renewals += 1
            self._grammar.worn = True
            self._grammar = Grammar(self._grammar.structure, self._grammar.tokenizer)
            self._matcher = self._grammar.matcher()
            self._matcher.try_consume_tokens([*self._text(self._prompt_length), *self._path])


def _depth_first(draft: Draft) -> Iterator[tuple[int, int]]:
    """The place of each token, and how many draft tokens are above it."""
    below = draft.children()
    stack = [(place, 0) for place in reversed(below[0])]
    while stack:
        place, depth = stack.pop()
        yield place, depth
        stack += [(child, depth + 1) for child in reversed(below[place + 1])]


def _part(draft: Draft, fits: Sequence[bool]) -> Draft:
    """The tokens that fit, whose parents do too."""
    kept = [place for place, fit in enumerate(fits) if fit]
    moved = {-1: -1} | {place: at for at, place in enumerate(kept)}
    return Draft(
        [draft.tokens[place] for place in kept],
        [moved[draft.parents[place]] for place in kept],
        [draft.chances[place] for place in kept] if draft.chances else [],
        [draft.distributions[place] for place in kept] if draft.distributions else [],
    )


def _words(vocab_size: int) -> int:
    """How many 32-bit words hold a bit for each token."""
    return -(-vocab_size // 32)


def _bits(tokens: Iterable[int]) -> int:
    """An integer with the bits of these tokens set."""
    return sum(1 << token for token in set(tokens))


def _mask(bits: int, words: int) -> Tensor:
    """[words] int32, the first token's bit is the first word's lowest."""
    return torch.frombuffer(bytearray(bits.to_bytes(4 * words, "little")), dtype=torch.int32)
