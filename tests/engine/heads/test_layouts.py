"""Every published layout gives the heads of the papers; what is missing, surplus or of another size is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

from decoding.errors import ConfigError
from engine.heads.checkpoint import read_checkpoint
from engine.heads.eagle3 import Eagle3Head, read_eagle3, stated_layers
from engine.heads.medusa import MedusaHeads, read_medusa
from engine.heads.spec import HeadsKind, HeadsSpec
from tests.support.heads import save

SIZE, VOCAB, HEADS, LAYERS, MAPPED, DRAFTED = 12, 20, 3, 2, 7, 9
SHARED = torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(9))


def numbers(*shape: int) -> Tensor:
    return 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + 31 * shape[0]))


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: 0.4 * torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def v1() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            shapes |= {f"{head}.{layer}.linear.weight": (SIZE, SIZE), f"{head}.{layer}.linear.bias": (SIZE,)}
        shapes[f"{head}.{LAYERS}.weight"] = (VOCAB, SIZE)
    return random_tensors(shapes)


def v2() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {f"{head}.0.linear.weight": (SIZE, SIZE) for head in range(HEADS)}
    return random_tensors(shapes | {f"{head}.0.linear.bias": (SIZE,) for head in range(HEADS)})


def vllm(*, mapped: bool) -> dict[str, Tensor]:
    shapes = {f"blocks.{head}.layers.{layer}.weight": (SIZE, SIZE) for head in range(HEADS) for layer in range(LAYERS)}
    shapes |= {f"lm_heads.{head}.weight": (MAPPED if mapped else VOCAB, SIZE) for head in range(HEADS)}
    tensors = random_tensors(shapes)  # type: ignore[arg-type]
    return tensors | ({"token_map": torch.tensor([1, 2, 4, 8, 9, 15, 19])} if mapped else {})


def spec(folder: Path, kind: HeadsKind = "medusa") -> HeadsSpec:
    return HeadsSpec(name="endpoints.e.heads", path=str(folder), kind=kind)


def medusa(folder: Path, tensors: dict[str, Tensor]) -> MedusaHeads:
    return read_medusa(read_checkpoint(spec(save(folder, tensors))), hidden_size=SIZE, vocab_size=VOCAB)


def expected(tensors: dict[str, Tensor], head: int, hidden: Tensor) -> Tensor:
    """One head's logits, [N, V], after the paper."""
    layer = 0
    while True:
        names = f"{head}.{layer}.linear.weight", f"blocks.{head}.layers.{layer}.weight"
        weight = tensors.get(names[0], tensors.get(names[1]))
        if weight is None:
            break
        hidden = hidden + silu(linear(hidden, weight, tensors.get(f"{head}.{layer}.linear.bias")))
        layer += 1
    output = tensors.get(f"{head}.{layer}.weight", tensors.get(f"lm_heads.{head}.weight", SHARED))
    logits = linear(hidden, output)
    if "token_map" not in tensors:
        return logits
    every = torch.full((len(hidden), VOCAB), -torch.inf)
    every[:, tensors["token_map"]] = logits
    return every


@pytest.mark.parametrize("tensors", [v1(), v2(), vllm(mapped=False), vllm(mapped=True)], ids=["1", "2", "vllm", "map"])
def test_medusa_heads_in_all_layouts(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    heads, hidden = medusa(tmp_path, tensors), numbers(5, SIZE)
    assert heads.count == HEADS
    logits = heads(hidden, lambda states: linear(states, SHARED))
    for head in range(HEADS):
        torch.testing.assert_close(logits[head], expected(tensors, head, hidden))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1.0.linear.weight": None}, "lacks 1.0.linear.weight"),
        ({"extra.weight": torch.zeros(1)}, "do not belong there: extra.weight"),
        ({"0.0.linear.weight": torch.zeros(8, 8)}, r"0.0.linear.weight has the shape \[8, 8\].* needs \[12, 12\]"),
        ({"2.2.weight": torch.zeros(21, SIZE)}, r"2.2.weight has the shape \[21, 12\]"),
    ],
)
def test_other_medusa_tensors_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    tensors = {name: tensor for name, tensor in (v1() | change).items() if tensor is not None}
    with pytest.raises(ConfigError, match=message):
        medusa(tmp_path, tensors)


