"""A traced EAGLE-3 head drafts what the same head drafts through its own Python."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from decoding.drafts.choices import DraftChoice
from engine.heads import chain_proposer
from engine.heads.chain_proposer import ChainProposer
from engine.heads.eagle3 import Eagle3Head
from engine.heads.proposer import DraftStart, HeadSampler
from engine.kernels import native_replay as replay
from engine.kernels.native import library
from engine.layers.faster_layers import use_faster_parts
from engine.model.cuda import Replay
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.heads import STATES, eagle3_drafts, reduced_eagle3
from tests.support.models import tiny_model

TARGET = tiny_model("llama-gqa")


def capture(run: Replay) -> Replay:
    """Call it before, as recording does."""
    for _ in range(2):
        run()
    return run


def drafts(
    head: Eagle3Head, *, traced: bool = False, recorded: bool = False, rejecting: bool = False
) -> list[list[list[DraftChoice]]]:
    """Return the choices of several rounds."""
    runner = Runner(TARGET, slots=4, max_length=64, max_query=64)
    runner.keep_hidden_states(STATES)
    if recorded:
        runner.use_graphs(capture=capture)
    runner.logits([RowInput(0, 0, [0])])
    runner.cache.clear_all()
    proposer = ChainProposer(head, runner)
    if traced or recorded:
        proposer.warm_up()
        assert proposer._traces is not None
    return eagle3_drafts(proposer, runner, rejecting=rejecting)


def eagle3(*, narrow: bool) -> Eagle3Head:
    """Return a head with random weights. narrow: it can draft every third token only."""
    head = reduced_eagle3(TARGET, 3 if narrow else 1)
    use_faster_parts(head)
    return head


def assert_alike(rounds: list[list[list[DraftChoice]]], expected: list[list[list[DraftChoice]]]) -> None:
    """Padding may change how the head's products round, so scores are compared with a tolerance."""
    pairs = list(zip(choices_of(rounds), choices_of(expected), strict=True))
    assert all(choice.tokens == other.tokens for choice, other in pairs)
    assert [choice.gap for choice, _ in pairs] == pytest.approx([other.gap for _, other in pairs], abs=1e-4)
    for choice, other in pairs:
        assert (choice.drawn_from is None) == (other.drawn_from is None)
        if choice.drawn_from is not None and other.drawn_from is not None:
            assert choice.drawn_from.tokens == other.drawn_from.tokens
            assert choice.drawn_from.probabilities == pytest.approx(other.drawn_from.probabilities, abs=1e-4)


def choices_of(rounds: list[list[list[DraftChoice]]]) -> list[DraftChoice]:
    return [choice for texts in rounds for chain in texts for choice in chain]


@pytest.mark.parametrize("narrow", [False, True])
@torch.inference_mode()
def test_a_traced_head_drafts_the_same(monkeypatch: pytest.MonkeyPatch, narrow: bool) -> None:
    monkeypatch.setattr(replay, "_USUAL", 2)
    replayed: list[object] = []
    run = replay._Replay.run

    def counted(self: replay._Replay, given: Sequence[object]) -> Sequence[object]:
        replayed.append(self)
        return run(self, given)

    monkeypatch.setattr(replay._Replay, "run", counted)
    head = eagle3(narrow=narrow)
    traced = drafts(head, traced=True)
    assert traced == drafts(head, traced=False)
    assert replayed or library() is None
    if narrow:
        assert all(token % 3 == 0 for choice in choices_of(traced) for token in choice.tokens)


def test_a_narrow_head_waits_for_no_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """While other processes have some of the cores, each of its short operators would wait for one of them."""
    threads: list[int] = []
    head = eagle3(narrow=True)
    head.layers[0].register_forward_hook(lambda *_: threads.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        drafts(head)
        assert set(threads) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("narrow", [False, True])
def test_recorded_steps_draft_the_same(monkeypatch: pytest.MonkeyPatch, narrow: bool) -> None:
    head = eagle3(narrow=narrow)
    expected = drafts(head)
    for used_by_calls_only in ("HeadSampler", "tensor_on"):
        monkeypatch.delattr(chain_proposer, used_by_calls_only)
    assert_alike(drafts(head, recorded=True), expected)


def test_texts_with_rejection_sampling_draft_beside_recorded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    head = eagle3(narrow=True)
    expected = drafts(head, rejecting=True)
    sampled: list[int] = []

    def sampler(starts: Sequence[DraftStart], *given: Any) -> HeadSampler:
        sampled.append(len(starts))
        return HeadSampler(starts, *given)

    monkeypatch.setattr(chain_proposer, "HeadSampler", sampler)
    assert_alike(drafts(head, recorded=True, rejecting=True), expected)
    assert sampled == [1, 1, 1, 1]  # of the rounds with two texts or three


def test_a_head_that_fails_to_be_traced_runs_with_its_own_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(replay, "replay_native_run", fail)
    runner = Runner(TARGET, slots=1, max_length=64, max_query=64)
    runner.logits([RowInput(0, 0, [0])])
    proposer = ChainProposer(eagle3(narrow=True), runner)
    proposer.warm_up()
    assert proposer._traces is None
