"""The hidden states that a runner keeps are the model's own, for the tokens that were run, in every way to run them."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from engine.layers.faster_layers import use_faster_layers
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.models import CONFIGS, VOCAB, tiny_model

LAYERS = (0, 1, 2, 3)


def make_runner(family: str, how: str) -> Runner:
    runner = Runner(tiny_model(family), slots=4, max_length=80, max_query=24)
    runner.keep_hidden_states(LAYERS)
    if how == "graphs":
        runner.use_graphs(capture=lambda run: run)
    elif how == "trace":
        runner.logits([RowInput(0, 0, [0])])
        runner.cache.clear_all()
        runner.use_trace()
    return runner


@torch.no_grad()
def plain(model: PreTrainedModel, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """The states before the output layer, [T, H], and before each layer, [T, L · H]; the last of all is not normed."""
    seen: list[Tensor] = []
    head = model.get_output_embeddings()
    assert head is not None
    handle = head.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    states = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    handle.remove()
    return seen[0], torch.cat([state[0] for state in states[:3]], dim=-1)


@pytest.mark.parametrize("how", ["plain", "graphs", "trace"])
@pytest.mark.parametrize("family", CONFIGS)
def test_they_are_those_of_the_plain_model(family: str, how: str) -> None:
    runner, rng = make_runner(family, how), random.Random(3)
    texts = [[rng.randrange(VOCAB) for _ in range(count)] for count in (9, 4, 6)]
    expected = [plain(runner.model, text) for text in texts]
    wanted = [RowInput(0, 0, texts[0]), RowInput(1, 0, texts[1][:3], wanted=0), RowInput(2, 0, texts[2], wanted=2)]
    logits = runner.logits(wanted)
    assert runner.hidden is not None
    assert logits.shape[0] == runner.hidden.last.shape[0] == 11
    last = torch.cat([expected[0][0], expected[2][0][-2:]])
    layers = torch.cat([expected[0][1], expected[1][1][:3], expected[2][1]])
    torch.testing.assert_close(runner.hidden.last, last, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(runner.hidden.layers[:, : layers.shape[1]], layers, atol=1e-5, rtol=1e-5)
    runner.logits([RowInput(1, 3, texts[1][3:])])
    torch.testing.assert_close(runner.hidden.last, expected[1][0][3:], atol=1e-5, rtol=1e-5)
    direct = runner.hidden_states([RowInput(3, 0, texts[0])], (2,))
    torch.testing.assert_close(direct.layers, layers[:9, 2 * layers.shape[1] // 3 :], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", ["plain", "graphs", "trace"])
def test_logits_are_the_same_with_and_without(how: str) -> None:
    runner, other = make_runner("llama-gqa", how), Runner(tiny_model("llama-gqa"), slots=4, max_length=80, max_query=24)
    rows = [RowInput(0, 0, [5, 6, 7]), RowInput(1, 0, [8, 9])]
    torch.testing.assert_close(runner.logits(rows), other.logits(rows), atol=1e-6, rtol=1e-6)
    assert other.hidden is None
    assert runner._forward.is_traced or how != "trace"


def test_layers_that_are_not_there_are_refused() -> None:
    runner = Runner(tiny_model("llama"), slots=1, max_length=8, max_query=8)
    with pytest.raises(ConfigError, match="after 4 layers; the model has 3"):
        runner.keep_hidden_states((1, 4))


@pytest.mark.parametrize("family", sorted(CONFIGS.keys() - {"minicpm3"}))
def test_the_exit_after_all_layers_is_the_models_own_output(family: str) -> None:
    """Through the final norm, the output layer and what caps logits."""
    runner = Runner(tiny_model(family), slots=4, max_length=80, max_query=24)
    layers = runner.model.config.get_text_config().num_hidden_layers
    runner.use_early_exits((1, layers))
    rows = [RowInput(0, 0, [5, 6, 7]), RowInput(1, 0, [9, 8])]
    logits = runner.logits(rows).clone()
    assert runner.hidden is not None
    assert runner.early_exit is not None
    early = runner.early_exit.logits(runner.hidden.layers, [layers], logits)
    torch.testing.assert_close(early, logits, atol=1e-5, rtol=1e-5)


def test_models_that_scale_their_logits_have_no_early_exits() -> None:
    runner = Runner(tiny_model("minicpm3"), slots=4, max_length=80, max_query=24)
    with pytest.raises(ConfigError, match="no final norm and output layer that can follow a layer"):
        runner.use_early_exits((1,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_early_exit_has_the_same_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    model: Any = tiny_model("llama-gqa")
    model.to(dtype)
    use_faster_layers(model, deterministic=True)
    runner = Runner(model, slots=4, max_length=80, max_query=24)
    runner.use_early_exits((1, 2))
    last = runner.logits([RowInput(0, 0, list(range(9)))]).clone()
    assert runner.hidden is not None
    assert runner.early_exit is not None
    together = runner.early_exit.logits(runner.hidden.layers, [1, 2], last)
    for index in range(9):
        rows = slice(index, index + 1)
        alone = runner.early_exit.logits(runner.hidden.layers[rows], [1, 2], last[rows])
        assert torch.equal(alone, together[rows])
