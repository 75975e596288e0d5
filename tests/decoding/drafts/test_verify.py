"""Verification against a plain loop."""

from hypothesis import given
from hypothesis import strategies as st

from decoding.drafts.draft import Draft
from decoding.drafts.verify import accepted_path
from tests.support.properties import repeatable


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Draw the target's tokens [B][K + 1], drafts [B][K] and their lengths; few tokens, so that many agree."""
    rows, k = draw(st.integers(1, 5)), draw(st.integers(0, 6))
    tokens = st.integers(0, 2)
    sampled = draw(st.lists(st.lists(tokens, min_size=k + 1, max_size=k + 1), min_size=rows, max_size=rows))
    drafts = draw(st.lists(st.lists(tokens, min_size=k, max_size=k), min_size=rows, max_size=rows))
    return sampled, drafts, draw(st.lists(st.integers(0, k), min_size=rows, max_size=rows))


def accepted_by_loop(sampled: list[int], draft: list[int]) -> int:
    accepted = 0
    for chosen, drafted in zip(sampled, draft, strict=False):
        if chosen != drafted:
            break
        accepted += 1
    return accepted


@repeatable
@given(batches())
def test_a_chain_is_a_tree_with_one_branch(batch: tuple[list[list[int]], list[list[int]], list[int]]) -> None:
    for row, draft, length in zip(*batch, strict=True):
        accepted = accepted_by_loop(row, draft[:length])
        path, disagrees = accepted_path(row, Draft(draft[:length], list(range(-1, length - 1))))
        assert path == list(range(accepted))
        assert disagrees == (accepted < length)


@repeatable
@given(st.data())
def test_trees(data: st.DataObject) -> None:
    """Compare with a walk from the text down, over trees whose siblings differ."""
    parents: list[int] = []
    tokens: list[int] = []
    for index in range(data.draw(st.integers(0, 8))):
        parent = data.draw(st.integers(-1, index - 1))
        siblings = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        parents.append(parent)
        tokens.append(next(token for token in range(9) if token not in siblings))
    sampled = data.draw(st.lists(st.integers(0, 2), min_size=len(tokens) + 1, max_size=len(tokens) + 1))
    expected: list[int] = []
    while True:
        last = expected[-1] if expected else -1
        children = [index for index, parent in enumerate(parents) if parent == last]
        chosen = [index for index in children if tokens[index] == sampled[last + 1]]
        if not chosen:
            break
        expected += chosen
    assert accepted_path(sampled, Draft(tokens, parents)) == (expected, bool(children))
