"""Calls that can't be recorded run as they are."""

import pytest
import torch
from torch import Tensor

from engine.model.graph_recorder import GraphRecorder, Replay

CPU = torch.device("cpu")


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
