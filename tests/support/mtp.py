"""Tiny checkpoints whose files have an MTP layer under its published names, and its formula, written out."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.families.configurations import SHAPE as ALL

SHAPE: dict[str, Any] = {name: value for name, value in ALL.items() if name.endswith(("_size", "_id"))} | {
    name: ALL[name]
    for name in (
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    )
}
DELTA_RULE = {name: value for name, value in ALL.items() if name.startswith("linear_")} | {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"]
}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_ROUTED = _EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}


class Family(NamedTuple):
    """How a family's own code has it. Names are of its files, with {} for what a layer's own names follow."""

    kind: str
    settings: Mapping[str, Any]
    one_layer: Mapping[str, Any]  # settings of the layer's own kind
    norms: tuple[str, ...]  # of the embedding, of the hidden state, and the last one, if it is the layer's own
    projection: str
    layer: str
    hidden_first: bool = False


_QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"), "mtp.fc", "mtp.layers.0"
_FULL = {"layer_types": ["full_attention"]}
_DEEPSEEK = (
    ("model.layers.4.enorm", "model.layers.4.hnorm", "model.layers.4.shared_head.norm"),
    "model.layers.4.eh_proj",
    "model.layers.4",
)
_MIMO = tuple(f"model.mtp_layers.0.{name}_layernorm" for name in ("token", "hidden", "final"))
FAMILIES: dict[str, Family] = {
    "qwen3_next": Family(
        "qwen3_next",
        SHAPE | DELTA_RULE | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
        _FULL,
        *_QWEN,
    ),
    "qwen3_5": Family("qwen3_5_text", SHAPE | DELTA_RULE, _FULL, *_QWEN),
    "qwen3_5_moe": Family(
        "qwen3_5_moe_text",
        # All experts, since rounding to bfloat16 would choose other ones.
        SHAPE | DELTA_RULE | _EXPERTS | {"num_experts": 2, "shared_expert_intermediate_size": 16},
        _FULL,
        *_QWEN,
    ),
    "glm4_moe": Family("glm4_moe", SHAPE | _ROUTED, {"first_k_dense_replace": 0}, *_DEEPSEEK),
    "deepseek_v3": Family(
        "deepseek_v3",
        {**SHAPE, **_ROUTED, **_LATENT, "num_key_value_heads": 4, "head_dim": 4},  # of the rotary part
        {"first_k_dense_replace": 0},
        *_DEEPSEEK,
    ),
    "mimo": Family("qwen2", SHAPE, {}, _MIMO, "model.mtp_layers.0.input_proj", "model.mtp_layers.0", hidden_first=True),
    "ernie4_5_moe": Family(
        "ernie4_5_moe",
        SHAPE | {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 16},
        {"moe_layer_start_index": 1},  # its layer is dense
        ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0"),
        "model.mtp_linear_proj.0",
        "model.mtp_block.0",
    ),
}


class Reference:
    """The logits of an MTP layer, by its formula: no pages, no batch."""

    def __init__(self, family: Family, target: Any, layer: Any, norms: Sequence[nn.Module], projection: Tensor) -> None:
        self.target, self.layer, self.projection = target, layer, projection
        self.embedding: Any = target.model.embed_tokens
        self.output: Any = target.lm_head
        self.embedding_norm, self.hidden_norm, *last_norms = norms
        self.last_norm = last_norms[0] if last_norms else None
        self.hidden_first, self.kind = family.hidden_first, family.kind

    @torch.no_grad()
    def logits(self, text: Sequence[int], drafted: Sequence[int] = ()) -> Tensor:
        """Return the logits [1 + len(drafted), V] of what follows `text`, and `text` with each drafted token."""
        base = self.target.model
        before: list[Tensor] = []
        hook = base.norm.register_forward_pre_hook(lambda module, args: before.append(args[0]))
        last = base(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state
        hook.remove()
        raw = self.last_norm is None
        hidden = (before[0] if raw else last)[:, :-1]  # after token p, with token p + 1
        results = []
        for count in range(len(drafted) + 1):
            output = self._outputs(hidden, [*text[1:], *drafted[:count]])
            results.append(self.output(base.norm(output) if raw else output)[0, -1])
            hidden = torch.cat([hidden, output[:, -1:]], dim=1)
        return torch.stack(results)

    def _outputs(self, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        base, count = self.target.model, len(tokens)
        embeddings = self.embedding(torch.tensor([tokens]))
        pair = self.embedding_norm(embeddings), self.hidden_norm(hidden)
        projected = torch.cat(pair[::-1] if self.hidden_first else pair, dim=-1) @ self.projection.T
        positions = torch.arange(count)[None]
        has_axes = self.kind.startswith("qwen3_5")
        rotary = base.rotary_emb(projected, positions.expand(3, 1, count) if has_axes else positions)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        output = self.layer(projected, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
        return output if self.last_norm is None else self.last_norm(output)


def random_model(kind: str, settings: Mapping[str, Any], seed: int, *, idle: bool = False) -> Any:
    """Return a model. idle: its layers add nothing, so that what follows depends on the last token alone."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](**settings)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            elif name.endswith("norm.weight"):
                parameter += 0.3 * torch.randn(parameter.shape)
            if idle and any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                parameter.zero_()
    return model.float().eval()


