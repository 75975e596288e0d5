"""Checkpoints pass the check of logits on a GPU, and get their memory and their graphs."""

import pytest
import torch

from actors.loading.checkpoint import ModelSpec
from actors.model.forward_input import RowInput
from actors.replica.replica import load_runner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["target", "drafter"])
def test_a_checkpoint_is_loaded(name: str, dtype: str) -> None:
    spec = ModelSpec(
        name=name, path=f"models/{name}", dtype=dtype, device="cuda", slots=4, max_length=128, memory_bytes=2 << 30
    )
    runner = load_runner(spec)
    assert runner.recorder is not None
    assert runner.recorder.error is None
    assert runner.logits([RowInput(0, 0, [1, 2, 3])]).isfinite().any()
