"""Slots are taken lowest first."""

from actors.slots import SlotCache


def test_the_lowest_free_slot_is_taken() -> None:
    cache = SlotCache(slots=3, capacity=4)
    assert [cache.take(), cache.take(), cache.take()] == [0, 1, 2]
    assert cache.free == 0
    cache.give_back(2)
    cache.give_back(0)
    assert [cache.free, cache.take(), cache.take(), cache.free] == [2, 0, 2, 0]
