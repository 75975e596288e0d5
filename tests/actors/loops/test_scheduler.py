"""What one forward runs: steps first, then chunks of prompts with what is left; less when memory runs out.

Of prompts the short ones are read first, beside the one that waits longest.
"""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.loops.row import Row
from actors.loops.row_table import RowTable
from actors.loops.scheduler import Scheduler, Share
from actors.loops.thread import LoopTimes
from actors.wire.messages import Admit
from decoding.errors import UnavailableError
from decoding.sampling.params import SamplingParams
from engine.model.page_tables import PageTables
from engine.model.ragged_batch import RowInput
from tests.support.properties import repeatable


def admit(request_id: int, length: int) -> Admit:
    """No prompts have a prefix in common."""
    return Admit(request_id, [request_id] * length, length, SamplingParams(max_tokens=5), 4, drafter=True)


def make_row(request_id: int, length: int) -> Row:
    return Row("c", admit(request_id, length))


class Beams(Row):
    """A row whose steps need a token for each of its beams."""

    beams = 3

    @property
    def step_tokens(self) -> int:
        return self.beams


class Stage:
    """Rows without a model, and a scheduler that runs them on a device with memory for `most` tokens."""

    def __init__(self, *rows: Row, slots: int = 8, chunk: int = 32, pages: int = 10**5) -> None:
        """pages: of one column each."""
        self.cache, self.times = PageTables(slots=slots, capacity=10**5, pages=pages, page_size=1), LoopTimes()
        self.rows: RowTable[Row] = RowTable(self.cache)
        self.failed: list[tuple[Row, str]] = []
        self.undone = 0
        self.scheduler = Scheduler[Row](self.rows, self.times, self._fail, prefill_chunk=chunk)
        self.most = 10**6
        for row in rows:
            self.rows.add(row)

    def _fail(self, row: Row, error: UnavailableError) -> None:
        self.failed.append((row, str(error)))
        self.rows.remove(row.key)

    def _compute(self, shares: Sequence[Share[Row]]) -> None:
        inputs = [run for share in shares for run in share.row.inputs(share.tokens)]
        for run in inputs:
            self.cache.reserve(run.slot, run.start, run.end)
        if sum(share.tokens for share in shares) > self.most:
            raise torch.OutOfMemoryError
        for share, run in zip(shares, inputs, strict=True):
            self.granted[share.row.key[1]] = share.tokens
            if share.row.prefilling:
                share.row.cached = min(run.end, len(share.row.tokens) - 1)

    def turn(self) -> dict[int, int]:
        """Return the tokens that were granted, by request; nothing if the forward failed."""
        self.rows.make_ready()
        shares = self.scheduler.schedule(row for row in self.rows if row.due)
        self.granted: dict[int, int] = {}
        self.scheduler.run(self._compute, shares)
        return self.granted


def running(request_id: int) -> Row:
    return make_row(request_id, 1)


def test_steps_and_chunks_are_in_the_same_forward() -> None:
    stage = Stage(make_row(0, 40), running(1), make_row(2, 20), Beams("c", admit(3, 1)))
    assert [stage.turn() for _ in range(3)] == [
        {0: 16, 1: 1, 2: 16, 3: 3},
        {0: 24, 1: 1, 2: 4, 3: 3},
        {0: 1, 1: 1, 2: 1, 3: 3},
    ]


def test_a_short_prompt_is_read_beside_a_long_one() -> None:
    stage = Stage(make_row(0, 1000), make_row(1, 500))
    stage.turn()
    stage.rows.add(make_row(2, 10))
    stage.rows.add(make_row(3, 20))
    assert [stage.turn() for _ in range(2)] == [{0: 16, 2: 10, 3: 6}, {0: 16, 1: 2, 2: 1, 3: 14}]


def test_a_long_prompt_takes_at_most_twice_as_long_beside_many_short_ones() -> None:
    """A new one comes in each turn, and would fill it. At last the long one has the least left."""
    turns = {}
    for crowd in (0, 100):
        stage = Stage(make_row(0, 640), slots=200)
        (row,) = stage.rows
        turns[crowd] = 0
        while row.prefilling:
            if turns[crowd] < crowd:
                stage.rows.add(make_row(1 + turns[crowd], 32))
            stage.turn()
            turns[crowd] += 1
    assert (turns[0], turns[100]) == (20, 39)


def test_the_oldest_keeps_its_half_after_it_was_preempted() -> None:
    rows = [make_row(index, 500 - index) for index in range(2)]
    stage = Stage(*rows)
    stage.rows.preempt(rows[0])
    rows[0].arrived_at_s, rows[1].arrived_at_s = 1.0, 2.0
    assert stage.turn() == {0: 16, 1: 16}
    assert [row.key[1] for row in stage.rows] == [1, 0]


def test_prompts_of_one_length_are_read_one_after_the_other() -> None:
    """To share would make all of them late."""
    stage = Stage(*(make_row(index, 64) for index in range(3)))
    assert [list(stage.turn()) for _ in range(4)] == [[0], [0], [0, 1], [0, 1]]


def test_a_row_that_a_short_one_waits_for_is_read_with_its_urgency() -> None:
    """It computes the pages of a prefix that the short one has, too."""
    prefix = [9] * 32
    other, long, middle, short = (
        Row("c", Admit(index, tokens, len(tokens), SamplingParams(max_tokens=5), 4, drafter=True))
        for index, tokens in enumerate(([1] * 1000, prefix + [2] * 900, [3] * 200, prefix + [4] * 10))
    )
    stage = Stage(other, long, middle, short)
    turns = [stage.turn() for _ in range(4)]
    assert [list(granted) for granted in turns] == [[0, 1], [0, 1], [0, 2, 3], [0, 2, 3]]
    assert short.pending == 1


