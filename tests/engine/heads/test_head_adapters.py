"""A head with adapters drafts for each text as the head with that text's adapter merged."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from decoding.drafts.choices import RANKS, DraftChoice
from decoding.sampling.params import SamplingParams
from engine.heads.chain_proposer import ChainProposer
from engine.heads.eagle3 import Eagle3Head
from engine.heads.proposer import DraftStart, Reading
from engine.layers.faster_layers import use_faster_parts
from engine.layers.lora import LoraLayers, LoraPair
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.heads import STATES, new_eagle3
from tests.support.models import tiny_model

TEXTS = [[5, 9, 14, 3, 27, 8], [7, 1, 2, 9], [11, 4, 9, 30, 2]]
MODEL = tiny_model("llama-gqa")
PATHS = ["fc", "layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj", "layers.0.mlp.down_proj"]


def head() -> Eagle3Head:
    return new_eagle3(MODEL).eval().requires_grad_(False)


def pairs(seed: int) -> dict[str, LoraPair]:
    generator = torch.Generator().manual_seed(seed)
    base: Any = head()
    layers = {path: base.get_submodule(path).weight.shape for path in PATHS}
    return {
        path: (torch.randn(4, size, generator=generator), torch.randn(out, 4, generator=generator))
        for path, (out, size) in layers.items()
    }


def merged(seed: int) -> Any:
    changed: Any = head()
    for path, (down, up) in pairs(seed).items():
        changed.get_submodule(path).weight += up @ down
    return changed


def drafts(made: Eagle3Head, lora: LoraLayers | None, slots: Sequence[int]) -> list[list[DraftChoice]]:
    """Return what a head drafts for all texts at once. slots: of their adapters."""
    use_faster_parts(made, lora=lora)
    for slot in (1, 2) if lora is not None else ():
        assert lora is not None
        lora.check(pairs(slot))
        lora.write(slot, str(slot), pairs(slot))
    runner = Runner(tiny_model("llama-gqa"), slots=4, max_length=64, max_query=32)
    runner.keep_hidden_states(STATES)
    proposer = ChainProposer(made, runner, lora)
    proposer.warm_up()
    runner.logits([RowInput(slot, 0, text[:-1]) for slot, text in enumerate(TEXTS)])
    assert runner.hidden is not None
    first, readings = 0, []
    for slot, (text, adapter) in enumerate(zip(TEXTS, slots, strict=True)):
        rows = list(range(first, first + len(text) - 1))
        first += len(rows)
        readings.append(Reading(slot, 0, text[1:], rows, rows[-1], text[0], adapter))
    proposer.read(readings, runner.hidden)
    params = [SamplingParams(max_tokens=9, temperature=slot, seed=slot) for slot in range(len(TEXTS))]
    starts = [
        DraftStart(slot, len(text), params[slot], adapter)
        for slot, (text, adapter) in enumerate(zip(TEXTS, slots, strict=True))
    ]
    return proposer.propose(starts, 4, RANKS)


@torch.inference_mode()
def test_each_text_gets_drafts_of_the_head_with_its_adapter_merged() -> None:
    made = head()
    lora = LoraLayers(MODEL, slots=3, rank=4, deterministic=False, part=made)
    mixed = drafts(made, lora, [1, 0, 2])
    alone = [drafts(each, None, [0, 0, 0])[row] for row, each in enumerate((merged(1), head(), merged(2)))]
    assert [[choice.tokens for choice in row] for row in mixed] == [[choice.tokens for choice in row] for row in alone]
    plain = drafts(head(), None, [0, 0, 0])
    for choice, other in zip(plain[1], mixed[1], strict=True):  # the angles of recorded calls may round otherwise
        assert choice.tokens == other.tokens
        assert choice.gap == pytest.approx(other.gap, abs=1e-4)
    assert plain[0] != mixed[0]
    assert plain[2] != mixed[2]


@torch.inference_mode()
def test_a_slot_without_an_adapter_of_the_head_drafts_as_the_base() -> None:
    made = head()
    lora = LoraLayers(MODEL, slots=3, rank=4, deterministic=False, part=made)
    assert drafts(made, lora, [3, 0, 3]) == drafts(head(), None, [0, 0, 0])
    assert "lm_head" not in {path for path, _ in made.named_modules() if path in lora._paths.values()}
