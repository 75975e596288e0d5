"""Token masks of a structured answer: which tokens its grammar allows after the text, and after each draft token."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from decoding.drafts.draft import Draft, TokenTree
from decoding.errors import InvalidRequestError
from decoding.grammars.grammar import NO_TOKEN, Grammar, structure_error

_MAX_RENEWALS = 8  # of one request's matcher; each compiles the grammar again

T = TypeVar("T")


class StructureState:
    """The position of one request's answer in its grammar. For one thread at a time.

    End tokens are allowed exactly where the answer may end.
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
        tokens: prompt and answer, shared with the owner, who only appends.
        prompt_length: number of prompt tokens.
        vocab_size: V of the logits. Tokens that the tokenizer lacks are never allowed.

        Raises InvalidRequestError if there is no end token, so nothing could follow a complete answer.
        """
        if not end_token_ids:
            raise InvalidRequestError("ignore_eos: a structured answer ends with an end token.", field="ignore_eos")
        self._ends = frozenset(end_token_ids)
        self._grammar, self._matcher = grammar, grammar.matcher()
        self._tokens, self._prompt_length, self._consumed = tokens, prompt_length, prompt_length
        self._path: list[int] = []  # draft tokens that the matcher consumed after the text
        self._renewals = 0
        self._text_error: InvalidRequestError | None = None  # set once the text does not match the grammar
        self._errors: dict[int, InvalidRequestError] = {}
        self._width, self._matcher_width = _words(vocab_size), _words(grammar.tokenizer.vocab_size)
        known, ends = (1 << vocab_size) - 1, _bits(self._ends)
        room = max(self._width, self._matcher_width)
        self._end_mask = _mask(ends & known, room)
        self._continue_mask = _mask(known & ~ends, room)  # tokens that may follow where the answer may not end
        self._stop_mask = _mask(
            known & ~_bits(grammar.tokenizer.eos_tokens), room
        )  # where it may end, besides end tokens

    @property
    def complete(self) -> bool:
        """Whether only an end token may follow the text."""
        self._catch_up()
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def error_after(self, index: int) -> InvalidRequestError | None:
        """Return the error if no token can follow a draft token, as of the masks computed last. index −1: the text.

        A request that reaches this position must fail: no token fits its grammar, or the grammar is too expensive.
        """
        return self._text_error or self._errors.get(index)

    def prune(self, draft: Draft) -> Draft:
        """Return the draft without tokens that break the grammar, or come after such a token or an end token."""
        return self._guard(lambda: self._prune(draft), lambda: Draft([], []))

    def _prune(self, draft: Draft) -> Draft:
        self._catch_up()
        fits = [False] * len(draft.tokens)
        for index, consumed in self._walk(draft):
            fits[index] = consumed or (draft.tokens[index] in self._ends and self._matcher.is_accepting())
        return draft if all(fits) else _select(draft, fits)

    def masks(self, draft: Draft) -> Tensor:
        """Return bits of the tokens allowed after the text and each draft token: [K + 1, ⌈V / 32⌉] int32, on the CPU.

        Only end tokens are allowed below a token that breaks the grammar, below an end token, and where `error_after`
        has an error. The GIL is released nearly all of the time.
        """
        return self._masks(draft, range(-1, len(draft.tokens)))

    def masks_after(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """Return what `masks` does for N paths that follow the text: [N, ⌈V / 32⌉] int32, on the CPU."""
        masks, _ = self.follow(paths)
        return masks

    def follow(self, paths: Sequence[Sequence[int]]) -> tuple[Tensor, list[InvalidRequestError | None]]:
        """Return the masks of `masks_after`, and for each path the error if no token can follow it."""
        tree = TokenTree()
        nodes = [tree.add(path) for path in paths]
        masks = self._masks(tree.draft, set(nodes))[[node + 1 for node in nodes]]
        return masks, [self.error_after(node) for node in nodes]

    def _masks(self, draft: Draft, wanted: Collection[int]) -> Tensor:
        """Return what `masks` does; only the rows after the `wanted` indices are valid. −1: after the text."""
        ends_only = self._end_mask[: self._width]
        return self._guard(lambda: self._compute(draft, wanted), lambda: ends_only.repeat(len(draft.tokens) + 1, 1))

    def _guard(self, compute: Callable[[], T], fallback: Callable[[], T]) -> T:
        """Compute, or return the fallback if the text has left the grammar. An engine error also ends the request."""
        if self._text_error is None:
            try:
                with self._grammar.count_memory():
                    return compute()
            except InvalidRequestError as error:
                self._text_error = error
            except Exception as error:
                self._text_error = structure_error(self._grammar.structure, f"it can't be followed: {error!r}")
        return fallback()

    def _compute(self, draft: Draft, wanted: Collection[int]) -> Tensor:
        self._catch_up()
        self._errors = {}
        masks = torch.zeros(len(draft.tokens) + 1, len(self._end_mask), dtype=torch.int32)
        may_end = [True] * len(masks)
        if -1 in wanted and self._text_error is None:
            may_end[0] = self._fill(masks, -1)
        for index, consumed in self._walk(draft):
            if consumed and index in wanted:
                may_end[index + 1] = self._fill(masks, index)
        at_end = masks & self._stop_mask | self._end_mask
        masks = torch.where(torch.tensor(may_end)[:, None], at_end, masks & self._continue_mask)[:, : self._width]
        for row in (masks == 0).all(dim=-1).nonzero()[:, 0].tolist():
            if row - 1 in wanted:
                self._errors[row - 1] = structure_error(self._grammar.structure, NO_TOKEN)
            masks[row] = self._end_mask[: self._width]
        return masks

    def _fill(self, masks: Tensor, index: int) -> bool:
        """Compute the mask after a consumed draft token. Returns whether the answer may end there."""
        address = masks[index + 1].data_ptr()
        self._attempt(lambda: self._matcher.unsafe_compute_mask_ptr(address, 4 * self._matcher_width))
        if not self._note_error(index):
            return self._matcher.is_accepting()
        masks[index + 1] = 0
        return True

    def _walk(self, draft: Draft) -> Iterator[tuple[int, bool]]:
        """Feed the draft to the matcher, depth first. Yields each token's index, and whether the matcher consumed it.

        Tokens below one that was not consumed are skipped.
        """
        for index, depth in _depth_first(draft):
            if depth <= len(self._path):
                self._rollback(depth)
                yield index, draft.tokens[index] not in self._ends and self._consume(index, draft.tokens[index])
        self._rollback(0)

    def _consume(self, index: int, token: int) -> bool:
        """Feed one draft token to the matcher. Returns whether the grammar allows it."""
        known = 0 <= token < self._grammar.tokenizer.vocab_size and self._text_error is None
        if not known or not self._attempt(lambda: self._matcher.try_consume_tokens([token])):
            self._note_error(index)
            return False
        self._path.append(token)
        return True

    def _rollback(self, depth: int) -> None:
        if depth < len(self._path):
            self._matcher.rollback(len(self._path) - depth)
            del self._path[depth:]

    def _catch_up(self) -> None:
        text = self._text(self._consumed)
        self._consumed = len(self._tokens)
        if not text:
            return
        known = all(0 <= token < self._grammar.tokenizer.vocab_size for token in text)
        consumed = self._matcher.try_consume_tokens(text) if known else 0
        if self._matcher.is_error():
            self._renew()
        elif consumed < len(text):
            self._text_error = structure_error(self._grammar.structure, f"the answer left it with {text[consumed:]}")

    def _text(self, start: int) -> list[int]:
        """Return the text from an absolute position on, without end tokens, which matchers need not see."""
        return [token for token in self._tokens[start:] if token not in self._ends]

    def _attempt(self, action: Callable[[], T]) -> T:
        """Run an action of the matcher. If it fails, run it again with a new matcher.

        Matchers of one grammar share a lexer, and others may have exhausted it.
        """
        result = action()
        if self._matcher.is_error():
            self._renew()
            result = action()
        return result

    def _note_error(self, index: int) -> bool:
        """Record an error of the matcher and replace it. Returns whether there was one."""
        if not self._matcher.is_error():
            return False
        self._errors[index] = self._grammar.error(self._matcher)
        self._renew()
        return True

    def _renew(self) -> None:
        """Replace the matcher by one at the same position that shares nothing with other requests."""
        if self._renewals < _MAX_RENEWALS:
            self._renewals += 1
            self._grammar.must_recompile = True
            self._grammar = Grammar(self._grammar.structure, self._grammar.tokenizer)
            self._matcher = self._grammar.matcher()
            self._matcher.try_consume_tokens([*self._text(self._prompt_length), *self._path])


def _depth_first(draft: Draft) -> Iterator[tuple[int, int]]:
    """Yield each token's index, and the number of draft tokens above it."""
    children = draft.children()
    stack = [(index, 0) for index in reversed(children[0])]
    while stack:
        index, depth = stack.pop()
        yield index, depth
        stack += [(child, depth + 1) for child in reversed(children[index + 1])]


