"""Blocks from pages have the logits of the head's own forward, traced or not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoding.sampling.params import SamplingParams
from engine.heads.dflash import DFlashHead
from engine.heads.dflash_proposer import DFlashProposer
from engine.heads.proposer import DraftStart, Reading
from engine.layers.faster_layers import use_faster_parts
from engine.layers.quantized_linear import QuantizedLinear, round_linears
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.heads import STATES, new_dflash, states_of
from tests.support.models import tiny_model

TARGET = tiny_model("llama-gqa")
TEXTS = [[5, 9, 14, 3, 27, 8, 6, 6, 1, 2], [7, 1, 2], [11, 4, 9, 30, 12]]


def random_head(*, windowed: bool = False, rounded: bool = False, **options: object) -> DFlashHead:
    head = new_dflash(TARGET, windowed=windowed, **options).requires_grad_(False)
    head.share_output(output_layer())
    if rounded:
        round_linears(head, 8)
        assert isinstance(head.lm_head, QuantizedLinear)
    return head


def output_layer() -> nn.Module:
    layer = TARGET.get_output_embeddings()
    assert layer is not None
    return layer


def proposer_of(head: DFlashHead, *, traced: bool) -> tuple[DFlashProposer, Runner]:
    runner = Runner(TARGET, slots=4, max_length=64, max_query=64)
    runner.keep_hidden_states(STATES)
    runner.logits([RowInput(0, 0, [0])])
    runner.cache.clear_all()
    head.join_context()
    use_faster_parts(head)
    proposer = DFlashProposer(head, runner)
    if traced:
        proposer.warm_up()
        assert proposer._run_few is not None
    return proposer, runner


def read(proposer: DFlashProposer, runner: Runner, extents: list[tuple[int, int, int]]) -> None:
    """Let the target run tokens first … end - 1 of some texts, and the head read them. extents: text, first, end."""
    hidden = runner.hidden_states(
        [RowInput(index, first, TEXTS[index][first:end]) for index, first, end in extents], STATES
    )
    readings, row = [], 0
    for index, first, end in extents:
        rows = list(range(row, row + end - first))
        readings.append(Reading(index, first, TEXTS[index][first + 1 : end + 1], rows, rows[-1], TEXTS[index][first]))
        row += len(rows)
    proposer.read(readings, hidden)


def start(index: int, **params: object) -> DraftStart:
    return DraftStart(index, len(TEXTS[index]), SamplingParams(max_tokens=9, **params))  # type: ignore[arg-type]


def entries(head: DFlashHead, text: list[int], length: int) -> Tensor:
    """The entries that draft a text's next tokens, by the head's own forward, [length, H]."""
    states = states_of(TARGET, text[:-1])[1]
    count = head.config.entries(length)
    block = head.blocks(torch.tensor([[text[-1]]]))[..., :count]
    embedding = TARGET.get_input_embeddings()
    assert isinstance(embedding, torch.nn.Module)
    hidden = head(states[None], embedding(block), torch.tensor([[len(text) - 1]]))
    drafting: Tensor = hidden[0, 0, count - length :]
    return drafting


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"anchor_drafts": True},
        {"own_output": False, "softcap": 2.0, "logit_scale": 0.5},
        {"windowed": True, "causal": (True, False), "embedding_scale": 2.0},
        {"rounded": True},
    ],
    ids=str,
)
@torch.inference_mode()
def test_blocks_from_pages_equal_the_heads_forward(traced: bool, options: dict[str, Any]) -> None:
    plain = random_head(**options)
    proposer, runner = proposer_of(random_head(**options), traced=traced)
    read(proposer, runner, [(0, 0, 4), (1, 0, 2)])
    read(proposer, runner, [(0, 4, 9), (2, 0, 4)])
    for length in (proposer.length, 2):
        logits = proposer._head.logits(proposer.hidden([start(index) for index in range(3)], length))
        for index, text in enumerate(TEXTS):
            torch.testing.assert_close(logits[index], plain.logits(entries(plain, text, length)), rtol=1e-4, atol=1e-4)
