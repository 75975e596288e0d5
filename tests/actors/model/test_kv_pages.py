"""Which slot a text gets, and how much of it is cached there."""

from actors.model.kv_pages import LEAST_SHARED, KVPages, common_prefix


def test_the_lowest_empty_slot_is_taken() -> None:
    cache = KVPages(slots=3, capacity=4)
    assert [cache.take(), cache.take(), cache.take()] == [(0, 0), (1, 0), (2, 0)]
    assert cache.free == 0
    cache.give_back(2)
    cache.give_back(0)
    assert [cache.free, cache.take(), cache.take(), cache.free] == [2, (0, 0), (2, 0), 0]


def test_a_text_gets_the_slot_with_the_longest_common_prefix() -> None:
    cache = KVPages(slots=3, capacity=4 * LEAST_SHARED)
    text = list(range(3 * LEAST_SHARED))
    for _ in range(3):
        cache.take()
    cache.give_back(0, text[:LEAST_SHARED])
    cache.give_back(1, [*text[: 2 * LEAST_SHARED], 7])
    cache.give_back(2)
    assert cache.take(text) == (1, 2 * LEAST_SHARED)
    assert cache.take(text[: LEAST_SHARED - 1]) == (2, 0)  # too short to reuse: the cached text stays
    assert cache.take([5, 6]) == (0, 0)


def test_among_slots_with_other_texts_the_longest_free_is_taken() -> None:
    cache = KVPages(slots=2, capacity=4)
    cache.take()
    cache.take()
    cache.give_back(1, [1, 2])
    cache.give_back(0, [1, 2])
    assert cache.take([1, 2, 3]) == (1, 0)


def test_common_prefixes() -> None:
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2], [1, 2]) == 2
    assert common_prefix([2], [1]) == 0