def test_a_token_map_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    tensors = vllm(mapped=True) | {"token_map": torch.arange(MAPPED) + VOCAB}
    with pytest.raises(ConfigError, match="token_map names tokens outside"):
        medusa(tmp_path, tensors)


def test_plain_tensors_are_read_from_pickles(tmp_path: Path) -> None:
    torch.save(v1(), tmp_path / "medusa_lm_head.pt")
    assert read_checkpoint(spec(tmp_path)).tensors.keys() == v1().keys()


def test_pickles_with_anything_else_are_refused(tmp_path: Path) -> None:
    torch.save({"a": Path("x")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ConfigError, match=r"can't read .*(?:Unsupported|Weights only)"):
        read_checkpoint(spec(tmp_path))
    torch.save([torch.zeros(2)], tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ConfigError, match=r"medusa_lm_head\.pt should be a dictionary of tensors"):
        read_checkpoint(spec(tmp_path))


def test_a_folder_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no file of tensors \(\*\.safetensors, \*\.pt"):
        read_checkpoint(spec(tmp_path))


LLAMA = {
    "model_type": "llama",
    "hidden_size": SIZE,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "head_dim": 4,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "transformer_layer_config": LLAMA,
    "draft_vocab_size": DRAFTED,
    "target_hidden_size": SIZE,
    "eagle_aux_hidden_state_layer_ids": [2, 5, 7],
    "norm_before_residual": True,
}
FLAT = {
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFTED,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]},
}


def eagle3_tensors(layer: str, *, own_embedding: bool = False) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (SIZE, 3 * SIZE),
        "norm.weight": (SIZE,),
        "lm_head.weight": (DRAFTED, SIZE),
        **{f"{layer}.{name}.weight": (SIZE,) for name in ("hidden_norm", "input_layernorm")},
        f"{layer}.post_attention_layernorm.weight": (SIZE,),
        f"{layer}.self_attn.q_proj.weight": (8, 2 * SIZE),
        f"{layer}.self_attn.k_proj.weight": (4, 2 * SIZE),
        f"{layer}.self_attn.v_proj.weight": (4, 2 * SIZE),
        f"{layer}.self_attn.o_proj.weight": (SIZE, 8),
        f"{layer}.mlp.gate_proj.weight": (16, SIZE),
        f"{layer}.mlp.up_proj.weight": (16, SIZE),
        f"{layer}.mlp.down_proj.weight": (SIZE, 16),
    }
    if own_embedding:
        shapes["embed_tokens.weight"] = (VOCAB, SIZE)
    drafted = torch.tensor([0, 2, 3, 5, 7, 11, 13, 17, 19])
    t2d = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, drafted, True)
    return random_tensors(shapes) | {"d2t": drafted - torch.arange(DRAFTED), "t2d": t2d}


