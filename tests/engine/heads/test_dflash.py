"""DFlash heads of every published layout compute what the paper's forward does, block after block."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from decoding.errors import ConfigError
from engine.heads.checkpoint import HeadsCheckpoint, read_checkpoint
from engine.heads.dflash import DFlashHead
from engine.heads.dflash_layout import layer_ids, read_dflash, stored_dflash
from engine.heads.spec import HeadsSpec
from tests.support.heads import save

SIZE, VOCAB, OUTPUTS, STATES, LAYERS, BLOCK, MASK = 24, 40, 13, 2, 3, 5, 39
HEADS, KV_HEADS, DIM, THETA, EPS, WINDOW = 4, 2, 8, 5000.0, 1e-5, 4
DRAFTED = sorted(range(0, 3 * OUTPUTS, 3))
LAYER = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 20,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "rms_norm_eps": EPS,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
}


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return 0.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def backbone() -> dict[str, Tensor]:
    """The tensors that all layouts share."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (SIZE, STATES * SIZE), "hidden_norm.weight": (SIZE,), "norm.weight": (SIZE,)
    }  # fmt: skip
    for layer in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (HEADS * DIM, SIZE), "self_attn.k_proj": (KV_HEADS * DIM, SIZE),
            "self_attn.v_proj": (KV_HEADS * DIM, SIZE), "self_attn.o_proj": (SIZE, HEADS * DIM),
            "self_attn.q_norm": (DIM,), "self_attn.k_norm": (DIM,), "mlp.gate_proj": (20, SIZE),
            "mlp.up_proj": (20, SIZE), "mlp.down_proj": (SIZE, 20), "input_layernorm": (SIZE,),
            "post_attention_layernorm": (SIZE,),
        }  # fmt: skip
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return {name: numbers(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


def speculators(**changes: object) -> tuple[dict[str, Tensor], dict[str, Any]]:
    drafted = torch.tensor(DRAFTED)
    tensors = backbone() | {
        "embed_tokens.weight": numbers(VOCAB, SIZE, seed=98),
        "lm_head.weight": numbers(OUTPUTS, SIZE, seed=99),
        "d2t": drafted - torch.arange(OUTPUTS),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, drafted, value=True),
    }
    return tensors, {
        "speculators_model_type": "dflash",
        "transformer_layer_config": LAYER,
        "draft_vocab_size": OUTPUTS,
        "aux_hidden_state_layer_ids": [1, 3],
        "block_size": BLOCK,
        "mask_token_id": MASK,
        **changes,
    }


def authors(**changes: object) -> tuple[dict[str, Tensor], dict[str, Any]]:
    settings = {"mask_token_id": MASK, "target_layer_ids": [0, 2]} | changes
    return backbone(), {**LAYER, "architectures": ["DFlashDraftModel"], "block_size": BLOCK, "dflash_config": settings}


def checkpoint(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> HeadsCheckpoint:
    save(folder, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return read_checkpoint(HeadsSpec(name="endpoints.e.heads", path=str(folder), kind="dflash"))


def read(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> DFlashHead:
    return read_dflash(checkpoint(folder, tensors, config), hidden_size=SIZE, vocab_size=VOCAB)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x: [N, heads, DIM]."""
    angles = positions[:, None].float() * THETA ** (-torch.arange(0, DIM, 2) / DIM)  # [N, DIM / 2]
    cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., : DIM // 2], x[..., DIM // 2 :]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def expected(
    tensors: dict[str, Tensor], states: Tensor, embeddings: Tensor, *, windows: Sequence[int | None], causal: bool
) -> Tensor:
    """One block after the context, [S, H], after the paper: token by token and head by head.

    states: [T, F]. embeddings: [S, H].
    """
    context = rms(linear(states, tensors["fc.weight"]), tensors["hidden_norm.weight"])
    hidden, count, size = embeddings, len(states), len(embeddings)
    positions = torch.arange(count + size)
    for layer in range(LAYERS):
        weights = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in tensors.items()}
        normed = rms(hidden, weights["input_layernorm.weight"])
        both = torch.cat([context, normed])
        q, k, v = (
            linear(x, weights[f"self_attn.{name}_proj.weight"]).view(len(x), -1, DIM)
            for name, x in (("q", normed), ("k", both), ("v", both))
        )
        q = rotated(rms(q, weights["self_attn.q_norm.weight"]), positions[count:])
        k = rotated(rms(k, weights["self_attn.k_norm.weight"]), positions)
        window = windows[layer]
        attended = torch.zeros(size, HEADS, DIM)
        for index in range(size):
            seen = torch.ones(count + size, dtype=torch.bool)
            if window is not None:
                seen &= (positions - positions[count + index]).abs() < window
                seen &= positions <= positions[count + index] if causal else seen
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                scores = k[seen, group] @ q[index, head] / DIM**0.5
                attended[index, head] = scores.softmax(-1) @ v[seen, group]
        hidden = hidden + linear(attended.flatten(1), weights["self_attn.o_proj.weight"])
        normed = rms(hidden, weights["post_attention_layernorm.weight"])
        gated = silu(linear(normed, weights["mlp.gate_proj.weight"])) * linear(normed, weights["mlp.up_proj.weight"])
        hidden = hidden + linear(gated, weights["mlp.down_proj.weight"])
    return rms(hidden, tensors["norm.weight"])


@pytest.mark.parametrize("layout", [speculators, authors])
@pytest.mark.parametrize(
    ("changes", "windows", "causal"),
    [
        ({}, [None] * LAYERS, False),
        ({"use_swa": True, "swa_window_size": WINDOW, "causal": False}, [WINDOW] * LAYERS, False),
        ({"use_swa": True, "swa_window_size": WINDOW}, [WINDOW] * LAYERS, True),
    ],
)
def test_blocks_equal_the_papers_forward(
    tmp_path: Path, layout: Any, changes: dict[str, Any], windows: list[int | None], causal: bool
) -> None:
    tensors, config = layout(**changes)
    head = read(tmp_path, tensors, config)
    states, embedding = numbers(2, 11, STATES * SIZE, seed=5), numbers(VOCAB, SIZE, seed=6)
    anchors = torch.tensor([[11, 4, 0], [7, 1, 11]])
    blocks = head.blocks(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert blocks[1, 2].tolist() == [6, *[MASK] * (BLOCK - 1)]
    hidden = head(states, embedding[blocks], anchors)
    assert hidden.shape == (2, 3, BLOCK, SIZE)
    for row in range(2):
        for index, anchor in enumerate(anchors[row].tolist()):
            alone = expected(
                tensors, states[row, :anchor], embedding[blocks[row, index]], windows=windows, causal=causal
            )
            torch.testing.assert_close(hidden[row, index], alone, rtol=1e-4, atol=1e-4)
    if layout is speculators:
        torch.testing.assert_close(head.logits(hidden), linear(hidden, tensors["lm_head.weight"]))
        assert head.token_ids().tolist() == DRAFTED


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"rope_parameters": None, "rope_theta": THETA, "rope_scaling": None}, [None] * LAYERS),
        ({"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}, [None, WINDOW, WINDOW]),
        ({"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 5}, [None] * LAYERS),
        ({"use_sliding_window": True, "sliding_window": None, "layer_types": None}, [None] * LAYERS),
    ],
)
def test_older_keys_of_flat_configurations(tmp_path: Path, changes: dict[str, Any], windows: list[int | None]) -> None:
    tensors, config = authors()
    config = {key: value for key, value in (config | changes).items() if key != "rope_parameters" or value}
    head = read(tmp_path, tensors, config)
    states, embeddings = numbers(1, 11, STATES * SIZE, seed=5), numbers(1, 1, BLOCK, SIZE, seed=6)
    alone = expected(tensors, states[0], embeddings[0, 0], windows=windows, causal=True)
    hidden = head(states, embeddings, torch.tensor([[11]]))[0, 0]
    torch.testing.assert_close(hidden, alone, rtol=1e-4, atol=1e-4)


def test_layers_of_either_layout(tmp_path: Path) -> None:
    assert layer_ids(checkpoint(tmp_path / "a", *speculators())) == (1, 3)
    assert layer_ids(checkpoint(tmp_path / "b", *authors())) == (1, 3)


def test_drafted_tokens_in_any_order_are_sorted(tmp_path: Path) -> None:
    tensors, config = speculators()
    order = torch.randperm(OUTPUTS, generator=torch.Generator().manual_seed(0))
    shuffled = tensors | {
        "d2t": torch.tensor(DRAFTED)[order] - torch.arange(OUTPUTS),
        "lm_head.weight": tensors["lm_head.weight"][order],
    }
    hidden = numbers(3, SIZE)
    heads = read(tmp_path / "a", tensors, config), read(tmp_path / "b", shuffled, config)
    torch.testing.assert_close(heads[0].logits(hidden), heads[1].logits(hidden))


def test_what_is_stored_is_read_again(tmp_path: Path) -> None:
    head = read(tmp_path / "a", *speculators(sample_from_anchor=True))
    tensors, config = stored_dflash(head, (1, 3), "target")
    again = read(tmp_path / "b", tensors, json.loads(json.dumps(config)))
    assert again.config.length == head.config.length == BLOCK
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    arguments = numbers(1, 6, STATES * SIZE), numbers(1, 1, BLOCK, SIZE), torch.tensor([[6]])
    assert torch.equal(again(*arguments), head(*arguments))
    assert layer_ids(checkpoint(tmp_path / "c", tensors, config)) == (1, 3)


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        (speculators, {"mask_token_id": None}, "mask_token_id in config.json is None"),
        (speculators, {"mask_token_id": VOCAB}, f"mask_token_id in config.json is {VOCAB}"),
        (speculators, {"target_hidden_size": 99}, "is for targets with 99 hidden features"),
        (speculators, {"aux_hidden_state_layer_ids": []}, "which hidden states are read"),
        (speculators, {"aux_hidden_state_layer_ids": [1]}, r"fc.weight has the shape \[24, 48\].* needs \[24, 24\]"),
        (authors, {"use_swa": True}, "no sliding_window"),
        (authors, {"selector_rank": 8}, "has selector_rank, which can't run"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path: Path, layout: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, *layout(**changes))
