"""The trie against a naive model: a set of offered paths, filtered by the committed text."""

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.drafts.draft import MAX_DRAFT_LENGTH, Draft, ProposerName
from decoding.drafts.trie import DraftTrie
from tests.support.properties import repeatable

TOKENS = st.integers(0, 2)


class NaiveTrie:
    """Keeps every valid path in absolute positions and computes answers from scratch."""

    def __init__(self, committed: list[int]) -> None:
        self.committed = list(committed)
        self.paths: list[list[int]] = []  # whole texts, prompt included, in the order of offering

    def offer(self, base: int, tokens: list[int]) -> bool:
        text = [*self.committed[:base], *tokens]
        fits = 0 <= base <= len(self.committed) < len(text) and text[: len(self.committed)] == self.committed
        if fits:
            self.paths.append(text)
        return fits

    def commit(self, tokens: list[int]) -> None:
        self.committed += tokens

    def offer_tree(self, base: int, tokens: list[int], parents: list[int]) -> bool:
        """Offer the paths to all nodes of a tree."""
        paths: list[list[int]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
        fits = [self.offer(base, path) for path in paths]
        return any(fits)

    def continuations(self, limit: int) -> list[tuple[int, ...]]:
        """Return the surviving paths after the committed text, cut to the limit."""
        length = len(self.committed)
        return [tuple(path[length : length + limit]) for path in self.paths if path[:length] == self.committed]


@repeatable
@given(st.data())
def test_any_offers_in_any_order(data: st.DataObject) -> None:
    prompt = data.draw(st.lists(TOKENS, min_size=1, max_size=3))
    committed = list(prompt)
    trie, naive = DraftTrie(committed), NaiveTrie(prompt)
    for _ in range(data.draw(st.integers(0, 25))):
        match data.draw(st.sampled_from(["offer", "true offer", "offer again", "tree", "commit"])):
            case "offer":
                base = data.draw(st.integers(-1, len(committed) + 2))
                path = data.draw(st.lists(TOKENS, max_size=4))
            case "true offer":
                behind = data.draw(st.integers(0, len(committed)))
                base = len(committed) - behind
                path = [*committed[base:], *data.draw(st.lists(TOKENS, max_size=4))]
            case "offer again" if naive.paths:
                path, base = data.draw(st.sampled_from(naive.paths)), 0
            case "tree":
                path = data.draw(st.lists(TOKENS, min_size=1, max_size=6))
                parents = [data.draw(st.integers(-1, index - 1)) for index in range(len(path))]
                base = data.draw(st.integers(0, len(committed)))
                assert trie.offer(base, path, parents) == naive.offer_tree(base, path, parents)
                continue
            case _:
                tokens = data.draw(st.lists(TOKENS, max_size=3))
                trie.commit(tokens)
                naive.commit(tokens)
                continue
        assert trie.offer(base, path) == naive.offer(base, path)
        limit = data.draw(st.integers(0, 6))
        prefixes = {path[:n] for path in naive.continuations(limit) for n in range(1, len(path) + 1)}
        assert {tuple(path) for path in paths(trie.best_draft(1000, limit))} == prefixes
        best = tuple(trie.best_path(limit))
        assert not prefixes or best in prefixes
        assert len(best) == limit or all(path[:-1] != best for path in prefixes)
    assert committed == naive.committed


def paths(draft: Draft) -> list[list[int]]:
    """Return the path to each token of the draft."""
    draft_paths: list[list[int]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        draft_paths.append([*(draft_paths[parent] if parent >= 0 else []), token])
    assert list(draft.depths()) == list(map(len, draft_paths))
    return draft_paths


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[float]]:
    """Draw distinct tokens, their parents and probabilities, which sum to at most 1 over siblings."""
    count = draw(st.integers(1, 7))
    parents = [draw(st.integers(-1, index - 1)) for index in range(count)]
    probabilities = [draw(st.floats(0, 1)) / parents.count(parent) for parent in parents]
    return list(range(10, 10 + count)), parents, probabilities


@repeatable
@given(trees(), st.integers(0, 7), st.integers(0, 7))
def test_the_best_draft_is_as_good_as_any(
    tree: tuple[list[int], list[int], list[float]], size: int, depth: int
) -> None:
    """Compared with all subsets that hold their nodes' parents."""
    tokens, parents, probabilities = tree
    trie = DraftTrie([1])
    trie.offer(1, tokens, parents, probabilities)
    joint: list[float] = []
    depths: list[int] = []
    for parent, probability in zip(parents, probabilities, strict=True):
        joint.append(probability * (joint[parent] if parent >= 0 else 1.0))
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    indices = [index for index in range(len(tokens)) if depths[index] <= depth]
    best = max(
        sum(joint[index] for index in chosen)
        for chosen in combinations(indices, min(size, len(indices)))
        if all(parents[index] in (-1, *chosen) for index in chosen)
    )
    draft = trie.best_draft(size, depth)
    assert len(draft.tokens) == min(size, len(indices))
    assert sum(joint[token - 10] for token in draft.tokens) == pytest.approx(best)


def test_a_chain_is_best_when_the_drafter_is_sure_and_a_tree_when_it_is_not() -> None:
    for probability, chain in ((0.9, True), (0.45, False)):
        trie = DraftTrie([1])
        trie.offer(1, [5, 6, 7, 8], [-1, 0, 1, -1], [probability, probability, probability, 0.4])
        assert trie.best_draft(3, 8).is_chain == chain


@repeatable
@given(trees(), st.integers(0, 7), st.integers(0, 7))
def test_without_branches_the_best_draft_is_the_best_path(
    tree: tuple[list[int], list[int], list[float]], size: int, depth: int
) -> None:
    trie = DraftTrie([1])
    trie.offer(1, *tree)
    draft = trie.best_draft(size, depth, branching=False)
    assert draft.is_chain
    assert draft.tokens == trie.best_path(min(size, depth))


def test_the_earliest_of_equally_probable_paths_wins() -> None:
    trie = DraftTrie([1])
    for path in ([5, 6], [7, 8], [5, 9]):
        assert trie.offer(1, path)
        trie.offer(1, path, None, [0.3, 0.3])
    assert trie.best_path(8) == [5, 6]
    trie.commit([7])
    assert trie.best_path(8) == [8]


@pytest.mark.parametrize(("base", "path"), [(4, [9]), (-1, [9]), (0, [1, 2, 3]), (1, [2]), (1, [9, 3, 4]), (3, [])])
def test_offers_that_fit_nowhere_are_dropped(base: int, path: list[int]) -> None:
    trie = DraftTrie([1, 2, 3])
    assert not trie.offer(base, path)
    assert trie.best_path(8) == []


def test_an_offer_for_what_is_committed_by_now_still_helps() -> None:
    trie = DraftTrie([1])
    trie.commit([2, 3])
    assert trie.offer(1, [2, 3, 4, 5])
    assert trie.best_path(8) == [4, 5]


def test_a_limit_of_zero_or_less_gives_nothing() -> None:
    trie = DraftTrie([1])
    trie.offer(1, [2])
    assert trie.best_path(0) == trie.best_path(-3) == []


def test_floods_are_bounded() -> None:
    trie = DraftTrie([1])
    assert trie.offer(1, list(range(10_000)))
    assert len(trie.best_path(10_000)) == MAX_DRAFT_LENGTH
    for token in range(10_000):
        trie.offer(1, [token, 5])
    trie.commit([9_999])
    assert trie.best_path(4) == []
    assert trie.offer(2, [7])
    assert trie.best_path(4) == [7]


DRAWN = ([5, 7, 6], [0.2, 0.5, 0.3])  # in the order of the draw


def test_drawn_tokens_fit_only_in_the_order_of_their_draw() -> None:
    trie = DraftTrie([1], rejects=True)
    assert not trie.offer(1, [7], distributions=[DRAWN])
    assert trie.offer(1, [5], distributions=[DRAWN])
    assert not trie.offer(1, [6], distributions=[DRAWN])
    assert trie.offer(1, [7], distributions=[DRAWN])
    draft = trie.best_draft(8, 8)
    assert (draft.tokens, draft.parents, draft.distributions) == ([5, 7], [-1, -1], [DRAWN, DRAWN])


def test_siblings_come_from_one_draw() -> None:
    trie = DraftTrie([1], rejects=True)
    trie.offer(1, [5], distributions=[DRAWN])
    other = ([7, 5], [0.5, 0.5])
    assert not trie.offer(1, [7], distributions=[other])
    assert not trie.offer(1, [5, 6], distributions=[other, other])
    assert trie.best_draft(8, 8).tokens == [5]


@pytest.mark.parametrize(
    "unsound",
    [
        ([], []),
        ([5], []),
        ([5, 6], [1.0]),
        ([5, 5], [0.5, 0.5]),
        ([5, 6], [0.5, -0.5]),
        ([5, 6], [0.2, 0.2]),
        ([5], [math.nan]),
    ],
)
def test_what_is_no_distribution_is_dropped(unsound: tuple[list[int], list[float]]) -> None:
    trie = DraftTrie([1], rejects=True)
    assert not trie.offer(1, [5], distributions=[unsound])
    assert not trie.offer(1, [5], distributions=[])
    assert not trie


def test_an_empty_distribution_is_the_one_that_its_token_was_offered_with() -> None:
    trie = DraftTrie([1], rejects=True)
    trie.offer(1, [5], distributions=[DRAWN])
    assert trie.offer(1, [5, 8, 7], [-1, 0, -1], distributions=[([], []), ([8], [1.0]), DRAWN])
    draft = trie.best_draft(8, 8)
    assert dict(zip(draft.tokens, draft.distributions, strict=True)) == {5: DRAWN, 7: DRAWN, 8: ([8], [1.0])}


def test_another_drafters_draw_adds_no_sibling() -> None:
    """Its token may be the next in the order of the first draw, but was offered because of the second."""
    trie = DraftTrie([1], rejects=True)
    trie.offer(1, [5], distributions=[DRAWN])
    assert not trie.offer(1, [7, 8], distributions=[([], []), ([8], [1.0])])
    assert trie.best_draft(8, 8).tokens == [5]


def test_where_tokens_were_drawn_no_others_count() -> None:
    """Neither the same token, nor tokens after it, nor probabilities that depend on the draw."""
    trie = DraftTrie([1], rejects=True)
    trie.default_probability = 0.4
    trie.offer(1, [5, 9], probabilities=[0.99, 0.99])
    trie.offer(1, [8], probabilities=[0.99])
    assert set(trie.best_draft(8, 8).tokens) == {5, 8, 9}
    trie.offer(1, [5, 6], probabilities=[0.9, 0.9], distributions=[DRAWN, ([6], [1.0])])
    draft = trie.best_draft(8, 8)
    assert draft.tokens == trie.best_path(8) == [5, 6]
    assert draft.probabilities == pytest.approx([0.4, 0.16])


def test_elder_siblings_come_first_whatever_the_probabilities_were() -> None:
    trie = DraftTrie([1], rejects=True)
    trie.default_probability = 0.1
    trie.offer(1, [5], distributions=[DRAWN])
    trie.default_probability = 0.9
    trie.offer(1, [7], distributions=[DRAWN])
    assert trie.best_draft(1, 8).tokens == [5]


def test_what_survives_a_verdict_keeps_its_distribution() -> None:
    trie = DraftTrie([1], rejects=True)
    trie.offer(1, [5, 6, 8], distributions=[DRAWN, ([6], [1.0]), None])
    trie.commit([5])
    draft = trie.best_draft(8, 8)
    assert (draft.tokens, draft.distributions) == ([6, 8], [([6], [1.0]), None])
    assert draft.first(1).distributions == [([6], [1.0])]


def test_after_a_rejection_nothing_from_before_counts() -> None:
    trie = DraftTrie([1], rejects=True)
    trie.offer(1, [5, 6], distributions=[DRAWN, ([6], [1.0])])
    trie.commit([5])
    trie.fence()
    assert not trie
    assert not trie.offer(1, [5, 6], distributions=[DRAWN, ([6], [1.0])])
    assert not trie.offer(1, [5, 6])
    assert trie.offer(2, [6], distributions=[([6], [1.0])])


def test_a_request_that_moves_begins_behind_a_fence() -> None:
    trie = DraftTrie([1, 2, 3], rejects=True)
    assert not trie.offer(2, [3, 4], distributions=[([3], [1.0]), ([4], [1.0])])
    assert trie.offer(3, [4], distributions=[([4], [1.0])])


def test_shared_noise_needs_no_distributions() -> None:
    trie = DraftTrie([1])
    assert trie.offer(1, [7, 9], probabilities=[0.9, 0.8], distributions=[DRAWN, DRAWN])
    draft = trie.best_draft(8, 8)
    assert draft.tokens == [7, 9]
    assert not any(draft.distributions)


def test_paths_and_depths() -> None:
    draft = Draft([5, 6, 7, 8], [-1, 0, -1, 1])
    assert draft.paths() == [(5,), (5, 6), (7,), (5, 6, 8)]
    assert list(draft.depths()) == [1, 2, 1, 3]


def test_a_token_knows_everyone_who_offered_it() -> None:
    """In a chain, in the tree that it becomes, and among drawn tokens; the first to offer it counts for it."""
    trie = DraftTrie([1])
    trie.offer(1, [5, 6], proposer="drafter")
    trie.offer(1, [5, 6, 7], proposer="eagle3")
    trie.offer(1, [5], proposer="drafter")
    both: tuple[ProposerName, ...] = ("drafter", "eagle3")
    assert trie.best_draft(8, 8).proposers == [both, both, ("eagle3",)]
    trie.offer(1, [5, 8], proposer="ngram")
    draft = trie.best_draft(8, 8)
    assert dict(zip(draft.tokens, draft.proposers, strict=True)) == {
        5: (*both, "ngram"),
        6: both,
        7: ("eagle3",),
        8: ("ngram",),
    }
    assert draft.proposed_by() == {"drafter": 2, "eagle3": 1, "ngram": 1}
    assert draft.first(1).proposed_by() == {"drafter": 1}
    drawn = DraftTrie([1], rejects=True)
    for proposer in both:
        drawn.offer(1, [5], distributions=[DRAWN], proposer=proposer)
    assert drawn.best_draft(8, 8).proposers == [both]
