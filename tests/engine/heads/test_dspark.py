"""DSpark heads of both published layouts add to each entry's logits what follows from the token before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from decoding.drafts.choices import RANKS
from decoding.errors import ConfigError
from decoding.sampling.params import SamplingParams
from engine.heads.dflash import DFlashHead
from engine.heads.dflash_layout import stored_dflash
from engine.heads.proposer import DraftStart
from tests.engine.heads import test_dflash_drafts as paged
from tests.engine.heads.test_dflash import (
    BLOCK,
    LAYER,
    MASK,
    OUTPUTS,
    SIZE,
    STATES,
    VOCAB,
    backbone,
    expected,
    numbers,
    read,
    speculators,
)

RANK = 6


def markov(kind: str, outputs: int) -> dict[str, Tensor]:
    shapes = {"markov_w1.weight": (VOCAB, RANK), "markov_w2.weight": (outputs, RANK)}
    if kind == "gated":
        shapes |= {"gate_proj.weight": (RANK, SIZE + RANK), "gate_proj.bias": (RANK,)}  # type: ignore[dict-item]
    if kind == "rnn":
        shapes |= {"joint_proj.weight": (3 * RANK, 2 * RANK + SIZE), "joint_proj.bias": (3 * RANK,)}  # type: ignore[dict-item]
    return {f"markov_head.{name}": numbers(*shape, seed=len(name)) for name, shape in shapes.items()}


def in_speculators(kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, config = speculators(
        speculators_model_type="dspark", markov_rank=RANK, markov_head_type=kind, enable_confidence_head=True
    )
    confidence = {
        "confidence_head.proj.weight": numbers(1, SIZE + RANK),
        "confidence_head.proj.bias": numbers(1),
    }
    return tensors | markov(kind, OUTPUTS) | confidence, config


def in_deepspec(kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    outer = {"embed_tokens.weight": numbers(VOCAB, SIZE, seed=3), "lm_head.weight": numbers(VOCAB, SIZE, seed=4)}
    return backbone() | outer | markov(kind, VOCAB), {
        **LAYER, "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "mask_token_id": MASK,
        "target_layer_ids": [0, 2], "markov_rank": RANK, "markov_head_type": kind, "enable_confidence_head": False,
    }  # fmt: skip


def in_modelopt(kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As NVIDIA's Model Optimizer writes it: its tensors are not nested, its settings in `dflash_config`."""
    flat = {name.removeprefix("markov_head."): tensor for name, tensor in markov(kind, VOCAB).items()}
    other = {"confidence_proj.weight": numbers(1, SIZE + RANK), "confidence_proj.bias": numbers(1)}
    output = {"lm_head.weight": numbers(VOCAB, SIZE, seed=4)}
    return backbone() | output | flat | other, {
        **LAYER, "architectures": ["DFlashDraftModel"], "block_size": BLOCK, "dflash_config": {
            "mask_token_id": MASK, "target_layer_ids": [0, 2], "projector_type": "dspark", "shift_label": True,
            "causal": False, "markov_rank": RANK, "markov_head_type": kind, "use_confidence_head": True,
        },
    }  # fmt: skip