def _select(draft: Draft, keep: Sequence[bool]) -> Draft:
    """Return the draft with the tokens to keep, whose parents are kept too."""
    kept = [index for index, is_kept in enumerate(keep) if is_kept]
    new_index = {-1: -1} | {old: new for new, old in enumerate(kept)}
    return Draft(
        [draft.tokens[index] for index in kept],
        [new_index[draft.parents[index]] for index in kept],
        [draft.probabilities[index] for index in kept] if draft.probabilities else [],
        [draft.distributions[index] for index in kept] if draft.distributions else [],
        [draft.proposers[index] for index in kept] if draft.proposers else [],
    )


def _words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def _bits(tokens: Iterable[int]) -> int:
    """Return an integer in which the bits of these tokens are set."""
    return sum(1 << token for token in set(tokens))


def _mask(bits: int, words: int) -> Tensor:
    """Return [words] int32; the first token is the lowest bit of the first word."""
    return torch.frombuffer(bytearray(bits.to_bytes(4 * words, "little")), dtype=torch.int32)


class MaskThread:
    """Computes the masks of a step while the model runs. More threads would be slower: they contend for the GIL."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def start(
        self, states: Sequence[StructureState | None], drafts: Sequence[Draft]
    ) -> Callable[[], list[Tensor | None]]:
        """Start computing `StructureState.masks` of each row. The function that is returned waits for them.

        Until it has returned, neither the states nor their texts may change.
        """
        if not any(states):
            return lambda: [None] * len(states)

        def compute() -> list[Tensor | None]:
            return [None if state is None else state.masks(draft) for state, draft in zip(states, drafts, strict=True)]

        return self._pool.submit(compute).result

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()
