"""Every slot reads what it wrote or took over, no shared page is written, and no page is lost."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.errors import OutOfPagesError
from engine.model.page_allocator import PageAllocator, PageKeys
from engine.model.page_tables import PageTables
from tests.support.properties import repeatable

SIZE, SLOTS, CAPACITY = 4, 4, 40


def keys_of(text: list[int], size: int = SIZE) -> list[bytes]:
    return list(PageKeys([], text, len(text) // size, size))


class Pages:
    """Page tables, the content of their pages, and the text that each slot in use should hold."""

    def __init__(self, pages: int) -> None:
        self.tables = PageTables(slots=SLOTS, capacity=CAPACITY, pages=pages, page_size=SIZE)
        self.contents = [[-1] * SIZE for _ in range(pages + 1)]
        self.texts: dict[int, list[int]] = {}

    def read(self, slot: int, length: int) -> list[int]:
        table = self.tables.tables[slot].tolist()
        return [self.contents[table[column // SIZE]][column % SIZE] for column in range(length)]

    def holders(self) -> Counter[int]:
        return Counter(page for table in self.tables.tables.tolist() for page in table if page)

    def take(self, text: list[int]) -> None:
        if self.tables.free:
            slot, held = self.tables.take(keys_of(text))
            assert held % SIZE == 0
            self.texts[slot] = text[:held]

    def write(self, slot: int, tokens: list[int], kept: int) -> None:
        """Append tokens, of which the first `kept` stay in the text."""
        start = len(self.texts[slot])
        tokens = tokens[: CAPACITY - start]
        before = self.tables.tables.clone()
        try:
            self.tables.reserve(slot, start, start + len(tokens))
        except OutOfPagesError:
            assert self.tables.tables.equal(before)
            return
        for target, source in self.tables.pop_copies():
            self.contents[target] = list(self.contents[source])
        holders = self.holders()
        for column, token in enumerate(tokens, start):
            page = int(self.tables.tables[slot, column // SIZE])
            assert holders[page] == 1
            self.contents[page][column % SIZE] = token
        self.texts[slot] += tokens[:kept]

    def note(self, slot: int) -> None:
        self.tables.note_text(slot, keys_of(self.texts[slot]))

    def rewrite(self, slot: int, length: int) -> None:
        del self.texts[slot][length:]

    def fork(self, source: int, target: int) -> None:
        if source != target:
            self.texts[target] = list(self.texts[source])
            self.tables.fork(source, target, len(self.texts[source]))

    def extend(self, slot: int, text: list[int]) -> None:
        """Take over what others have computed, if the slot's text is the beginning of it."""
        held = len(self.texts[slot])
        if text[:held] == self.texts[slot]:
            held = self.tables.extend(slot, keys_of(text), held)
            self.texts[slot] = text[:held]

    def give_back(self, slot: int) -> None:
        del self.texts[slot]
        self.tables.give_back(slot)

    def check(self) -> None:
        allocator = self.tables.allocator
        holders = self.holders()
        assert allocator.used == len(holders)
        assert allocator.shared == sum(count > 1 for count in holders.values())
        for slot, text in self.texts.items():
            assert self.read(slot, len(text)) == text
            assert self.tables.held_pages(slot) >= -(-len(text) // SIZE)


texts = st.lists(st.integers(0, 1), max_size=20)
slots = st.integers(0, SLOTS - 1)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("take"), texts),
        st.tuples(st.just("write"), slots, texts, st.integers(0, 20)),
        st.tuples(st.just("note"), slots),
        st.tuples(st.just("rewrite"), slots, st.integers(0, 20)),
        st.tuples(st.just("fork"), slots, slots),
        st.tuples(st.just("extend"), slots, texts),
        st.tuples(st.just("give_back"), slots),
    ),
    max_size=60,
)


@repeatable
@given(operations, st.integers(1, 30))
def test_slots_read_their_texts_and_no_page_is_lost(calls: list[tuple], pages: int) -> None:
    state = Pages(pages)
    for name, *arguments in calls:
        named_slots = arguments[: 2 if name == "fork" else 1] if name != "take" else []
        if all(slot in state.texts for slot in named_slots):
            getattr(state, name)(*arguments)
            state.check()
    for slot in list(state.texts):
        state.give_back(slot)
    allocator = state.tables.allocator
    assert (allocator.used, allocator.shared, allocator.available) == (0, 0, pages)
    assert not state.tables.tables.any()
    assert sorted(allocator.allocate() for _ in range(pages)) == list(range(1, pages + 1))


