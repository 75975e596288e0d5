"""What a drafter would have next, from its logits: by shared noise, or drawn from its own distribution.

Knows nothing of messages or caches.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from actors.drafter.row import DrafterRow
from actors.drafter.tree import DraftChoice, DraftNode
from actors.tokenizers.draft_mapping import DraftMapping
from decoding.drafts.calibration import RANKS
from decoding.drafts.rejection import distributions, draw
from decoding.sampling.history import Position
from decoding.sampling.noise import draft_stream, gumbel, noise_key
from decoding.sampling.sampler import SamplingBatch, process, rank
from decoding.sampling.transfer import tensor_on


def choose(rows: Sequence[DrafterRow], nodes: Sequence[Sequence[DraftNode]], logits: Tensor) -> list[DraftChoice]:
    """What may follow each node.

    Args:
        nodes: of each row.
        logits: [N, V], after each of the nodes, row after row.
    """
    owners = [row for row, of_row in zip(rows, nodes, strict=True) for _ in of_row]
    flat = [node for of_row in nodes for node in of_row]
    groups: dict[tuple[bool, DraftMapping | None], list[int]] = {}
    for at, row in enumerate(owners):
        groups.setdefault((row.params.rejects, row.draft_mapping), []).append(at)
    choices: dict[int, DraftChoice] = {}
    for (draws, draft_mapping), chosen in groups.items():
        part = logits if len(chosen) == len(flat) else logits[tensor_on(logits.device, chosen, torch.int64)]
        of_group = [owners[at] for at in chosen], [flat[at] for at in chosen], part
        found = _draw(*of_group) if draws else _rank(*of_group, draft_mapping)
        choices.update(zip(chosen, found, strict=True))
    return [choices[at] for at in range(len(flat))]


def _rank(
    rows: Sequence[DrafterRow], nodes: Sequence[DraftNode], logits: Tensor, draft_mapping: DraftMapping | None
) -> list[DraftChoice]:
    """With the target's noise: the best tokens, and how clearly the first of them leads."""
    batch = _batch(rows, nodes, logits)
    if draft_mapping is None:
        tokens, scores = rank(logits, batch, RANKS)  # [N, RANKS]
    else:
        scores, tokens = _translated_scores(rows, nodes, logits, batch, draft_mapping).topk(RANKS, dim=-1)
    return [DraftChoice.ranked(*best) for best in zip(tokens.tolist(), scores.tolist(), strict=True)]


def _translated_scores(
    rows: Sequence[DrafterRow],
    nodes: Sequence[DraftNode],
    logits: Tensor,
    batch: SamplingBatch,
    draft_mapping: DraftMapping,
) -> Tensor:
    """[N, V] whose maximum is the choice: a token has the noise that the target's token of the same string has."""
    scores = process(logits.float().masked_fill(draft_mapping.impossible, -math.inf), batch)
    pairs = zip(rows, nodes, strict=True)
    keys = {
        at: noise_key(row.params.seed, row.position_below(node))
        for at, (row, node) in enumerate(pairs)
        if not row.params.greedy
    }
    if not keys:
        return scores
    noise = gumbel(tensor_on(logits.device, list(keys.values()), torch.int32), draft_mapping.noise_ids)
    return scores.index_add(0, tensor_on(logits.device, list(keys), torch.int64), noise)


def _draw(rows: Sequence[DrafterRow], nodes: Sequence[DraftNode], logits: Tensor) -> list[DraftChoice]:
    """With noise of its own: one token."""
    processed = process(logits, _batch(rows, nodes, logits))
    keys = [
        noise_key(row.params.seed, row.position_below(node), draft_stream(row.restarted_at))
        for row, node in zip(rows, nodes, strict=True)
    ]
    _, *drawn = draw(processed, tensor_on(logits.device, keys, torch.int32))
    return [DraftChoice(drawn_from.tokens[:1], 0.0, drawn_from) for drawn_from in distributions(*drawn)]


def _batch(rows: Sequence[DrafterRow], nodes: Sequence[DraftNode], logits: Tensor) -> SamplingBatch:
    paths = [[above.token for above in node.path()] for node in nodes]
    masks: list[Tensor | None] = []
    for row, pairs in groupby(zip(rows, paths, strict=True), key=itemgetter(0)):  # a row's nodes come one after another
        of_row = [path for _, path in pairs]
        masks += [None] * len(of_row) if row.structure is None else row.structure.masks_after(of_row)
    positions = [Position(row.history, path, mask) for row, path, mask in zip(rows, paths, masks, strict=True)]
    return SamplingBatch.build(positions, logits.shape[-1], logits.device)
