"""What a head drafts when it is served is what it learned to draft."""

import pytest
import torch

from decoding.sampling.params import SamplingParams
from engine.heads.eagle3 import Eagle3Head
from engine.heads.eagle3_proposer import Eagle3Proposer
from engine.heads.proposer import DraftStart, Reading
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.heads import STATES, new_eagle3
from tests.support.models import tiny_model
from training.heads.eagle3 import unroll

TARGET = tiny_model("llama-gqa")
TEXT = [5, 9, 14, 3, 27, 8, 11, 2, 19]
STEPS = 5


def served(head: Eagle3Head, text: list[int]) -> list[int]:
    runner = Runner(TARGET, slots=2, max_length=64, max_query=64)
    runner.keep_hidden_states(STATES)
    runner.logits([RowInput(0, 0, text[:-1])])
    assert runner.hidden is not None
    proposer = Eagle3Proposer(head.eval().requires_grad_(False), runner)
    rows = list(range(len(text) - 1))
    proposer.read([Reading(0, 0, text[1:], rows, rows[-1])], runner.hidden)
    start = DraftStart(0, len(text), SamplingParams(max_tokens=1, temperature=0))
    (choices,) = proposer.propose([start], STEPS, 2)
    return [choice.tokens[0] for choice in choices]


@pytest.mark.parametrize("norm_before_residual", [False, True])
@torch.no_grad()
def test_a_served_head_drafts_what_the_unrolled_one_does(norm_before_residual: bool) -> None:
    head = new_eagle3(TARGET, norm_before_residual=norm_before_residual)
    drafted = served(head, TEXT)
    runner = Runner(TARGET, slots=2, max_length=64, max_query=64)
    tokens = [*TEXT, *drafted]
    features = runner.hidden_states([RowInput(0, 0, tokens)], STATES).layers
    embedding = TARGET.get_input_embeddings()
    outputs = unroll(head, features[None], embedding(torch.tensor([tokens])), STEPS)
    last = len(TEXT) - 2  # the last token whose states the target has left
    assert [int(head.logits(output[0, last]).argmax()) for output in outputs] == drafted


@torch.no_grad()
def test_a_draft_does_not_see_what_follows_its_start() -> None:
    head = new_eagle3(TARGET)
    features, embeddings = torch.randn(1, 8, head.fc.in_features), torch.randn(1, 8, head.hidden_size)
    changed = features.clone()
    changed[:, 4:] += 1
    for before, after in zip(unroll(head, features, embeddings, 3), unroll(head, changed, embeddings, 3), strict=True):
        assert torch.allclose(before[:, :4], after[:, :4])
        assert not torch.allclose(before[:, 4:], after[:, 4:])
