"""Logits processors that depend on the text, in the order of transformers' `generate`. They act on greedy requests too.

Bias, penalties, forbidden tokens (repeated n-grams, bad words, early ends), allowed tokens, forced tokens, suppressed
tokens. Presence and frequency penalty, which `generate` lacks, follow the repetition penalty; grammars come last.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from decoding.sampling.history import Position, Positions
from decoding.sampling.penalties import LogitBias, Penalties, TextTables
from decoding.sampling.transfer import TokenSet, copy_to, find_spans, tensor_on

Constraint = Callable[[Tensor], None]  # changes the logits of P positions, [P, V] float32, in place


def allow_tokens(positions: Sequence[Position], vocab_size: int, device: torch.device | str) -> Constraint | None:
    """Allow `allowed_token_ids` only: transformers' `prefix_allowed_tokens_fn` with a constant result.

    If all allowed tokens are forbidden already, they get logit 0.
    """
    spans = list(find_spans([position.history.allowed for position in positions], vocab_size, device))

    def apply_(logits: Tensor) -> None:
        for start, end, tokens, _ in spans:
            rows = logits[start:end]
            kept = rows.index_select(1, tokens)  # [n, E]
            none_left = (kept == -inf).all(dim=-1, keepdim=True)
            rows.fill_(-inf).index_copy_(1, tokens, kept.masked_fill_(none_left, 0.0))

    return apply_ if spans else None


def forced_token(position: Position) -> int | None:
    """Return the only token allowed, if any: `forced_bos_token_id` first, `forced_eos_token_id` at max_tokens.

    If both apply, the end token wins. In transformers the first one acts only after a prompt of one token.
    """
    params = position.history.params
    if position.answer_length == params.max_tokens - 1 and params.forced_eos_token_id is not None:
        return params.forced_eos_token_id
    return params.forced_bos_token_id if position.answer_length == 0 else None


def force_tokens(positions: Sequence[Position], vocab_size: int, device: torch.device | str) -> Constraint | None:
    """Give a forced token logit 0, and all others −∞."""
    forced = [(row, token) for row, token in enumerate(map(forced_token, positions)) if token is not None]
    forced = [(row, token) for row, token in forced if token < vocab_size]
    if not forced:
        return None
    rows, tokens = tensor_on(device, forced, torch.int64).unbind(1)  # [M] each

    def apply_(logits: Tensor) -> None:
        logits[rows] = -inf
        logits[rows, tokens] = 0.0

    return apply_


def mask_by_grammar(positions: Sequence[Position], device: torch.device | str) -> Constraint | None:
    """Allow what the grammar of a structured answer allows."""
    masks = [(row, position.allowed) for row, position in enumerate(positions) if position.allowed is not None]
    if not masks:
        return None
    rows = tensor_on(device, [row for row, _ in masks], torch.int64)  # [M]
    words = copy_to(device, torch.stack([mask for _, mask in masks]))  # [M, W] int32, a bit per token

    def apply_(logits: Tensor) -> None:
        logits[rows] = logits[rows].masked_fill_(~unpack_bits(words, logits.shape[-1]), -inf)

    return apply_


def unpack_bits(words: Tensor, vocab_size: int) -> Tensor:
    """Return [M, V] bool from bit masks, [M, W] int32. Tokens without a bit are not allowed."""
    bits = torch.ones(32, dtype=torch.int32, device=words.device) << torch.arange(32, device=words.device)
    allowed = (words[:, :, None] & bits.int()).bool().flatten(1)  # [M, 32 W]
    return pad(allowed, (0, vocab_size - allowed.shape[1]))


def repeated_ngrams(position: Position) -> Iterable[int]:
    """Return tokens that would repeat an n-gram of prompt or answer: transformers' `no_repeat_ngram_size`.

    Paulus et al., arXiv 1705.04304, section 2.5.
    """
    size = position.history.params.no_repeat_ngram_size
    if not size:
        return ()
    recent = position.tail(size - 1 + len(position.path))
    if len(recent) < size - 1:
        return ()
    prefix = recent[len(recent) - size + 1 :]
    banned = position.history.ngrams.continuations(tuple(prefix))
    in_path = [recent[end] for end in range(size - 1, len(recent)) if recent[end - size + 1 : end] == prefix]
    return [*banned, *in_path]


def bad_words(position: Position) -> Iterable[int]:
    """Return tokens that would complete a forbidden sequence of several tokens: `bad_words_ids`."""
    return position.history.bad_words.last_tokens(position)


def bad_tokens(position: Position) -> TokenSet:
    """Return the forbidden sequences of one token: `bad_words_ids`, without end-of-text tokens."""
    return position.history.bad_tokens


def early_end_tokens(position: Position) -> TokenSet | None:
    """Return all end tokens while the answer is shorter than `min_tokens`, as in vLLM."""
    return position.history.end_tokens if position.answer_length < position.history.params.min_tokens else None


def suppressed_tokens(position: Position) -> TokenSet:
    """Return `suppress_tokens`, as in transformers."""
    return position.history.suppressed


def begin_suppressed_tokens(position: Position) -> TokenSet | None:
    """Return `begin_suppress_tokens` at the answer's first token that is not forced, as in transformers."""
    first_free = 0 if position.history.params.forced_bos_token_id is None else 1
    return position.history.begin_suppressed if position.answer_length == first_free else None


