"""The host waits for the GPU once per step, when it reads the tokens."""

from collections.abc import Iterator

import pytest
import torch

from actors.drafter.chain import ChainStart, DraftChain
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams
from decoding.sampling.sampler import sample
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.models import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

PARAMS = [
    SamplingParams(max_tokens=40, temperature=0),
    SamplingParams(max_tokens=40, temperature=0.8, seed=3, top_k=9, top_p=0.9, min_p=0.1),
    SamplingParams(max_tokens=40, temperature=1, typical_p=0.9, repetition_penalty=1.2, logit_bias=((3, 1.0),)),
]


@pytest.fixture
def runner() -> Runner:
    return Runner(torch.nn.Module.cuda(tiny_model("llama-gqa")), slots=4, max_length=300, max_query=64)


@pytest.fixture
def waiting_is_an_error(runner: Runner) -> Iterator[None]:
    """Forbid waiting, once everything has run: recording a graph needs it."""
    step(runner, 0)
    assert runner.recorder is not None
    assert runner.recorder.error is None
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def step(runner: Runner, start: int) -> torch.Tensor:
    """Run a prompt as a call and a step with drafts as a replay; return the tokens, on the GPU."""
    rows = range(len(PARAMS))
    runner.logits([RowInput(slot, start, [1 + slot] * 40, wanted=0) for slot in rows])
    logits = runner.logits([RowInput(slot, start + 40, [1, 2, 3]) for slot in rows])
    histories = [History(params, [1] * 44, 4) for params in PARAMS]
    positions = [Position(history, [2, 3][:count]) for history in histories for count in range(3)]
    return sample(logits, SamplingBatch.build(positions, logits.shape[-1], logits.device))


@pytest.mark.usefixtures("waiting_is_an_error")
def test_a_step_waits_nowhere(runner: Runner) -> None:
    sampled = step(runner, 50)
    runner.compact(0, 50, [52, 51])
    torch.cuda.set_sync_debug_mode("default")
    assert len(sampled.tolist()) == 9


def test_a_chain_waits_once(runner: Runner) -> None:
    starts = [ChainStart(RowInput(slot, 0, [5]), params, 1) for slot, params in enumerate(PARAMS[:2])]
    chain = DraftChain(runner)
    expected = chain.run(starts, 4)
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="synchroniz") as warned:
        choices = chain.run(starts, 4)
    torch.cuda.set_sync_debug_mode("default")
    assert choices == expected
    assert len(warned) == 1
