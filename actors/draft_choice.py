"""What a drafter would have next, from its logits: by shared noise, or drawn from its own distribution.

Knows nothing of messages or caches.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from actors.draft_tree import DraftChoice, DraftNode
from actors.drafter_row import DrafterRow
from decoding.calibration import RANKS
from decoding.history import Position
from decoding.noise import draft_stream, noise_key
from decoding.rejection import distributions, draw
from decoding.sampling import SamplingBatch, process, rank


def choose(rows: Sequence[DrafterRow], nodes: Sequence[Sequence[DraftNode]], logits: Tensor) -> list[DraftChoice]:
    """What may follow each node.

    Args:
        nodes: of each row.
        logits: [N, V], after each of the nodes, row after row.
    """
    owners = [row for row, of_row in zip(rows, nodes, strict=True) for _ in of_row]
    flat = [node for of_row in nodes for node in of_row]
    choices: dict[int, DraftChoice] = {}
    for way in (_rank, _draw):
        chosen = [at for at, row in enumerate(owners) if row.params.rejects == (way is _draw)]
        if chosen:
            part = logits if len(chosen) == len(flat) else logits[torch.tensor(chosen, device=logits.device)]
            found = way([owners[at] for at in chosen], [flat[at] for at in chosen], part)
            choices.update(zip(chosen, found, strict=True))
    return [choices[at] for at in range(len(flat))]


def _rank(rows: Sequence[DrafterRow], nodes: Sequence[DraftNode], logits: Tensor) -> list[DraftChoice]:
    """With the target's noise: the best tokens, and how clearly the first of them leads."""
    tokens, scores = rank(logits, _batch(rows, nodes, logits), RANKS)  # [N, RANKS]
    return [
        DraftChoice([token for token, score in zip(*best, strict=True) if score > -math.inf], best[1][0] - best[1][1])
        for best in zip(tokens.tolist(), scores.tolist(), strict=True)
    ]


def _draw(rows: Sequence[DrafterRow], nodes: Sequence[DraftNode], logits: Tensor) -> list[DraftChoice]:
    """With noise of its own: one token."""
    processed = process(logits, _batch(rows, nodes, logits))
    keys = [
        noise_key(row.params.seed, node.position + 1, draft_stream(row.restarted_at))
        for row, node in zip(rows, nodes, strict=True)
    ]
    _, *drawn = draw(processed, torch.tensor(keys, dtype=torch.int32, device=logits.device))
    return [DraftChoice(drawn_from.tokens[:1], 0.0, drawn_from) for drawn_from in distributions(*drawn)]


def _batch(rows: Sequence[DrafterRow], nodes: Sequence[DraftNode], logits: Tensor) -> SamplingBatch:
    paths = [[above.token for above in node.path()] for node in nodes]
    masks = [
        None if row.structure is None else row.structure.masks_after([path])[0]
        for row, path in zip(rows, paths, strict=True)
    ]
    positions = [Position(row.history, path, mask) for row, path, mask in zip(rows, paths, masks, strict=True)]
    return SamplingBatch.build(positions, logits.shape[-1], logits.device)
