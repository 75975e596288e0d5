"""A shortened prompt keeps its positions: logits, and attention, are those of a plain forward with `position_ids`."""

import random

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decoding.drafts.draft import Draft
from decoding.errors import InvalidRequestError
from decoding.prompt_positions import PromptPositions
from engine.model.forward_input import RowInput, draft_input
from engine.model.runner import Runner
from tests.support.models import CONFIGS, VOCAB, tiny_model

TOLERANCE = 5e-6
POSITIONS = PromptPositions([0, 1, 2, 9, 10, 11, 12, 30, 31, 40, 41, 42], 44)
COUNT = len(POSITIONS.kept)


@torch.no_grad()
def plain(model: PreTrainedModel, tokens: list[int], positions: list[int]) -> Tensor:
    """[T, V] logits of a text at these positions, without a cache. The mask keeps transformers from splitting it."""
    ids, mask = torch.tensor([tokens]), torch.ones(1, len(tokens), dtype=torch.int64)
    logits: Tensor = model(ids, position_ids=torch.tensor([positions]), attention_mask=mask, use_cache=False).logits[0]
    return logits


def make_text(family: str) -> list[int]:
    rng = random.Random(family)
    return [rng.randrange(VOCAB) for _ in range(COUNT + 8)]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_at_the_original_positions(family: str, graphs: bool) -> None:
    """A prompt in chunks beside a whole one, then its answer, token by token."""
    runner = Runner(tiny_model(family), slots=3, max_length=80, max_query=24)
    if graphs:
        runner.use_graphs(capture=lambda run: run)
    text = make_text(family)
    positions = [*POSITIONS.kept, *range(44, 52)]
    expected = plain(runner.model, text, positions)
    other = plain(runner.model, text, list(range(len(text))))
    for start, end in [(0, 7), (7, 12), *((i, i + 1) for i in range(12, len(text)))]:
        rows = [
            RowInput(0, start, text[start:end]),
            RowInput(1, start, text[start:end], prompt_positions=POSITIONS),
        ]
        dense, gapped = runner.logits(rows).split(end - start)
        torch.testing.assert_close(dense, other[start:end], atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(gapped, expected[start:end], atol=TOLERANCE, rtol=TOLERANCE)


def test_drafts_continue_after_the_whole_prompt() -> None:
    runner = Runner(tiny_model("llama-gqa"), slots=2, max_length=80, max_query=24)
    text = make_text("tree")[: COUNT + 1]
    first = plain(runner.model, [*text, 5, 6], [*POSITIONS.kept, 44, 45, 46])
    second = plain(runner.model, [*text, 7], [*POSITIONS.kept, 44, 45])
    runner.logits([RowInput(1, 0, text[:-1], prompt_positions=POSITIONS)])
    tree = draft_input(1, COUNT, text[-1], Draft([5, 7, 6], [-1, -1, 0]))
    logits = runner.logits([RowInput(tree.slot, tree.start, tree.tokens, tree.trunk, tree.paths, None, POSITIONS)])
    expected = torch.stack([first[-3], first[-2], second[-1], first[-1]])
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kept", [[], [0, 0], [3, 2], [-1, 0], [0, 44]])
def test_wrong_positions_are_refused(kept: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="positions"):
        PromptPositions(kept, 44)


def test_attention_is_the_largest_over_layers_and_heads() -> None:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    text = make_text("attention")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor([text]), output_attentions=True).attentions  # per layer [1, heads, T, T]
    expected = torch.stack([layer[0] for layer in weights]).flatten(0, 1).amax(dim=0)
    runner = Runner(model, slots=2, max_length=80, max_query=24)
    runner.logits([RowInput(1, 0, text)])
    actual = runner.attention(RowInput(1, COUNT, text[COUNT:]))
    torch.testing.assert_close(actual, expected[COUNT:], atol=TOLERANCE, rtol=TOLERANCE)
