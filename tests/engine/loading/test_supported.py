"""The check of a model's logits over slots, before it is served."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.loading.supported import try_out
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.models import tiny_model


def test_logits_that_the_next_call_overwrites_are_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs write all logits to the same memory."""
    logits, memory = Runner.logits, torch.empty(64, 1024)

    def overwriting(runner: Runner, rows: Sequence[RowInput]) -> Tensor:
        result = logits(runner, rows)
        return memory[: len(result), : runner.vocab_size].copy_(result)

    monkeypatch.setattr(Runner, "logits", overwriting)
    try_out(tiny_model("llama-gqa"))
