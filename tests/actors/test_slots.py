"""Slots are taken lowest first, and rows are read without a copy where they can be."""

import torch

from actors.slots import SlotCache, select_rows


def test_the_lowest_free_slot_is_taken() -> None:
    cache = SlotCache(layers=1, slots=3, capacity=4)
    assert [cache.take(), cache.take(), cache.take()] == [0, 1, 2]
    assert cache.free == 0
    cache.give_back(2)
    cache.give_back(0)
    assert [cache.free, cache.take(), cache.take(), cache.free] == [2, 0, 2, 0]


def test_consecutive_rows_are_a_slice() -> None:
    cpu = torch.device("cpu")
    assert select_rows([2, 3, 4], cpu) == slice(2, 5)
    assert select_rows([7], cpu) == slice(7, 8)
    for slots in ([4, 3], [0, 2], [1, 1]):
        selected = select_rows(slots, cpu)
        assert isinstance(selected, torch.Tensor)
        assert selected.tolist() == slots
