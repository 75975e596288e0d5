"""What a target's loop asks of heads of any kind, and how they choose tokens from their logits.

Tokens are chosen on the device: with the target's noise, or drawn for rejection sampling. Only the logits and the
position count: penalties, bans and grammars act at the target.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from decoding.drafts.choices import DraftChoice
from decoding.drafts.verification import distributions, draft_key, draw
from decoding.sampling.batch import SamplingBatch, chain_settings, used_processors
from decoding.sampling.params import SamplingParams
from decoding.sampling.sampler import process, rank
from decoding.sampling.transfer import copy_to, tensor_on
from engine.heads.spec import HeadsKind

if TYPE_CHECKING:
    from engine.layers.lora import LoraLayers
    from engine.model.hidden_states import HiddenStates  # which imports transformers' models


class DraftStart(NamedTuple):
    """A text that heads continue."""

    slot: int
    length: int  # of the text; the first draft token gets this position
    params: SamplingParams
    adapter: int = 0  # the slot of the text's LoRA weights; 0: none


class HeadSampler:
    """Chooses a token for each of B texts, position after position. Waits for the device in `choices` only."""

    def __init__(
        self,
        starts: Sequence[DraftStart],
        length: int,
        ranks: int,
        device: torch.device,
        token_ids: Tensor | None = None,
    ) -> None:
        """
        length: the number of positions.
        ranks: how many alternatives to return, from 2 to W.
        token_ids: [W] int64, rising: the tokens that logits are of; None: all.
        """
        params = [start.params for start in starts]
        settings = chain_settings([(start.params, start.length) for start in starts], length, len(starts))
        self._settings = copy_to(device, settings)  # [length, B, 6]
        self._used = used_processors(params)
        self._ranks, self._device, self._token_ids = ranks, device, token_ids
        self._coupled = [index for index, each in enumerate(params) if not each.rejects]
        self._rejecting = [index for index, each in enumerate(params) if each.rejects]
        # A draw has a stream of its own: what was drawn for the same position before decided an earlier verdict.
        keys = [
            draft_key(starts[i].params.seed, starts[i].length + step, starts[i].length)
            for step in range(length)
            for i in self._rejecting
        ]
        self._keys = tensor_on(device, keys, torch.int32).reshape(length, len(self._rejecting), 2)
        self._ranked: list[tuple[Tensor, Tensor]] = []  # of each position: tokens and scores, [n, ranks]
        self._drawn: list[tuple[Tensor, Tensor]] = []  # as `draw` returns them

    def choose(self, logits: Tensor) -> Tensor:
        """Return the tokens of the next position, [B] int64. logits: [B, W]."""
        return self.choose_steps(logits[None])[0]

    def choose_steps(self, logits: Tensor) -> Tensor:
        """Return the tokens of the next C positions, [C, B] int64, at once. logits: [C, B, W]."""
        count, first = len(logits), max(len(self._ranked), len(self._drawn))
        settings = self._settings[first : first + count]
        if not self._rejecting:
            return self._rank(logits.flatten(0, 1), settings.flatten(0, 1), count)
        chosen = torch.empty(logits.shape[:2], dtype=torch.int64, device=self._device)
        if self._coupled:
            part, rows = self._part(self._coupled, logits)
            chosen[:, rows] = self._rank(part, settings[:, rows].flatten(0, 1), count)
        if self._rejecting:
            part, rows = self._part(self._rejecting, logits)
            processed = process(part, SamplingBatch(settings[:, rows].flatten(0, 1), self._used))
            keys = self._keys[first : first + count].flatten(0, 1)
            sample, *drawn = draw(processed, keys, token_ids=self._token_ids)
            self._drawn += zip(*(each.chunk(count) for each in drawn), strict=True)
            chosen[:, rows] = sample.view(count, -1)
        return chosen

    def choices(self) -> list[list[DraftChoice]]:
        """Return each text's choices, position after position."""
        choices: list[list[DraftChoice]] = [[] for _ in range(len(self._coupled) + len(self._rejecting))]
        if self._ranked:
            tokens, scores = (torch.stack(each).double() for each in zip(*self._ranked, strict=True))
            best = torch.stack([tokens, scores], dim=2)  # [length, n, 2, ranks], which all fit exactly: one copy
            for step in best.tolist():
                for row, best in zip(self._coupled, step, strict=True):
                    choices[row].append(DraftChoice.ranked(*best))
        for drawn in self._drawn:
            for row, drawn_from in zip(self._rejecting, distributions(*drawn), strict=True):
                choices[row].append(DraftChoice(drawn_from.tokens[:1], 0.0, drawn_from))
        return choices

    def _rank(self, logits: Tensor, settings: Tensor, count: int) -> Tensor:
        """Rank the tokens of C positions. Returns the best, [C, n]. logits: [C · n, W]."""
        tokens, scores = rank(logits, SamplingBatch(settings, self._used), self._ranks, self._token_ids)
        self._ranked += zip(tokens.chunk(count), scores.chunk(count), strict=True)
        return tokens[:, 0].view(count, -1)

    def _part(self, rows: list[int], logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of some rows, [C · n, W], and these rows as a tensor. logits: [C, B, W]."""
        indices = tensor_on(self._device, rows, torch.int64)
        return (logits if len(rows) == logits.shape[1] else logits[:, indices]).flatten(0, 1), indices


class Reading(NamedTuple):
    """Tokens of one text that the target has run."""

    slot: int
    start: int  # position of the first
    following: Sequence[int]  # [n] the token after each
    layers_rows: Sequence[int]  # [n] their rows of `HiddenStates.layers`
    last_row: int | None  # the last one's row of `HiddenStates.last`; None: it wanted no logits
    token: int  # the first
    adapter: int = 0  # as in `DraftStart`


class HeadProposer(Protocol):
    """Drafts for all texts of one target at once. A text's state is that of its slot."""

    kind: HeadsKind
    length: int  # the most tokens of a path
    tree: Sequence[Sequence[int]] | None = None  # paths of ranks to draft; None: those most probably committed
    stepwise: bool = False  # whether each token of a path takes a step of its own …
    further_s: float = 0.0  # … and how many seconds each took after the first when it last drafted several
    chained: bool = False  # whether a token's candidates follow the best ones before it only; otherwise any
    lora: "LoraLayers | None" = None  # its adapters, in the slots of the target's; None: it takes none

    def warm_up(self) -> None:
        """Do before the first draft what takes long. Pages must be allocated and free: some are overwritten."""
        return

    def read(self, readings: Sequence[Reading], hidden: "HiddenStates") -> None:
        """Take in what the target ran, before its next forward."""

    def propose(self, starts: Sequence[DraftStart], length: int, ranks: int) -> list[list[DraftChoice]]:
        """Return each text's candidates for its next `length` positions, the best `ranks` of each.

        Raises OutOfPagesError as in `Runner.logits`.
        """


class ChainHead(nn.Module):
    """One layer over the target's hidden states and the tokens that followed them, which `ChainProposer` runs.

    It predicts token p + 2 from the states after token p, and token p + 1. In place of these states it takes its own
    output to predict further tokens.
    """

    kind: HeadsKind
    hidden_size: int
    feature_size: int  # of the target's hidden states of a token
    outputs: int  # the number of tokens that it can draft, W
    embed_tokens: nn.Embedding | None  # of the target's tokens; None: the target's own

    def layer_input(self, states: Tensor) -> Tensor:
        """Return what the layer reads, [N, H], from the target's hidden states, [N, feature_size]."""
        raise NotImplementedError

    def forward(self, hidden: Tensor, embeddings: Tensor, positions: Tensor) -> Tensor:
        """Return the layer's output, [1, N, H], which `logits` and the next call take.

        hidden: [1, N, H] by `layer_input`, or the layer's own output.
        embeddings: [1, N, H] of the tokens that follow these.
        positions: [1, N] of the tokens whose hidden states they are.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., W] float logits of the tokens that it can draft."""
        raise NotImplementedError

    def token_ids(self) -> Tensor | None:
        """Return the tokens that it can draft, [W] int64, rising; None: all of the vocabulary."""
        return None
