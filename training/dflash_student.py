"""A DFlash head as a student: where it starts from, and how it drafts from many anchors of many texts at once.

Chen et al., arXiv 2602.06036: blocks at random anchors of a text; a block's later tokens count less.
B rows, T tokens, N answer tokens, A anchors of a row, C of a batch, S tokens of a block, W tokens that can be drafted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from transformers import PreTrainedModel, Qwen3Config

from engine.heads.dflash import DFlashConfig, DFlashHead
from engine.heads.dflash_layout import stored_dflash
from training.distillation.lessons import Batch, StudentVocabulary
from training.files import write_checkpoint
from training.head_starts import WithEmbedding, layer_settings, muon_and_adamw, start_from

_SPACING = 3  # answer tokens for each anchor: more anchors of a text teach little more than fewer
_FREQUENCIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashShape:
    """The size of a new head."""

    layers: int
    block_size: int  # tokens of a block, its anchor included
    states: int  # of the target's that it reads
    mask_token_id: int  # stands for the tokens to be drafted


class DFlashStudent:
    """A `Student` whose module reads several of the target's hidden states, and its embedding."""

    def __init__(self, head: DFlashHead, embedding: Tensor, vocabulary: StudentVocabulary) -> None:
        """embedding: [V, H] the target's."""
        head.config.layers._attn_implementation = "sdpa"
        self.head = head
        self.module: nn.Module = _Blocks(head, embedding)
        self.vocabulary = vocabulary

    def steps(self, share: float) -> int:
        return self.head.config.length

    def optimizers(self, learning_rate: float) -> list[Optimizer]:
        return muon_and_adamw(self.head, learning_rate)

    def drafts(self, module: nn.Module, batch: Batch, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Drafts start at some of the places; which, follows from the batch. None starts with an answer's first token.

        An anchor is the token before a draft's first, whose own hidden states are not there yet.
        """
        starts = choose_starts(batch)  # [C]
        if not len(starts):
            return
        placed, cells = place(batch, starts)
        chosen = [torch.isin(starts, batch.starts(step)) for step in range(min(steps, self.head.config.length))]
        logits = module(batch.features, batch.tokens, placed, cells, chosen)
        yield from zip([starts[each] for each in chosen], logits, strict=True)


def choose_starts(batch: Batch) -> Tensor:
    """Return which answer tokens drafts start with, ascending, one of `_SPACING`, [C] int64."""
    eligible = (~batch.first).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(int(batch.tokens.sum()))
    order = torch.randperm(len(eligible), generator=generator)[: -(-len(eligible) // _SPACING)]
    return eligible[order.sort().values.to(eligible.device)]


def place(batch: Batch, starts: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the positions before the starts, [B, A], and in which rows and columns of that the C starts are."""
    rows, anchors = batch.counted.nonzero()[starts].unbind(1)
    counts = torch.bincount(rows, minlength=len(batch.tokens))
    columns = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    placed = anchors.new_zeros(len(counts), int(counts.max()))
    placed[rows, columns] = anchors
    return placed, (rows, columns)


class _Blocks(WithEmbedding[DFlashHead]):
    """From hidden states to logits."""

    def forward(
        self, features: Tensor, tokens: Tensor, anchors: Tensor, cells: tuple[Tensor, Tensor], chosen: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return each step's logits, [n, W], of the blocks that are chosen for it.

        features: [B, T, F]. tokens: [B, T]. anchors: [B, A] their positions. cells: the C that count, as rows and
        columns of `anchors`. chosen: for each step which of them, [C] bool.
        """
        dtype = self.head.fc.weight.dtype
        blocks = self.head.blocks(tokens.gather(1, anchors))
        embeddings = functional.embedding(blocks, self.embedding).to(dtype)
        hidden = self.head(features.to(dtype), embeddings, anchors)[cells]  # [C, S, H]
        first = 0 if self.head.config.anchor_drafts else 1
        return [self.head.logits(hidden[each, step]) for step, each in enumerate(chosen, start=first)]


def start_dflash(
    target: PreTrainedModel, token_ids: Sequence[int], features: Tensor, shape: DFlashShape, *, seed: int
) -> DFlashHead:
    """Return a head, float32, that begins with the MLPs of the target's last layers, its final norm and output rows.

    Each of its attention heads looks back by another number of tokens: to learn where the anchor and the last states
    are takes most of a short training otherwise.

    token_ids: that it can draft, ascending. features: [N, F] of some tokens.
    """
    settings = layer_settings(target, shape.layers)
    head = DFlashHead(
        DFlashConfig(
            layers=Qwen3Config(**settings),
            feature_size=shape.states * target.config.get_text_config(decoder=True).hidden_size,
            outputs=len(token_ids),
            block_size=shape.block_size,
            mask_token_id=shape.mask_token_id,
        )
    )
    start_from(head, target, token_ids, seed=seed)
    embedding: Any = target.get_input_embeddings()
    with torch.no_grad():
        _look_back(head, features.float(), embedding.weight.float())
    return head


def _look_back(head: DFlashHead, features: Tensor, embedding: Tensor) -> None:
    """Let attention head j prefer the token j + 1 before each, whatever that is.

    Queries and keys of all tokens then have one direction, of few fast frequencies of the rotary embedding, queries
    turned back by j + 1 positions. features: [N, F] of some tokens. embedding: [V, H].
    """
    query_input = functional.normalize(embedding[head.config.mask_token_id], dim=0)
    means = head.context(features).mean(0), embedding.mean(0)
    key_input = functional.normalize(functional.normalize(torch.stack(means), dim=1).sum(0), dim=0)
    inverse: Tensor = head.rotary_emb.inv_freq
    frequencies, half = inverse[:_FREQUENCIES].float(), len(inverse)
    for layer in head.layers:
        attention: Any = layer.self_attn
        for index, rows in enumerate(attention.q_proj.weight.split(attention.head_dim)):
            turn = -(index + 1) * frequencies
            rows[: len(turn)] += turn.cos()[:, None] * query_input
            rows[half : half + len(turn)] += turn.sin()[:, None] * query_input
        for rows in attention.k_proj.weight.split(attention.head_dim):
            rows[: len(frequencies)] += key_input


def save_dflash(head: DFlashHead, layers: Sequence[int], target: str, folder: Path) -> None:
    """Write a head, bfloat16, in the format of speculators. layers: after how many it reads the target's states."""
    write_checkpoint(*stored_dflash(head, layers, target), folder)