def ban_tokens(
    changing: Sequence[Callable[[Position], Iterable[int]]],
    lasting: Sequence[Callable[[Position], TokenSet | None]],
    positions: Sequence[Position],
    vocab_size: int,
    device: torch.device | str,
) -> Constraint | None:
    """Forbid tokens. A drafter's vocabulary may lack some of them.

    changing: functions above whose tokens depend on the text. lasting: those whose tokens the request names.
    """
    entries = [
        (row, token)
        for row, position in enumerate(positions)
        for kind in changing
        for token in kind(position)
        if token < vocab_size
    ]
    sets = ([kind(position) for position in positions] for kind in lasting)
    spans = [span for kind_sets in sets for span in find_spans(kind_sets, vocab_size, device)]
    if not entries and not spans:
        return None
    rows, banned = tensor_on(device, entries, torch.int64).view(-1, 2).unbind(1)  # [E] each

    def apply_(logits: Tensor) -> None:
        logits[rows, banned] = -inf
        for start, end, tokens, _ in spans:
            logits[start:end].index_fill_(1, tokens, -inf)

    return apply_


def is_shaped(request: Positions) -> bool:
    """Whether any processor may act on the positions."""
    return request.allowed is not None or request.history.traits.is_shaped


def _is_constrained(request: Positions | Position) -> bool:
    return request.allowed is not None or request.history.traits.may_forbid


@dataclass(frozen=True, slots=True, eq=False)
class Shaping:
    """The processors of N positions.

    A position at which they forbid every token gets the model's logits back, within its strongest constraint: grammar,
    else forced token, else allowed tokens, else all tokens. A constraint that allows nothing is ignored. If all logits
    within it are −∞, its tokens are equally probable.
    """

    penalties: Sequence[LogitBias | Penalties]
    constraints: Sequence[Constraint]
    positions: Sequence[Position]  # [N]; [0] without constraints
    constrained: Tensor  # [M] int64, the positions at which a constraint may act

    @classmethod
    def build(
        cls, requests: Sequence[Positions], vocab_size: int, device: torch.device | str, tables: TextTables
    ) -> "Shaping | None":
        """Build from the positions of requests, N in all; None if no processor acts. tables: as in `Penalties`."""
        penalties = (
            LogitBias.build(requests, vocab_size, device),
            Penalties.build(requests, vocab_size, device, tables),
        )
        constraints: tuple[Constraint | None, ...] = ()
        positions: list[Position] = []
        if any(map(_is_constrained, requests)):
            positions = [position for request in requests for position in request.singly()]
            constraints = (
                ban_tokens((repeated_ngrams, bad_words), (bad_tokens, early_end_tokens), positions, vocab_size, device),
                allow_tokens(positions, vocab_size, device),
                force_tokens(positions, vocab_size, device),
                ban_tokens((), (suppressed_tokens, begin_suppressed_tokens), positions, vocab_size, device),
                mask_by_grammar(positions, device),
            )
        acting = [step for step in penalties if step is not None], [step for step in constraints if step is not None]
        if not any(acting):
            return None
        rows = [row for row, position in enumerate(positions) if _is_constrained(position)]
        return cls(*acting, positions, tensor_on(device, rows, torch.int64))

    def __call__(self, logits: Tensor) -> Tensor:
        """Process logits, [N, V] float32; returns the same shape."""
        shaped = logits.clone()
        for penalty in self.penalties:
            penalty.apply_(shaped)
        for constrain_ in self.constraints:
            constrain_(shaped)
        if self.constraints:
            self._restore_(shaped, logits)
        return shaped

    @contextmanager
    def applied(self, logits: Tensor) -> Iterator[Tensor]:
        """Yield the processed logits, [N, V]. Without constraints that takes no copy: the change is undone at the end.

        logits: [N, V] float32, no two elements at one address.
        """
        if self.constraints:
            yield self(logits)
            return
        before = [step.apply_(logits) for step in self.penalties]
        yield logits
        for step, values in zip(reversed(self.penalties), reversed(before), strict=True):
            step.undo_(logits, values)

    def _restore_(self, shaped: Tensor, logits: Tensor) -> None:
        """Restore positions at which every token is forbidden. Both: [N, V]."""
        everywhere = len(self.constrained) == len(shaped)
        dead = (shaped if everywhere else shaped[self.constrained]).amax(dim=-1) == -inf
        for row in self.constrained[dead].tolist():
            possible = _possible(self.positions[row], logits.shape[-1]).to(logits.device)
            kept = logits[row].masked_fill(~possible, -inf)
            shaped[row] = kept if kept.amax() > -inf else torch.zeros_like(kept).masked_fill_(~possible, -inf)


def _possible(position: Position, vocab_size: int) -> Tensor:
    """Return the tokens within the strongest constraint of a position, [V] bool."""
    possible = torch.zeros(vocab_size, dtype=torch.bool)
    if position.allowed is not None:
        possible = unpack_bits(position.allowed[None], vocab_size)[0]
    elif (token := forced_token(position)) is not None:
        possible[token : token + 1] = True
    else:
        tokens, _ = position.history.allowed.copy_to("cpu", vocab_size)
        possible[tokens] = True
    return possible if possible.any() else ~possible