def eagle3(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Eagle3Head:
    save(folder, tensors)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_eagle3(read_checkpoint(spec(folder, "eagle3")), hidden_size=SIZE, vocab_size=VOCAB)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of [heads, T, 4], from 0 on, base 500."""
    angles = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 500.0**-0.5])
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :2], x[..., 2:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def published(
    tensors: dict[str, Tensor], layer: str, features: Tensor, tokens: Tensor, *, norm_before_residual: bool
) -> tuple[Tensor, Tensor]:
    """The forward of the paper's code over a text: the layer's output [T, H] and logits [T, W]."""

    def weight(name: str) -> Tensor:
        return tensors[f"{layer}.{name}.weight"]

    hidden = linear(features, tensors["fc.weight"])
    normed = norm(hidden, weight("hidden_norm"))
    embedded = norm(embedding(tokens, tensors.get("embed_tokens.weight", SHARED)), weight("input_layernorm"))
    both = torch.cat([embedded, normed], dim=-1)
    q, k, v = (
        linear(both, weight(f"self_attn.{name}_proj")).view(len(tokens), -1, 4).transpose(0, 1) for name in "qkv"
    )
    k, v = rotated(k).expand_as(q), v.expand_as(q)
    attended = scaled_dot_product_attention(rotated(q)[None], k[None], v[None], is_causal=True)[0]
    residual = normed if norm_before_residual else hidden
    residual = residual + linear(attended.transpose(0, 1).flatten(1), weight("self_attn.o_proj"))
    x = norm(residual, weight("post_attention_layernorm"))
    gated = silu(linear(x, weight("mlp.gate_proj"))) * linear(x, weight("mlp.up_proj"))
    output = residual + linear(gated, weight("mlp.down_proj"))
    return output, linear(norm(output, tensors["norm.weight"]), tensors["lm_head.weight"])


@pytest.mark.parametrize("own_embedding", [False, True])
@pytest.mark.parametrize(("config", "layer"), [(SPECULATORS, "layers.0"), (FLAT, "midlayer")], ids=["spec", "flat"])
def test_eagle3_equals_the_published_forward(
    tmp_path: Path, config: dict[str, Any], layer: str, own_embedding: bool
) -> None:
    tensors = eagle3_tensors(layer, own_embedding=own_embedding)
    head = eagle3(tmp_path, config, tensors).requires_grad_(False)
    features, tokens = numbers(6, 3 * SIZE), torch.tensor([3, 1, 4, 1, 5, 9])
    output, logits = published(
        tensors, layer, features, tokens, norm_before_residual=bool(config.get("norm_before_residual"))
    )
    table = head.embed_tokens.weight if head.embed_tokens is not None else SHARED
    mask = torch.full((6, 6), -torch.inf).triu(1)[None, None]
    positions = torch.arange(6)[None]
    actual = head(head.fc(features)[None], embedding(tokens, table)[None], positions, attention_mask=mask)[0]
    torch.testing.assert_close(actual, output, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(head.logits(actual), logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(head.token_ids(), torch.arange(DRAFTED) + tensors["d2t"])


def test_tokens_that_an_eagle3_head_drafts_are_put_in_order(tmp_path: Path) -> None:
    tensors = eagle3_tensors("midlayer")
    ids = torch.arange(DRAFTED) + tensors["d2t"]
    ordered = eagle3(tmp_path / "ordered", FLAT, tensors)
    tensors |= {"d2t": ids.flip(0) - torch.arange(DRAFTED), "lm_head.weight": tensors["lm_head.weight"].flip(0)}
    reversed_ = eagle3(tmp_path / "reversed", FLAT, tensors)
    assert torch.equal(reversed_.token_ids(), ordered.token_ids())
    assert torch.equal(reversed_.lm_head.weight, ordered.lm_head.weight)


def test_the_layers_that_checkpoints_name() -> None:
    assert stated_layers(SPECULATORS, 10) == (2, 5, 7)
    assert stated_layers(FLAT, 10) == (2, 5, 7)  # there they are indices of layers whose output is read
    assert stated_layers(LLAMA, 10) == (2, 5, 7)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({}, {"midlayer.mlp.up_proj.weight": None}, "lacks layers.0.mlp.up_proj.weight"),
        ({}, {"fc.weight": None}, "lacks fc.weight"),
        ({}, {"other": torch.zeros(2)}, "do not belong there: other"),
        ({}, {"fc.weight": torch.zeros(SIZE, 30)}, r"fc.weight has the shape \[12, 30\]"),
        ({"vocab_size": 99}, {}, "for targets with 99 tokens, but this one has 20"),
        ({"target_hidden_size": 16}, {}, "for targets with 16 hidden features"),
        ({"model_type": "mamba"}, {}, "layer of kind 'mamba'"),
        ({}, {"d2t": torch.full((DRAFTED,), VOCAB)}, "d2t names tokens outside"),
        ({}, {"d2t": -torch.arange(DRAFTED)}, "d2t names a token twice"),
    ],
)
def test_other_eagle3_checkpoints_are_refused(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    changed = eagle3_tensors("midlayer") | change
    with pytest.raises(ConfigError, match=message):
        eagle3(tmp_path, FLAT | config, {name: tensor for name, tensor in changed.items() if tensor is not None})


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"endpoints\.e\.heads\.path"):
        read_checkpoint(spec(tmp_path / "none"))
