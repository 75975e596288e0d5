"""Forked slots hold the texts of their beams, and only columns that differ are copied."""

import random

import torch

from actors.model.kv_pages import KVPages
from actors.target.beam_slots import BeamSlots

PROMPT = [90, 91, 92]


class CountingCache(KVPages):
    """A cache of one layer whose keys are the tokens themselves."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots=slots, capacity=64)
        states = torch.zeros(1, 1, 1, 1)
        self.layer = torch.nn.Identity()
        self.add_layer(self.layer, states, states)
        self.copied = 0

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        self.copied += end - start
        super().copy(source, target, start, end)

    def write(self, slot: int, column: int, token: int) -> None:
        page, offset = self.tables[slot, column // self.page_size], column % self.page_size
        for store in self.layers[self.layer]:
            store.view(self.pages, -1)[page, offset] = token

    def read(self, slot: int, count: int) -> list[int]:
        return [int(token) for token in self.layers[self.layer][0][self.tables[slot].long()].flatten()[:count]]


def step(cache: CountingCache, slots: BeamSlots, answers: list[list[int]]) -> None:
    """Write every beam's last token, and read the whole text back."""
    for slot, answer in zip(slots.by_beam, answers, strict=True):
        cache.write(slot, len(PROMPT) + len(answer) - 1, answer[-1])
    slots.note_written(answers)
    for slot, answer in zip(slots.by_beam, answers, strict=True):
        assert cache.read(slot, len(PROMPT) + len(answer)) == [*PROMPT, *answer]


def begun(cache: CountingCache, count: int, *, beams: int = 1) -> BeamSlots:
    for column, token in enumerate(PROMPT):
        cache.write(0, column, token)
    return BeamSlots(cache, list(range(count)), PROMPT, beams=beams)


def test_any_forks() -> None:
    rng = random.Random(0)
    for _ in range(30):
        cache = CountingCache(6)
        answers: list[list[int]] = [[]] * rng.choice([1, 1, 2])
        slots = begun(cache, 6, beams=len(answers))
        for _ in range(15):
            parents = [rng.randrange(len(answers)) for _ in range(rng.randint(1, 6))]
            slots.fork(parents)
            assert len(set(slots.by_beam)) == len(parents)
            answers = [[*answers[parent], rng.randrange(50)] for parent in parents]
            step(cache, slots, answers)
        for slot, text in slots.texts():
            assert cache.read(slot, len(text)) == text


def test_beams_that_stay_are_not_copied() -> None:
    cache = CountingCache(3)
    slots = begun(cache, 3)
    slots.fork([0, 0, 0])
    assert cache.copied == 2 * len(PROMPT)
    step(cache, slots, [[1], [2], [3]])
    slots.fork([2, 1, 0])
    step(cache, slots, [[3, 1], [2, 2], [1, 3]])
    assert cache.copied == 2 * len(PROMPT)
    slots.fork([0, 0, 1])
    step(cache, slots, [[3, 1, 1], [3, 1, 2], [2, 2, 3]])
    assert cache.copied == 2 * len(PROMPT) + 2  # of the answer [3, 1], to where the prompt is
    slots.fork([1, 0, 0])
    assert cache.copied == 2 * len(PROMPT) + 2 + 3


def test_a_fork_takes_the_slot_that_shares_most() -> None:
    cache = CountingCache(4)
    slots = begun(cache, 4)
    slots.fork([0, 0])
    step(cache, slots, [[1], [2]])
    for token in range(10):
        slots.fork([0, 1])
        answers = [[1, *range(token + 1)], [2, *range(token + 1)]]
        step(cache, slots, answers)
    slots.fork([0, 0])
    step(cache, slots, [[*answers[0], 5], [*answers[0], 6]])
    copied = cache.copied
    slots.fork([0, 0])
    assert cache.copied == copied + 1  # onto the beam that has just ended, which differs in one token
