"""The check of a model's logits over slots, before it is served."""

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from decoding.errors import ConfigError
from engine.loading.supported import check_modules, try_out
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.families.configurations import make_config
from tests.support.models import tiny_model


def test_logits_that_the_next_call_overwrites_are_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs write all logits to the same memory."""
    logits, memory = Runner.logits, torch.empty(64, 1024)

    def overwriting(runner: Runner, rows: Sequence[RowInput]) -> Tensor:
        result = logits(runner, rows)
        return memory[: len(result), : runner.vocab_size].copy_(result)

    monkeypatch.setattr(Runner, "logits", overwriting)
    try_out(tiny_model("llama-gqa"))


@pytest.mark.parametrize(("family", "fits"), [("mistral", True), ("qwen2_moe", False), ("phimoe", False)])
def test_a_window_that_only_masks_have_is_refused(family: str, fits: bool) -> None:
    config = make_config(family)
    config.update({"sliding_window": 12, "layer_types": ["sliding_attention"] * 4})
    model = AutoModelForCausalLM.from_config(config)
    check_modules(model, max_length=12)
    with nullcontext() if fits else pytest.raises(ConfigError, match=r"its window of 12 tokens .* max_length from 20"):
        check_modules(model, max_length=20)


@pytest.mark.parametrize("family", ["rwkv", "recurrent_gemma", "minimax"])
def test_states_of_another_kind_are_refused_without_weights(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(family))
    with pytest.raises(ConfigError, match=r"state from token to token in its own way; only gated delta rules"):
        check_modules(model, max_length=20)


@pytest.mark.parametrize(
    ("positions", "refused"), [([], False), ([2, 8], False), ([6, 7, 8, 9, 10], True), ([2, 3, 4], True)]
)
def test_rounding_may_turn_over_single_tokens_in_other_types(
    monkeypatch: pytest.MonkeyPatch, positions: list[int], refused: bool
) -> None:
    """Gemma 3 in bfloat16 has other logits after a few rare tokens. More of them in a call are no rounding."""
    logits, written = Runner.logits, 0

    def changed(runner: Runner, rows: Sequence[RowInput]) -> Tensor:
        nonlocal written
        result = logits(runner, rows).clone()
        count = len(rows[-1].tokens)  # the row beside it comes first
        for index in range(count):
            if written + index in positions:
                result[index - count] = result[index - count].flip(0)
        written += count
        return result

    monkeypatch.setattr(Runner, "logits", changed)
    model = tiny_model("llama-gqa").bfloat16()
    with pytest.raises(ConfigError, match="would be rounding") if refused else nullcontext():
        try_out(model)
