"""Few graphs, which serve every usual step."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from engine.model.cuda import GraphRecorder, Replay
from engine.model.cuda_graphs import Shape, graph_bytes, shapes, usual_tokens
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.families.configurations import make_config, make_model
from tests.support.models import VOCAB, tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(("slots", "count"), [(4, 13), (64, 15), (256, 26), (1000, 26)])
def test_there_are_few_shapes(slots: int, count: int) -> None:
    all_shapes = set(shapes(slots, usual_tokens(slots, 256)))
    assert len(all_shapes) == count
    assert max(shape.tokens for shape in all_shapes) <= 1536


def test_all_graphs_are_captured_at_the_start() -> None:
    captured: list[Replay] = []

    def capture(run: Replay) -> Replay:
        captured.append(run)
        return run

    runner = Runner(tiny_model("llama-gqa"), slots=4, max_length=64, max_query=16)
    runner.logits([RowInput(0, 0, [0])])
    runner.use_graphs(capture)
    runner.warm_up()
    before = len(captured)
    assert before == len(set(shapes(4, usual_tokens(4, 16))))
    for tokens in range(1, 12):
        logits = runner.logits([RowInput(slot, 0, list(range(tokens)), wanted=min(tokens, 8)) for slot in range(4)])
        assert logits.shape == (4 * min(tokens, 8), VOCAB)
        assert logits.dtype == torch.float32
    assert len(captured) == before


def test_shapes_that_do_not_fit_into_memory_run_without_a_graph() -> None:
    def capture(run: Replay) -> Replay:
        if run().shape[0] > 4:
            raise torch.OutOfMemoryError
        return run

    runner = Runner(tiny_model("llama-gqa"), slots=4, max_length=64, max_query=16)
    runner.logits([RowInput(0, 0, [0])])
    runner.use_graphs(capture)
    runner.warm_up()
    assert runner.padded_sizes == [2, 4]
    logits = [runner.logits([RowInput(0, 0, list(range(count)))]) for count in (3, 6)]
    torch.testing.assert_close(logits[1][:3], logits[0])


def test_graphs_carry_states() -> None:
    runners = [Runner(make_model(make_config("qwen3_5_text")), slots=4, max_length=64, max_query=16) for _ in range(2)]
    for runner in runners:
        runner.logits([RowInput(0, 0, [0])])
        runner.cache.clear_all()
    runners[0].use_graphs(lambda run: run)
    runners[0].warm_up()
    calls = [
        [RowInput(1, 0, list(range(3, 20)))],
        [RowInput(0, 0, [9, 8]), RowInput(1, 17, [5, 6, 7], settled=18)],
        [RowInput(1, 19, [4, 3], settled=20), RowInput(0, 2, [7])],
    ]
    for rows in calls:
        graph, plain = (runner.logits(rows).clone() for runner in runners)
        torch.testing.assert_close(graph, plain, rtol=1e-4, atol=1e-4)


def test_a_step_that_is_too_large_runs_without_a_graph() -> None:
    runner = Runner(tiny_model("llama-gqa"), slots=4, max_length=64, max_query=16)
    runner.use_graphs(lambda run: run)
    graphs = runner._graphs
    assert graphs is not None
    assert graphs.shape([RowInput(0, 0, [1] * 3)], 3) == Shape(4, 4, 4)
    assert graphs.shape([RowInput(0, 0, [1] * 49)], 49) is None


def test_their_memory() -> None:
    """The logits of 512 tokens and the activations of 768, and 15 graphs."""
    config = LlamaConfig(vocab_size=128000, hidden_size=4096, intermediate_size=14336)
    model = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, config=config)
    (size,) = graph_bytes(cast(PreTrainedModel, model), 64, 256).values()
    assert size == 512 * 128000 * 8 + 768 * (6 * 4096 + 3 * 14336) * 2 + 15 * 2**23
    assert graph_bytes(tiny_model("llama-gqa"), 64, 256) == {}


def call() -> Tensor:
    return torch.ones(1)


def test_after_a_failure_nothing_else_is_recorded() -> None:
    asked: list[Replay] = []

    def fail(run: Replay) -> Replay:
        asked.append(run)
        raise RuntimeError("operation not permitted when stream is capturing")

    recorder = GraphRecorder(CPU, fail)
    assert recorder.record(call) is call
    assert recorder.record(call) is call
    assert len(asked) == 1
    assert "capturing" in str(recorder.error)


def test_too_little_memory_is_the_callers_to_handle() -> None:
    def fail(run: Replay) -> Replay:
        raise torch.OutOfMemoryError

    recorder = GraphRecorder(CPU, fail)
    with pytest.raises(torch.OutOfMemoryError):
        recorder.record(call)
    assert recorder.error is None
