"""A traced EAGLE-3 head drafts what the same head drafts through its own Python."""

import pytest
import torch

from actors.heads.eagle3 import Eagle3Head
from actors.heads.eagle3_proposer import Eagle3Proposer
from actors.heads.proposer import Reading
from actors.heads.sampling import DraftStart
from actors.model.faster_layers import use_faster_parts
from actors.model.forward_input import RowInput
from actors.model.native import replay
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
        proposer.use_trace()
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


@torch.inference_mode()
def test_a_traced_head_drafts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_USUAL", 2)  # so that it is replayed, too
    head = new_eagle3(TARGET).eval().requires_grad_(False)
    use_faster_parts(head)
    assert drafts(head, traced=True) == drafts(head, traced=False)
