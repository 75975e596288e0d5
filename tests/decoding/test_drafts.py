"""The trie against a naive model: a set of offered paths, filtered by what was committed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.drafts import MAX_DRAFT_LENGTH, DraftTrie
from tests.support.properties import repeatable

TOKENS = st.integers(0, 2)


class NaiveTrie:
    """Every valid path ever offered, in absolute positions; the answer is worked out from scratch."""

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

    def continuations(self, limit: int) -> list[tuple[int, ...]]:
        """What the surviving paths offer after the committed text, cut to the limit."""
        at = len(self.committed)
        return [tuple(path[at : at + limit]) for path in self.paths if path[:at] == self.committed]


@repeatable
@given(st.data())
def test_any_offers_in_any_order(data: st.DataObject) -> None:
    prompt = data.draw(st.lists(TOKENS, min_size=1, max_size=3))
    committed = list(prompt)
    trie, naive = DraftTrie(committed), NaiveTrie(prompt)
    for _ in range(data.draw(st.integers(0, 25))):
        match data.draw(st.sampled_from(["offer", "true offer", "offer again", "commit"])):
            case "offer":
                base = data.draw(st.integers(-1, len(committed) + 2))
                path = data.draw(st.lists(TOKENS, max_size=4))
            case "true offer":
                behind = data.draw(st.integers(0, len(committed)))
                base = len(committed) - behind
                path = [*committed[base:], *data.draw(st.lists(TOKENS, max_size=4))]
            case "offer again" if naive.paths:
                path, base = data.draw(st.sampled_from(naive.paths)), 0
            case _:
                tokens = data.draw(st.lists(TOKENS, max_size=3))
                trie.commit(tokens)
                naive.commit(tokens)
                continue
        assert trie.offer(base, path) == naive.offer(base, path)
        limit = data.draw(st.integers(0, 6))
        found = trie.longest_path(limit)
        offered = naive.continuations(limit)
        assert len(found) == max(map(len, offered), default=0)
        assert not found or tuple(found) in {path[: len(found)] for path in offered}
    assert committed == naive.committed


def test_the_earliest_of_equally_deep_paths_wins() -> None:
    trie = DraftTrie([1])
    for path in ([5, 6], [7, 8], [5, 9]):
        assert trie.offer(1, path)
    assert trie.longest_path(8) == [5, 6]
    trie.commit([7])
    assert trie.longest_path(8) == [8]


@pytest.mark.parametrize(("base", "path"), [(4, [9]), (-1, [9]), (0, [1, 2, 3]), (1, [2]), (1, [9, 3, 4]), (3, [])])
def test_offers_that_fit_nowhere_are_dropped(base: int, path: list[int]) -> None:
    trie = DraftTrie([1, 2, 3])
    assert not trie.offer(base, path)
    assert trie.longest_path(8) == []


def test_an_offer_for_what_is_committed_by_now_still_helps() -> None:
    trie = DraftTrie([1])
    trie.commit([2, 3])
    assert trie.offer(1, [2, 3, 4, 5])
    assert trie.longest_path(8) == [4, 5]


def test_a_limit_of_zero_or_less_gives_nothing() -> None:
    trie = DraftTrie([1])
    trie.offer(1, [2])
    assert trie.longest_path(0) == trie.longest_path(-3) == []


def test_floods_are_bounded() -> None:
    trie = DraftTrie([1])
    assert trie.offer(1, list(range(10_000)))
    assert len(trie.longest_path(10_000)) == MAX_DRAFT_LENGTH
    for token in range(10_000):
        trie.offer(1, [token, 5])
    trie.commit([9_999])
    assert trie.longest_path(4) == []
    assert trie.offer(2, [7])
    assert trie.longest_path(4) == [7]