def bias(tensors: dict[str, Tensor], kind: str, token: int, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """What one entry gets, [W], and the next state, after the paper's formulas."""
    part = {name.removeprefix("markov_head."): tensor for name, tensor in tensors.items()}
    before = part["markov_w1.weight"][token]
    if kind == "gated":
        gate = linear(torch.cat([hidden, before]), part["gate_proj.weight"], part["gate_proj.bias"]).sigmoid()
        before = gate * before
    if kind == "rnn":
        given = torch.cat([state, before, hidden])
        rows = part["joint_proj.weight"] @ given + part["joint_proj.bias"]
        gate, candidate = rows[:RANK].sigmoid(), rows[RANK : 2 * RANK].tanh()
        state, before = gate * state + (1 - gate) * candidate, rows[2 * RANK :].tanh()
    return part["markov_w2.weight"] @ before, state


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("layout", [in_speculators, in_deepspec, in_modelopt])
def test_logits_follow_the_token_before(tmp_path: Path, layout: Any, kind: str) -> None:
    tensors, config = layout(kind)
    head = read(tmp_path, tensors, config)
    assert head.config.anchor_drafts
    assert head.markov_head is not None
    states, embedding, text = numbers(1, 7, STATES * SIZE, seed=5), numbers(VOCAB, SIZE, seed=6), [8, 1, 2, 30, 4]
    blocks = head.blocks(torch.tensor([[text[0]]]))
    hidden = head(states, embedding[blocks], torch.tensor([[7]]))[0, 0]  # [S, H]
    alone = expected(tensors, states[0], embedding[blocks[0, 0]], windows=[None] * 3, causal=False)
    torch.testing.assert_close(hidden, alone, rtol=1e-4, atol=1e-4)
    state, own_state = head.markov_head.start(hidden[:1]), torch.zeros(RANK)
    for index, token in enumerate(text):
        added, state = head.markov_head(torch.tensor([token]), hidden[index, None], state)
        own, own_state = bias(tensors, kind, token, alone[index], own_state)
        logits = head.bounded(head.raw_logits(hidden[index, None]) + added)[0]
        torch.testing.assert_close(logits, tensors["lm_head.weight"] @ alone[index] + own, rtol=1e-4, atol=1e-4)


def test_what_is_stored_is_read_again(tmp_path: Path) -> None:
    head = read(tmp_path / "a", *in_speculators("rnn"))
    again = read(tmp_path / "b", *stored_dflash(head, (1, 3), "target"))
    assert (again.config.markov, again.config.markov_rank, again.config.length) == ("rnn", RANK, BLOCK)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "anchor"),
    [
        ({"projector_type": "dspark"}, True),
        ({"shift_label": True}, True),
        ({"shift_label": True, "sample_from_anchor": False}, False),
        ({"shift_label": False}, True),  # its rank says that it is a DSpark head
        ({}, True),
    ],
)
def test_how_files_say_that_the_anchor_drafts(tmp_path: Path, settings: dict[str, Any], anchor: bool) -> None:
    tensors, config = in_modelopt("vanilla")
    for key in ("projector_type", "shift_label"):
        del config["dflash_config"][key]
    config["dflash_config"] |= settings
    assert read(tmp_path, tensors, config).config.anchor_drafts == anchor


def test_other_kinds_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    tensors, config = in_speculators("vanilla")
    with pytest.raises(ConfigError, match=r"markov_head_type in config\.json is 'other', not vanilla, gated, rnn"):
        read(tmp_path / "a", tensors, config | {"markov_head_type": "other"})
    del tensors["markov_head.markov_w2.weight"]
    with pytest.raises(ConfigError, match=r"lacks markov_head\.markov_w2\.weight"):
        read(tmp_path / "b", tensors, config)


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
@torch.inference_mode()
def test_a_chain_follows_its_own_tokens(kind: str) -> None:
    """The greedy chain from pages is that of the head's own forward, each entry after the best token before."""
    options: dict[str, Any] = {"markov": kind, "markov_rank": RANK, "anchor_drafts": True}
    plain, drafting = paged.random_head(**options), paged.random_head(**options)
    for head in (plain, drafting):
        assert head.markov_head is not None
        head.markov_head.markov_w1.weight.mul_(4)
        head.markov_head.markov_w2.weight.mul_(4)
    proposer, runner = paged.proposer_of(drafting, traced=True)
    assert proposer.chained
    paged.read(proposer, runner, [(0, 0, 9), (1, 0, 2)])
    greedy = SamplingParams(max_tokens=9, temperature=0)
    starts = [DraftStart(index, len(paged.TEXTS[index]), greedy) for index in range(2)]
    for text, choices in zip(paged.TEXTS, proposer.propose(starts, proposer.length, RANKS), strict=False):
        assert [choice.tokens[0] for choice in choices] == chain(plain, text)


def chain(head: DFlashHead, text: list[int]) -> list[int]:
    assert head.markov_head is not None
    hidden, tokens = paged.entries(head, text, head.config.length), [text[-1]]
    state = head.markov_head.start(hidden[:1])
    for entry in hidden:
        added, state = head.markov_head(torch.tensor(tokens[-1:]), entry[None], state)
        tokens.append(int(head.bounded(head.raw_logits(entry[None]) + added).argmax()))
    return tokens[1:]
