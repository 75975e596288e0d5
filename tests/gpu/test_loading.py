"""Checkpoints pass the check of their logits on a GPU."""

import pytest
import torch

from engine.layers.faster_layers import use_faster_layers
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.supported import try_out

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["target", "drafter"])
def test_a_checkpoint_can_be_served(name: str, dtype: str) -> None:
    model = load_model(ModelSpec(name=name, path=f"models/{name}", dtype=dtype, device="cuda", max_length=128))
    use_faster_layers(model)
    assert try_out(model).layers
