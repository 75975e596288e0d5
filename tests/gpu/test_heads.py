"""EAGLE-3 heads draft the same by graphs, by calls and on a CPU."""

import pytest
import torch

from decoding.drafts.choices import DraftChoice
from engine.heads.chain_proposer import ChainProposer
from engine.layers.faster_layers import use_faster_parts
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.heads import STATES, eagle3_drafts, reduced_eagle3
from tests.support.models import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def drafts(device: str, *, stride: int, recorded: bool = False) -> list[list[list[DraftChoice]]]:
    model = tiny_model("llama-gqa")
    head = torch.nn.Module.to(reduced_eagle3(model, stride), device)
    use_faster_parts(head)
    runner = Runner(torch.nn.Module.to(model, device), slots=4, max_length=64, max_query=64)
    runner.keep_hidden_states(STATES)
    runner.logits([RowInput(0, 0, [0])])
    runner.cache.clear_all()
    proposer = ChainProposer(head, runner)
    if recorded:
        proposer.warm_up()
        assert runner.recorder is not None
        assert runner.recorder.error is None
    else:
        proposer._graphs = None
    return eagle3_drafts(proposer, runner)


@pytest.mark.parametrize("stride", [1, 3])
def test_graphs_calls_and_the_cpu_draft_the_same(stride: int) -> None:
    recorded, called, on_cpu = (
        drafts("cuda", stride=stride, recorded=True),
        drafts("cuda", stride=stride),
        drafts("cpu", stride=stride),
    )
    assert tokens(recorded) == tokens(called) == tokens(on_cpu)


def tokens(rounds: list[list[list[DraftChoice]]]) -> list[int]:
    return [choice.tokens[0] for texts in rounds for chain in texts for choice in chain]