@repeatable
@given(st.lists(st.integers(1, 90), min_size=1, max_size=8), st.integers(1, 64))
def test_every_row_runs_and_chunks_fit_their_budget(lengths: list[int], chunk: int) -> None:
    stage = Stage(*(make_row(index, length) for index, length in enumerate(lengths)), chunk=chunk)
    rows = list(stage.rows)
    for _ in range(sum(lengths) // chunk + 2):
        prefilling = {row.key[1]: row.pending for row in rows if row.prefilling}
        granted = stage.turn()
        assert {row.key[1] for row in rows} - set(prefilling) <= granted.keys()
        assert sum(granted.get(index, 0) for index in prefilling) == min(chunk, sum(prefilling.values()))
        for first, pending in [*prefilling.items()][:1]:
            assert granted[first] >= min(pending, chunk / 2)
    assert not any(row.prefilling for row in rows)


def test_shares_are_in_slot_order_after_others_were_removed() -> None:
    """Then they read the cache as one slice. A reused slot breaks the order of admission."""
    stage = Stage(*map(running, (1, 2, 3)), slots=3)
    stage.rows.remove(("c", 1))
    stage.rows.add(running(4))
    assert list(stage.turn()) == [4, 2, 3]


def test_rows_take_turns_until_there_is_memory_again() -> None:
    stage = Stage(*map(running, range(4)))
    stage.most = 2
    assert stage.turn() == {}
    assert not stage.scheduler.speculates  # speculation is the first thing given up
    assert [list(stage.turn()) for _ in range(4)] == [[], [0, 1], [2, 3], [0, 1]]
    stage.rows.remove(("c", 1))
    assert [list(stage.turn()) for _ in range(3)] == [[2, 3], [0, 2], [0, 3]]
    stage.most = 4
    for _ in range(512):
        stage.turn()
    assert (list(stage.turn()), stage.scheduler.speculates) == ([0, 2, 3], True)
    assert (stage.failed, stage.times.out_of_memory) == ([], 2)


def test_chunks_of_prompts_shrink_and_grow_again() -> None:
    stage = Stage(make_row(1, 40_000), slots=1)

    def chunk_after(turns: int, *, most: int) -> int:
        stage.most = most
        for _ in range(turns):
            stage.turn()
        (share,) = stage.scheduler.schedule(stage.rows)
        return share.tokens

    assert [chunk_after(4, most=most) for most in (8, 1)] == [8, 1]
    assert [chunk_after(turns, most=32) for turns in (255, 256, 1000)] == [2, 4, 32]
    row = next(iter(stage.rows))
    stage.most = 0
    for _ in range(7):
        stage.turn()
    assert stage.failed == [(row, "the device has too little memory for it, even alone: 40000 tokens in a KV slot")]
    assert stage.scheduler.speculates


class Growing(Row):
    """A row that writes a text of `last` tokens, each step one more."""

    last = 20

    def grow(self) -> bool:
        """Return whether the text has ended."""
        self.cached = len(self.tokens)
        self.tokens.append(self.key[1])
        return len(self.tokens) > self.last


@pytest.mark.parametrize("pages", [30, 50, 200])
def test_no_page_is_lost_and_every_text_is_written(pages: int) -> None:
    stage = Stage(*(Growing("c", admit(index, 3 + index)) for index in range(8)), slots=4, chunk=6, pages=pages)
    ended: list[int] = []
    for _ in range(400):
        stage.turn()
        for row in [row for row in stage.rows if row.key[1] in stage.granted and not row.prefilling]:
            assert isinstance(row, Growing)
            if row.grow():
                ended.append(row.key[1])
                stage.rows.remove(row.key)
    assert sorted(ended) == list(range(8))
    assert (stage.cache.allocator.used, stage.cache.free, stage.failed) == (0, 4, [])
    assert (stage.times.preemptions > 0) == (pages < 200)


def test_a_row_without_pages_even_alone_fails_and_the_next_one_runs() -> None:
    stage = Stage(make_row(0, 20), make_row(1, 5), chunk=64, pages=10)
    (large,) = stage.rows
    assert [stage.turn() for _ in range(2)] == [{}, {1: 5}]
    reason = (
        "the request does not fit into the KV cache, even alone: 20 KV pages are needed, but of 10 only 10 are free"
    )
    assert stage.failed == [(large, reason)]


def test_a_row_that_is_not_alone_waits_although_it_alone_lacks_pages() -> None:
    stage = Stage(make_row(0, 6), chunk=64, pages=20)
    stage.turn()
    late = make_row(1, 1)
    stage.rows.add(late)
    late.tokens += [1] * 14  # it has no pages for these
    assert [stage.turn() for _ in range(2)] == [{}, {0: 1}]
    assert (late.slot, stage.failed) == (-1, [])
    stage.rows.remove(("c", 0))
    assert stage.turn() == {1: 15}


def test_a_chunk_is_an_input_that_wants_logits_at_its_end() -> None:
    row = make_row(7, 5)
    assert row.inputs(3) == [RowInput(-1, 0, [7, 7, 7], wanted=0)]
    row.cached = 3
    assert row.inputs(3) == [RowInput(-1, 3, [7, 7], wanted=1)]
