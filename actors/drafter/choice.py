"""A drafter's choices from its logits: by shared noise, or drawn from its own distribution.

It knows nothing of messages or caches.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from actors.drafter.row import DrafterRow
from actors.drafter.tree import DraftNode
from decoding.drafts.calibration import RANKS
from decoding.drafts.choice import DraftChoice
from decoding.drafts.rejection import distributions, draw
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import Position
from decoding.sampling.noise import draft_stream, gumbel, noise_key
from decoding.sampling.sampler import process, rank
from decoding.sampling.text_table import TextTables
from decoding.sampling.transfer import tensor_on
from engine.tokenizers.draft_mapping import DraftMapping


def choose(
    rows: Sequence[DrafterRow], nodes: Sequence[Sequence[DraftNode]], logits: Tensor, tables: TextTables
) -> list[DraftChoice]:
    """Return the tokens that may follow each node.

    Args:
        nodes: each row's.
        logits: [N, V] after each node, row after row.
        tables: of the rows' texts.
    """
    owners = [row for row, row_nodes in zip(rows, nodes, strict=True) for _ in row_nodes]
    flat = [node for row_nodes in nodes for node in row_nodes]
    groups: dict[tuple[bool, DraftMapping | None], list[int]] = {}
    for index, row in enumerate(owners):
        groups.setdefault((row.params.rejects, row.draft_mapping), []).append(index)
    choices: dict[int, DraftChoice] = {}
    for (draws, draft_mapping), indices in groups.items():
        part = logits if len(indices) == len(flat) else logits[tensor_on(logits.device, indices, torch.int64)]
        group = [owners[index] for index in indices], [flat[index] for index in indices], part
        batch = _batch(*group, tables)
        group_choices = _draw(*group, batch) if draws else _rank(*group, batch, draft_mapping)
        choices.update(zip(indices, group_choices, strict=True))
    return [choices[index] for index in range(len(flat))]


def _rank(
    rows: Sequence[DrafterRow],
    nodes: Sequence[DraftNode],
    logits: Tensor,
    batch: SamplingBatch,
    draft_mapping: DraftMapping | None,
) -> list[DraftChoice]:
    """Rank tokens with the target's noise; return the best, and how clearly the first leads."""
    if draft_mapping is None:
        tokens, scores = rank(logits, batch, RANKS)  # [N, RANKS]
    else:
        scores, tokens = _mapped_scores(rows, nodes, logits, batch, draft_mapping).topk(RANKS, dim=-1)
    return [DraftChoice.ranked(*best) for best in zip(tokens.tolist(), scores.tolist(), strict=True)]


def _mapped_scores(
    rows: Sequence[DrafterRow],
    nodes: Sequence[DraftNode],
    logits: Tensor,
    batch: SamplingBatch,
    draft_mapping: DraftMapping,
) -> Tensor:
    """Return [N, V] scores. A token gets the noise of the target's token with the same string."""
    scores = process(logits.float().masked_fill(draft_mapping.impossible, -math.inf), batch)
    keys = [noise_key(row.params.seed, row.position_below(node)) for row, node in zip(rows, nodes, strict=True)]
    noisy = gumbel(tensor_on(logits.device, keys, torch.int32), draft_mapping.noise_ids).add_(scores)
    return torch.where((batch.temperature == 0)[:, None], scores, noisy)


def _draw(
    rows: Sequence[DrafterRow], nodes: Sequence[DraftNode], logits: Tensor, batch: SamplingBatch
) -> list[DraftChoice]:
    """Draw one token per node, with noise of the drafter's own."""
    processed = process(logits, batch)
    keys = [
        noise_key(row.params.seed, row.position_below(node), draft_stream(row.restarted_at))
        for row, node in zip(rows, nodes, strict=True)
    ]
    _, *drawn = draw(processed, tensor_on(logits.device, keys, torch.int32))
    return [DraftChoice(drawn_from.tokens[:1], 0.0, drawn_from) for drawn_from in distributions(*drawn)]


def _batch(rows: Sequence[DrafterRow], nodes: Sequence[DraftNode], logits: Tensor, tables: TextTables) -> SamplingBatch:
    paths = [[above.token for above in node.path()] for node in nodes]
    masks: list[Tensor | None] = []
    for row, pairs in groupby(zip(rows, paths, strict=True), key=itemgetter(0)):  # a row's nodes come one after another
        row_paths = [path for _, path in pairs]
        masks += [None] * len(row_paths) if row.structure is None else row.structure.masks_after(row_paths)
    positions = [Position(row.history, path, mask) for row, path, mask in zip(rows, paths, masks, strict=True)]
    return SamplingBatch.build(positions, logits.shape[-1], logits.device, tables)
