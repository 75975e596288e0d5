"""Heads read what steps ran right before they draft, so that they cost nothing while they do not."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from actors.verifier.heads_drafter import HeadsDrafter
from actors.verifier.rows import TargetRow, Verification
from actors.wire.messages import Admit
from decoding.drafts.choices import DraftChoice
from decoding.drafts.draft import NO_DRAFT
from decoding.drafts.verification import Verdict
from decoding.sampling.params import SamplingParams
from engine.heads.proposer import DraftStart, Reading
from engine.model.ragged_batch import RowInput


class Heads:
    """Always expect the same tokens, and keep what they have read."""

    kind, length, tree, stepwise, further_s, chained, lora = "eagle3", 8, None, True, 0.0, True, None

    def __init__(self) -> None:
        self.read_columns: list[tuple[int, Sequence[int]]] = []  # start and following tokens of each reading
        self.read_states: list[object] = []

    def read(self, readings: Sequence[Reading], hidden: object) -> None:
        self.read_columns += [(reading.start, reading.following) for reading in readings]
        self.read_states.append(hidden)

    def propose(self, starts: Sequence[DraftStart], length: int, ranks: int) -> list[list[DraftChoice]]:
        return [[DraftChoice([5, 6, 7], 1.0)] * length for _ in starts]


class Story:
    """A row of its own target, with the prompt 1, 2, 3."""

    def __init__(self) -> None:
        params = SamplingParams(max_tokens=100, temperature=0)
        self.row = TargetRow("c", Admit(1, [1, 2, 3], 3, params, 4, drafter=False, heads=True), acceptance=0.5)
        self.row.slot = 0
        rows: Any = SimpleNamespace(get={self.row.key: self.row}.get)
        self.runner = cast(Any, SimpleNamespace(vocab_size=100, hidden=object()))
        self.heads = cast(Any, Heads())
        self.drafter = HeadsDrafter(self.heads, self.runner, rows)

    def run(self, tokens: Sequence[int], own: int) -> None:
        """Let the target run these tokens, the last of the text, and choose its own."""
        row = self.row
        self.drafter.note_step([row], [[RowInput(0, len(row.tokens) - len(tokens), tokens)]])
        row.cached = len(row.tokens)
        row.commit([own], rejected=False)
        self.drafter.learn([Verification(row, NO_DRAFT, range(1), None)], [Verdict([], own, rejected=False)])

    def propose(self, length: int) -> bool:
        self.row.drafts.in_step_length = length
        return self.drafter.propose([self.row]) == {self.row.key}


def test_prompts_are_read_at_once_and_steps_before_a_draft() -> None:
    story = Story()
    story.run([1, 2, 3], own=4)
    assert story.heads.read_columns == [(0, [2, 3, 4])]
    assert story.propose(2)
    story.run([4], own=8)
    assert len(story.heads.read_columns) == 1
    assert story.propose(2)
    assert story.heads.read_columns[1:] == [(3, [8])]
    assert story.row.drafts.trie


def test_steps_after_which_nothing_is_drafted_are_not_read() -> None:
    story = Story()
    story.run([1, 2, 3], own=4)
    for own in range(10, 20):
        story.run(story.row.tokens[-1:], own)
        assert not story.propose(0)
    assert len(story.heads.read_columns) == 1
    assert story.propose(1)
    assert story.heads.read_columns[1:] == [(12, [19])]  # of the last step alone


def test_heads_draft_nothing_for_a_text_whose_last_step_they_could_not_read() -> None:
    story = Story()
    story.run([1, 2, 3], own=4)
    story.drafter.note_step([], [])
    story.row.commit([9], rejected=False)
    assert not story.propose(2)


def test_heads_read_what_the_step_ran_and_not_what_was_run_since() -> None:
    """A target that practises runs its model between steps."""
    story = Story()
    story.run([1, 2, 3], own=4)
    states = story.runner.hidden = object()
    story.run([4], own=8)
    story.runner.hidden = object()
    assert story.propose(2)
    assert story.heads.read_states[-1] is states
