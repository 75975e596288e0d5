"""Which columns a slot's state stands for, where it is written, and which beginnings of texts have a snapshot."""

import pytest

from engine.kernels.state import StateRow
from engine.model.kv_pages import KVPages
from engine.model.page_allocator import PAGE_SIZE, PageKeys
from engine.model.ragged_batch import RowInput
from engine.model.row_states import MAX_UNSETTLED, RowStates


def run(states: RowStates, slot: int, start: int, count: int, settled: int | None = None) -> StateRow:
    return states.plan([RowInput(slot, start, [0] * count, settled=settled)])[0]


def test_a_draft_leaves_the_state_before_it() -> None:
    states = RowStates(slots=2, snapshots=0, page_size=PAGE_SIZE)
    assert run(states, 0, 0, 10) == StateRow(source=0, held=0, keep=10)
    assert run(states, 0, 10, 5, settled=11) == StateRow(source=0, held=10, keep=11)
    assert run(states, 0, 13, 5, settled=14) == StateRow(source=0, held=11, keep=14)  # two draft tokens were right
    assert run(states, 0, 14, 1) == StateRow(source=0, held=14, keep=15)
    assert run(states, 0, 0, 3) == StateRow(source=0, held=0, keep=3)  # another text


@pytest.mark.parametrize(
    "row",
    [
        RowInput(0, 9, [0]),
        RowInput(0, 10, [0] * (MAX_UNSETTLED + 2), settled=11),
        RowInput(0, 10, [0, 0], trunk=10, paths=[[10], [11]]),
    ],
    ids=["back before the state", "a long draft", "a tree"],
)
def test_what_a_state_cannot_follow_is_an_error(row: RowInput) -> None:
    states = RowStates(slots=2, snapshots=0, page_size=PAGE_SIZE)
    run(states, 0, 0, 10)
    with pytest.raises(ValueError, match="can't follow its state after 10 columns"):
        states.plan([row])


def test_padding_has_no_state() -> None:
    states = RowStates(slots=2, snapshots=3, page_size=PAGE_SIZE)
    assert states.plan([RowInput(2, 0, [0])]) == [StateRow(2, 0)]


def test_a_failed_forward_loses_its_states_and_all_snapshots() -> None:
    states = RowStates(slots=2, snapshots=1, page_size=PAGE_SIZE)
    states.begin(0, [b"a"], 0, 0)
    run(states, 0, 0, 20)
    states.lose([0])
    assert not states.can_go_on(0, 20)
    assert states.can_go_on(1, 0)
    assert states.longest([b"a"], 1) == 0
    states.clear(0)
    assert states.can_go_on(0, 0)


class Texts:
    """A cache with states, in which texts are read whole."""

    def __init__(self, snapshots: int) -> None:
        self.cache = KVPages(slots=2, capacity=128, pages=16)
        self.cache.carry_states(snapshots)
        assert self.cache.states is not None
        self.states = self.cache.states

    def read(self, text: list[int]) -> tuple[int, StateRow]:
        """Return how many tokens were taken over, and what the rest of the prompt does with the state."""
        keys = PageKeys([], text, (len(text) - 1) // PAGE_SIZE)
        slot, held = self.cache.take(keys)
        row = RowInput(slot, held, text[held:])
        self.cache.prepare_writes([(slot, held, len(text))])
        planned = self.states.plan([row])[0]
        self.cache.note_text(slot, keys)
        self.cache.give_back(slot)
        return held, planned


def test_a_prompt_goes_on_from_a_snapshot_of_its_beginning() -> None:
    texts, stem = Texts(snapshots=4), list(range(40))
    held, first = texts.read([*stem, *range(100, 110)])  # 50 tokens: three pages
    assert (held, first.snapshot_at) == (0, 48)
    held, again = texts.read([*stem, *range(100, 110), 7])
    assert (held, again.source, again.held, again.snapshot_at) == (48, first.snapshot, 48, -1)
    held, other = texts.read([*stem, *range(200, 220)])  # leaves the known text after two pages
    assert (held, other.snapshot_at) == (0, 32)
    held, third = texts.read([*stem, *range(300, 320)])
    assert (held, third.source, third.held) == (32, other.snapshot, 32)


def test_pages_after_the_last_snapshot_are_not_shared() -> None:
    texts, text = Texts(snapshots=1), list(range(40))
    keys = PageKeys([], text, 2)
    slot, _ = texts.cache.take(keys)
    texts.cache.prepare_writes([(slot, 0, 40)])
    texts.cache.note_text(slot, keys)
    assert not texts.cache.are_held(keys, 2)
    run(texts.states, slot, 0, 40)  # takes a snapshot
    assert texts.cache.are_held(keys, 2)


def test_the_snapshot_that_was_used_longest_ago_goes_first() -> None:
    texts = Texts(snapshots=2)
    first, second, third = ([start] * 20 for start in range(3))
    for text in (first, second):
        texts.read(text)
    assert texts.read([*first, 9])[0] == 16
    texts.read(third)
    assert [texts.read([*text, 9])[0] for text in (first, third)] == [16, 16]
    assert texts.read([*second, 9])[0] == 0


def test_no_two_rows_of_a_forward_write_the_same_cell() -> None:
    states = RowStates(slots=2, snapshots=1, page_size=PAGE_SIZE)
    for slot, key in enumerate((b"a", b"b")):
        states.begin(slot, [key], 0, 0)
    first, second = states.plan([RowInput(slot, 0, [0] * 20) for slot in (0, 1)])
    assert (first.snapshot_at, second.snapshot_at) == (16, -1)


def test_a_failed_forward_takes_no_cell_that_a_row_is_yet_to_read() -> None:
    states = RowStates(slots=3, snapshots=1, page_size=PAGE_SIZE)
    states.begin(0, [b"a"], 0, 0)
    cell = run(states, 0, 0, 16).snapshot
    states.begin(1, [b"a"], 1, 1)  # goes on from the snapshot
    states.lose([0])
    states.begin(2, [b"b"], 0, 0)
    assert run(states, 2, 0, 16).snapshot_at == -1  # the only cell is taken
    assert run(states, 1, 16, 1) == StateRow(source=cell, held=16, keep=17)


def test_a_row_far_beyond_its_state_is_an_error() -> None:
    states = RowStates(slots=1, snapshots=0, page_size=PAGE_SIZE)
    with pytest.raises(ValueError, match="can't follow its state after 0 columns"):
        run(states, 0, 100, 1)