def test_full_pages_of_the_same_text_are_shared_without_a_copy() -> None:
    state = Pages(10)
    text = list(range(11))
    state.take(text)
    state.write(0, text, kept=11)
    state.note(0)
    state.take([*text[:9], 99, 99, 99, 99])
    assert state.texts[1] == text[:8]
    assert state.tables.tables[1, :2].tolist() == state.tables.tables[0, :2].tolist()
    assert (state.tables.allocator.used, state.tables.allocator.shared) == (3, 2)
    assert not state.tables.pop_copies()


def test_a_page_that_two_slots_computed_is_kept_once() -> None:
    state = Pages(10)
    for slot in (0, 1):
        state.take([])
        state.write(slot, [1, 2, 3, 4], kept=4)
    state.note(0)
    state.note(1)
    assert (state.tables.allocator.used, state.tables.allocator.shared) == (1, 1)


def test_a_fork_copies_only_the_page_that_it_writes() -> None:
    state = Pages(10)
    state.take([])
    state.take([])
    state.write(0, [1, 2, 3, 4, 5, 6], kept=6)
    state.fork(0, 1)
    assert state.tables.allocator.used == 2
    state.tables.reserve(1, 6, 7)
    first, second = state.tables.tables[0].tolist(), state.tables.tables[1].tolist()
    assert state.tables.pop_copies() == [(second[1], first[1])]
    assert (first[0], state.tables.allocator.used) == (second[0], 3)
    state.tables.reserve(0, 6, 7)  # now its own
    assert not state.tables.pop_copies()


def test_the_ends_of_the_least_recently_used_texts_are_evicted_first() -> None:
    state = Pages(4)
    for text in ([1] * 8, [2] * 8):
        state.take(text)
        state.write(0, text, kept=8)
        state.note(0)
        state.give_back(0)
    state.take([])
    state.write(0, [3], kept=1)
    assert state.tables.allocator.evictions == 1
    state.take([1] * 8)
    assert state.texts[1] == [1] * 4
    state.take([2] * 8)
    assert state.texts[2] == [2] * 8


def test_a_slot_takes_over_pages_that_another_computes_after_it_began() -> None:
    state = Pages(10)
    text = list(range(9))
    state.take(text)
    state.take(text)
    state.write(0, text, kept=9)
    state.write(1, text[:5], kept=5)
    state.note(0)
    state.note(1)
    state.extend(1, text)
    assert state.texts[1] == text[:8]
    assert state.tables.allocator.used == 3


def test_pages_that_are_known_but_not_held_are_not_shared() -> None:
    state = Pages(10)
    text = list(range(9))
    state.take(text)
    state.write(0, text, kept=9)
    state.note(0)
    keys = keys_of([*text, *[1] * 7])  # two pages are held
    assert [state.tables.are_held(keys, count) for count in (1, 2, 3)] == [True, True, False]
    assert not state.tables.are_held(keys, 2, released={state.tables.page(0, 4)})
    assert not state.tables.are_held(keys_of([5, *text]), 1)
    state.give_back(0)  # evictable pages are available, so taking them over takes from those
    assert not state.tables.are_held(keys, 1)


def test_running_out_names_what_is_needed_and_changes_nothing() -> None:
    tables = PageTables(slots=2, capacity=16, pages=3, page_size=4)
    tables.reserve(0, 0, 8)
    with pytest.raises(OutOfPagesError, match="2 KV pages are needed, but of 3 only 1 are free"):
        tables.reserve(1, 0, 8)
    assert (tables.allocator.used, tables.held_pages(1)) == (2, 0)
    tables.reserve(1, 0, 4)
    with pytest.raises(OutOfPagesError):
        tables.allocator.allocate()


def test_padding_needs_no_pages() -> None:
    tables = PageTables(slots=1, capacity=8, page_size=4)
    tables.reserve(1, 0, 8)
    assert tables.allocator.used == 0
    assert tables.tables.tolist() == [[0, 0], [0, 0]]


def test_the_lowest_free_slot_is_taken() -> None:
    tables = PageTables(slots=3, capacity=4)
    assert [tables.take()[0] for _ in range(3)] == [0, 1, 2]
    tables.give_back(2)
    tables.give_back(0)
    assert (tables.free, tables.take()) == (2, (0, 0))


def test_keys_depend_on_all_tokens_before() -> None:
    first, second, third = keys_of([1, 2, 3, 4, 5, 6, 7, 8]), keys_of([1, 2, 3, 4, 5, 6, 7, 9]), keys_of([0] * 4)
    assert first[0] == second[0] != third[0]
    assert first[1] != second[1]
    assert keys_of([0, 1, 2, 3, 5, 6, 7, 8])[1] != first[1]


def test_a_page_is_known_by_its_first_copy() -> None:
    allocator = PageAllocator(2)
    first, second = allocator.allocate(), allocator.allocate()
    assert allocator.register(first, "key") == first == allocator.register(second, "key")
    allocator.forget(first)
    assert allocator.find("key") is None
    assert allocator.register(second, "key") == second
