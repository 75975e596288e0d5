"""Trees of draft tokens from ranked candidates for each of the next positions. Knows nothing of models."""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from decoding.drafts.draft import Draft

Path = tuple[int, ...]  # the rank of each token, from the text down


class Candidates(NamedTuple):
    """What may be at one position, the most probable first."""

    tokens: Sequence[int]  # [n]
    probabilities: Sequence[float]  # [n] that each is the target's, if the tokens before are


def best_tree(levels: Sequence[Candidates], size: int, *, chained: bool = False) -> Draft:
    """Return the `size` paths of candidates that are most probably committed (Sequoia, arXiv 2402.12374, section 3).

    chained: the candidates of a level follow the best ones before them only. The draft's probabilities are conditional.
    """
    paths: list[Path] = []
    heap: list[tuple[float, Path]] = []

    def push(probability: float, parent: Path) -> None:
        if len(parent) < len(levels):
            for rank, share in enumerate(levels[len(parent)].probabilities):
                heappush(heap, (-probability * share, (*parent, rank)))

    push(1.0, ())
    while heap and len(paths) < size:
        negative, path = heappop(heap)
        paths.append(path)
        if not chained or not any(path):
            push(-negative, path)
    return tree_of(levels, paths)


def tree_of(levels: Sequence[Candidates], paths: Sequence[Sequence[int]]) -> Draft:
    """Return a static tree (Medusa, arXiv 2401.10774, section 2.1.2).

    paths: of ranks, each after the path to its parent. What the levels lack is left out, with all below it.
    """
    draft = Draft([], [], [])
    nodes: dict[Path, int] = {(): -1}
    for path in map(tuple, paths):
        if len(path) > len(levels) or path[:-1] not in nodes:
            continue
        level, rank = levels[len(path) - 1], path[-1]
        if rank < min(len(level.tokens), len(level.probabilities)):
            nodes[path] = len(draft.tokens)
            draft.tokens.append(level.tokens[rank])
            draft.parents.append(nodes[path[:-1]])
            draft.probabilities.append(level.probabilities[rank])
    return draft
