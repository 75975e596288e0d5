"""An EAGLE-3 head with recorded calls drafts what the same head drafts through its own Python."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.drafts.choices import DraftChoice
from engine.heads import chain_proposer
from engine.heads.chain_proposer import ChainProposer
from engine.heads.eagle3 import Eagle3Head
from engine.heads.proposer import DraftStart, HeadSampler
from engine.kernels import native
from engine.layers.faster_layers import use_faster_parts
from engine.model.cuda import Replay
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.heads import STATES, eagle3_drafts, reduced_eagle3
from tests.support.models import tiny_model

TARGET = tiny_model("llama-gqa")
NATIVE = pytest.mark.skipif(native.library() is None, reason="needs a C++ compiler")


def capture(run: Replay) -> Replay:
    """Call it before, as recording does."""
    for _ in range(2):
        run()
    return run


def drafts(
    head: Eagle3Head, way: str = "calls", *, rejecting: bool = False, change: Callable[[], object] = lambda: None
) -> list[list[list[DraftChoice]]]:
    """Return the choices of several rounds.

    way: calls, native calls that are recorded, or graphs.
    change: is called after the recordings.
    """
    runner = Runner(TARGET, slots=4, max_length=64, max_query=64)
    runner.keep_hidden_states(STATES)
    if way == "graphs":
        runner.use_graphs(capture=capture)
    runner.logits([RowInput(0, 0, [0])])
    runner.cache.clear_all()
    proposer = ChainProposer(head, runner)
    if way == "calls":
        proposer._graphs = None
    proposer.warm_up()
    assert (proposer._graphs is None) == (way == "calls")
    change()
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


@pytest.mark.parametrize("way", [pytest.param("native", marks=NATIVE), "graphs"])
@pytest.mark.parametrize("narrow", [False, True])
def test_recorded_calls_draft_the_same(monkeypatch: pytest.MonkeyPatch, narrow: bool, way: str) -> None:
    head = eagle3(narrow=narrow)
    expected = drafts(head)
    recorded = drafts(head, way, change=lambda: monkeypatch.delattr(chain_proposer, "HeadSampler"))
    assert_alike(recorded, expected)
    if narrow:
        assert all(token % 3 == 0 for choice in choices_of(recorded) for token in choice.tokens)


@pytest.mark.parametrize("way", [pytest.param("native", marks=NATIVE), "graphs"])
def test_texts_with_rejection_sampling_draft_beside_recorded_ones(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    head = eagle3(narrow=True)
    expected = drafts(head, rejecting=True)
    sampled: list[int] = []

    def sampler(starts: Sequence[DraftStart], *given: Any) -> HeadSampler:
        sampled.append(len(starts))
        return HeadSampler(starts, *given)

    recorded = drafts(
        head, way, rejecting=True, change=lambda: monkeypatch.setattr(chain_proposer, "HeadSampler", sampler)
    )
    assert_alike(recorded, expected)
    assert sampled == [1, 1, 1, 1]  # of the rounds with two texts or three


@NATIVE
def test_a_head_that_cannot_be_recorded_runs_with_its_own_python(monkeypatch: pytest.MonkeyPatch) -> None:
    head = eagle3(narrow=True)
    runner = Runner(TARGET, slots=1, max_length=64, max_query=64)
    runner.logits([RowInput(0, 0, [0])])
    proposer = ChainProposer(head, runner)
    forward = head.layers[0].forward

    def look(hidden: Tensor, *given: Any, **options: Any) -> Any:
        assert hidden.sum().item() is not None
        return forward(hidden, *given, **options)

    monkeypatch.setattr(head.layers[0], "forward", look)
    proposer.warm_up()
    assert proposer._graphs is None


@NATIVE
def test_no_torch_operator_runs_in_a_recorded_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would take longer than a native call, and wait for the interpreter."""
    others: list[object] = []
    monkeypatch.setattr(native.Recording, "then", lambda recording, function: others.append(function))
    drafts(eagle3(narrow=True), "native")
    assert others == []


@NATIVE
def test_a_head_that_decides_by_values_runs_with_its_own_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing shows that it does, as in some experts, but what it drafts."""
    head = eagle3(narrow=True)
    runner = Runner(TARGET, slots=1, max_length=64, max_query=64)
    runner.logits([RowInput(0, 0, [0])])
    forward = head.layers[0].forward

    def decide(hidden: Tensor, *given: Any, **options: Any) -> Any:
        sign = -1 if sum(hidden.flatten().tolist()) else 1
        return sign * forward(hidden, *given, **options)

    monkeypatch.setattr(head.layers[0], "forward", decide)
    proposer = ChainProposer(head, runner)
    proposer.warm_up()
    assert proposer._graphs is None