def make_mtp(
    name: str,
    folder: Path,
    *,
    save: Callable[[dict[str, Tensor], Path], None] | None = None,
    right: bool = False,
    target: Any = None,
    **settings: Any,
) -> Reference:
    """Save a checkpoint with an MTP layer.

    save: how its tensors are written; None: into the model's own file.
    right: whether the MTP layer knows the target's next tokens, which then depend on the last one alone.
    target: that is saved there already, with `model` and `lm_head`; None: make one.
    settings: of the configuration, beside the family's.
    """
    family = FAMILIES[name]
    settings = {**family.settings, **settings}
    if target is None:
        target = random_model(family.kind, settings, 0, idle=right)
        target.save_pretrained(folder)
    single = random_model(family.kind, {**settings, "num_hidden_layers": 1, **family.one_layer}, 1, idle=right)
    hidden = single.config.hidden_size
    new_norm = type(single.model.norm)
    before = [new_norm(hidden, single.config.rms_norm_eps) for _ in range(2)]
    last = [single.model.norm] * (len(family.norms) - 2)
    if right:  # the embedding passes through to a last norm like the target's
        halves = torch.eye(hidden), torch.zeros(hidden, hidden)
        projection = torch.cat(halves[::-1] if family.hidden_first else halves, dim=1)
        for norm in last:
            norm.load_state_dict(target.model.norm.state_dict())
    else:
        projection = 0.2 * torch.randn(hidden, 2 * hidden)
        for norm in before:
            norm.weight.data += 0.3 * torch.randn(hidden)
    with TemporaryDirectory() as scratch:
        single.save_pretrained(scratch)
        stored = load_file(Path(scratch) / "model.safetensors")
    tensors = {
        f"{family.layer}.{key.removeprefix('model.layers.0.')}": tensor
        for key, tensor in stored.items()
        if key.startswith("model.layers.0.")
    }
    if name != "qwen3_5_moe":
        tensors = dict(_one_by_one(tensors))
    norms = [*before, *last]
    tensors |= {f"{key}.weight": norm.weight.data for key, norm in zip(family.norms, norms, strict=True)}
    tensors[f"{family.projection}.weight"] = projection
    (save or add_tensors)(tensors, folder)
    return Reference(family, target, single.model.layers[0], norms, projection)


def _one_by_one(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with the weights of each expert apart, as most files have them."""
    for name, tensor in tensors.items():
        begin, _, end = name.rpartition(".experts.")
        if end == "gate_up_proj":
            for number, expert in enumerate(tensor):
                for part, weight in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True):
                    yield f"{begin}.experts.{number}.{part}.weight", weight
        elif end == "down_proj":
            yield from ((f"{begin}.experts.{number}.down_proj.weight", expert) for number, expert in enumerate(tensor))
        else:
            yield name, tensor


def add_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors into a checkpoint's only file, beside those that it has."""
    file = folder / "model.safetensors"
    together = {**load_file(file), **{name: tensor.contiguous().clone() for name, tensor in tensors.items()}}
    save_file(together, file, {"format": "pt"})


def add_shard(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors into a file of their own, and an index of all."""
    files = {"model-00001-of-00002.safetensors": load_file(folder / "model.safetensors")}
    files["model-00002-of-00002.safetensors"] = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    (folder / "model.safetensors").unlink()
    for file, part in files.items():
        save_file(part, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
