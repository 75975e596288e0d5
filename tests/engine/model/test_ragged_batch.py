"""Rows with and without padding, packed into the tensor that a forward takes."""

import random

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decoding.drafts.draft import Draft
from decoding.errors import InvalidRequestError
from decoding.prompt_positions import PromptPositions
from engine.kernels.attention import Reach
from engine.model.ragged_batch import RowInput, draft_input, pack_inputs, wanted_tokens
from engine.model.runner import Runner
from tests.support.models import CONFIGS, VOCAB, tiny_model

ROWS = [RowInput(slot=3, start=2, tokens=[7, 8]), RowInput(slot=1, start=4, tokens=[9])]
TOLERANCE = 5e-6
POSITIONS = PromptPositions([0, 1, 2, 9, 10, 11, 12, 30, 31, 40, 41, 42], 44)
COUNT = len(POSITIONS.kept)


def test_ragged_rows_lie_one_after_the_other() -> None:
    tokens, positions, batch = pack_inputs(ROWS).unpack()
    assert tokens.tolist() == [[7, 8, 9]]
    assert positions.tolist() == [[2, 3, 4]]
    assert [field.tolist() for field in batch[:3]] == [[3, 1], [0, 2, 3], [4, 5]]
    assert [field.tolist() for field in batch[4:7]] == [[2, 3, 4], [2, 3, 4], [0, 0, 1]]
    assert batch.trunks.tolist() == [3, 4, 5]
    assert batch.branches.tolist() == [0, 0, 0]
    assert batch.near_branches is batch.branches


def test_all_padding_is_in_the_last_row() -> None:
    tokens, positions, batch = pack_inputs(ROWS, reach=Reach(2), row_count=4, token_count=6, spare_slot=5).unpack()
    assert tokens.tolist() == [[7, 8, 9, 0, 0, 0]]
    assert positions.tolist() == [[2, 3, 4, 0, 0, 0]]
    assert [field.tolist() for field in batch[:3]] == [[3, 1, 5, 5], [0, 2, 3, 3, 6], [4, 5, 1, 1]]
    assert [field.tolist() for field in batch[4:7]] == [[2, 3, 4, 0, 0, 0], [2, 3, 4, 0, 0, 0], [0, 0, 1, 3, 3, 3]]
    assert batch.trunks.tolist() == [3, 4, 5, 1, 1, 1]


def test_a_path_is_text_as_far_as_it_follows_the_text_and_bits_beyond() -> None:
    row = RowInput(0, 12, [1, 2, 3], trunk=10, paths=[[10, 11, 12], [10, 13], [10, 12, 14]])
    _, positions, batch = pack_inputs([row], reach=Reach(1)).unpack()
    assert positions.tolist() == [[12, 11, 12]]
    assert batch.trunks.tolist() == [13, 11, 11]
    assert batch.branches.tolist() == [0, 0b100, 0b1010]
    assert batch.near_branches.tolist() == [0, 0b100, 0b1000]
    for size, near in ((6, 0b1000), (4, 0b1000), (5, 0b1010)):  # the last token is at position 12
        _, _, batch = pack_inputs([row], reach=Reach(size, in_chunks=True)).unpack()
        assert batch.near_branches.tolist() == [0, 0b100, near]


def test_a_tree_reaches_64_columns_beyond_its_text() -> None:
    _, _, batch = pack_inputs([RowInput(0, 73, [1], trunk=10, paths=[[11, 73]])]).unpack()
    assert batch.branches.tolist() == [2 - 2**63]
    with pytest.raises(ValueError, match="64 columns beyond its text; 63 are allowed"):
        pack_inputs([RowInput(0, 74, [1], trunk=10, paths=[[11, 74]])])


def test_the_tokens_after_which_logits_are_wanted() -> None:
    rows = [RowInput(0, 0, [1, 2, 3], wanted=1), RowInput(1, 5, [4, 5]), RowInput(2, 0, [6], wanted=0)]
    assert wanted_tokens(rows) == [2, 3, 4]


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
            RowInput(1, start, text[start:end], positions=POSITIONS.translate(range(start, end))),
        ]
        dense, gapped = runner.logits(rows).split(end - start)
        torch.testing.assert_close(dense, other[start:end], atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(gapped, expected[start:end], atol=TOLERANCE, rtol=TOLERANCE)


def test_drafts_continue_after_the_whole_prompt() -> None:
    runner = Runner(tiny_model("llama-gqa"), slots=2, max_length=80, max_query=24)
    text = make_text("tree")[: COUNT + 1]
    first = plain(runner.model, [*text, 5, 6], [*POSITIONS.kept, 44, 45, 46])
    second = plain(runner.model, [*text, 7], [*POSITIONS.kept, 44, 45])
    runner.logits([RowInput(1, 0, text[:-1], positions=POSITIONS.kept)])
    tree = draft_input(1, COUNT, text[-1], Draft([5, 7, 6], [-1, -1, 0]))
    logits = runner.logits([replace(tree, positions=POSITIONS.translate(tree.text_positions))])
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


@pytest.mark.parametrize("reach", [None, Reach(4)])
def test_few_tokens_are_packed_as_many_are(monkeypatch: pytest.MonkeyPatch, reach: Reach | None) -> None:
    tree = RowInput(4, 12, [3, 4], trunk=11, paths=[[11, 12], [11, 13]], positions=[90, 90])
    rows = [RowInput(3, 7, [5, 6, 8]), RowInput(1, 0, [9]), tree, RowInput(2, 40, [1, 2])]
    few = pack_inputs(rows, reach=reach, rest=[4, 2])
    monkeypatch.setattr("engine.model.ragged_batch._FEW", 0)
    many = pack_inputs(rows, reach=reach, rest=[4, 2])
    assert torch.equal(few.integers, many.integers)
    assert [*few.sizes] == [*many.sizes]
