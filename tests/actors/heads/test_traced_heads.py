"""A traced EAGLE-3 head drafts what the same head drafts through its own Python."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from actors.heads import eagle3_proposer
from actors.heads.eagle3 import Eagle3Head
from actors.heads.eagle3_proposer import Eagle3Proposer
from actors.heads.proposer import Reading
from actors.heads.sampling import DraftStart
from actors.model.faster_layers import use_faster_parts
from actors.model.forward_input import RowInput
from actors.model.native import replay
from actors.model.native.library import library
from actors.model.runner import Runner
from decoding.drafts.choice import DraftChoice
from decoding.sampling.params import SamplingParams
from tests.support.heads import STATES, new_eagle3
from tests.support.models import tiny_model

TARGET = tiny_model("llama-gqa")
TEXTS = [[5, 9, 14, 3, 27, 8], [7, 1, 2], [11, 4, 9, 30]]
ROUNDS = 6


def drafts(head: Eagle3Head, *, traced: bool) -> list[list[list[DraftChoice]]]:
    """Return the choices of each round. Every round reads one more text, and all of them again."""
    runner = Runner(TARGET, slots=4, max_length=64, max_query=64)
    runner.keep_hidden_states(STATES)
    runner.logits([RowInput(0, 0, [0])])
    runner.cache.clear_all()
    proposer = Eagle3Proposer(head, runner)
    if traced:
        proposer.warm_up()
        assert proposer._traced is not None
    rounds = []
    for number in range(ROUNDS):
        texts = TEXTS[: 1 + number // 2]
        runner.logits([RowInput(slot, 0, text[:-1]) for slot, text in enumerate(texts)])
        assert runner.hidden is not None
        first, readings = 0, []
        for slot, text in enumerate(texts):
            rows = list(range(first, first + len(text) - 1))
            first += len(rows)
            readings.append(Reading(slot, 0, text[1:], rows, rows[-1]))
        proposer.read(readings, runner.hidden)
        starts = [
            DraftStart(slot, len(text), SamplingParams(max_tokens=9, temperature=slot, seed=slot))
            for slot, text in enumerate(texts)
        ]
        rounds.append(proposer.propose(starts, 4, 2))
    return rounds


def eagle3(*, narrow: bool) -> Eagle3Head:
    """Return a head with random weights. narrow: it can draft every third token only."""
    head = new_eagle3(TARGET)
    if narrow:
        ids = torch.arange(0, TARGET.config.vocab_size, 3)
        head.lm_head = nn.Linear(head.hidden_size, len(ids), bias=False)
        head.d2t = ids - torch.arange(len(ids))
    use_faster_parts(head.eval().requires_grad_(False))
    return head


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
        tokens = [token for texts in traced for chain in texts for choice in chain for token in choice.tokens]
        assert all(token % 3 == 0 for token in tokens)


def test_a_head_that_fails_to_be_traced_runs_with_its_own_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(eagle3_proposer, "replay_native_run", fail)
    runner = Runner(TARGET, slots=1, max_length=64, max_query=64)
    runner.logits([RowInput(0, 0, [0])])
    proposer = Eagle3Proposer(eagle3(narrow=True), runner)
    proposer.warm_up()
    assert proposer._traced is None
