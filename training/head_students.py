"""EAGLE-3 and Medusa heads as students: where they start from, how they draft while trained, and their files.

Drafting from every position of many texts at once is training-time test: Li et al., arXiv 2503.01840, section 3.2.
B rows, T tokens, h heads, W rows of the output layer.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import AdamW, Muon, Optimizer
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from engine.heads.eagle3 import Eagle3Head
from engine.heads.medusa import MedusaHeads
from training.distillation.lessons import Batch, StudentVocabulary
from training.files import write_checkpoint

# What a file says of the layer, of its configuration in transformers.
_LAYER_KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "hidden_act",
    "attention_bias", "mlp_bias",
)  # fmt: skip
_USUAL_DRAFT = 5
_HEAD_DIM = 64
_BETAS = (0.9, 0.95)
_DECAY = 0.01
_OTHER_RATE, _MEDUSA_RATE = 0.15, 0.05  # of AdamW, in parts of the learning rate, which is Muon's
_STD = 0.02
_FIRST_TOKEN = 0.4  # of the training


def unroll(head: Eagle3Head, features: Tensor, embeddings: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield the layer's outputs of step 0, 1, …, [B, T, H]: entry p of step s is what predicts token p + 2 + s.

    In step s the draft that started after position p takes its own output in place of the features of position p + s.
    It attends to the true columns up to p and to its own after these. Entries whose token p + 1 + s is beyond T mean
    nothing.

    features: [B, T, k · H] the target's hidden states after each token. embeddings: [B, T, H] of these tokens.
    """
    layer: Any = head.layers[0]
    attention = layer.self_attn
    length = features.shape[1]
    groups = attention.num_key_value_groups
    positions = torch.arange(length, device=features.device)[None]
    future = torch.ones(length, length, dtype=torch.bool, device=features.device).triu(1)
    hidden: Tensor = head.fc(features)
    keys, values = [], []
    for step in range(steps):
        following = embeddings.roll(-1 - step, dims=1)
        normed = layer.hidden_norm(hidden)
        both = torch.cat([layer.input_layernorm(following), normed], dim=-1)
        q, k, v = (
            projection(both).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cosines, sines = head.rotary_emb(hidden, position_ids=positions + step)
        q, k = apply_rotary_pos_emb(q, k, cosines, sines)
        keys.append(repeat_kv(k, groups))
        values.append(repeat_kv(v, groups))
        if step == 0:
            attended = scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
        else:
            scores = (q @ keys[0].mT).masked_fill(future, -torch.inf)  # [B, h, T, T]
            own = [(q * key).sum(-1, keepdim=True) for key in keys[1:]]  # [B, h, T, 1] each
            scores = torch.cat([scores, *own], dim=-1).float() * attention.scaling
            weights = scores.softmax(-1).to(q.dtype)
            attended = weights[..., :length] @ values[0]
            for index, value in enumerate(values[1:]):
                attended = attended + weights[..., length + index, None] * value
        residual = normed if layer.norm_before_residual else hidden
        residual = residual + attention.o_proj(attended.transpose(1, 2).flatten(2))
        hidden = residual + layer.mlp(layer.post_attention_layernorm(residual))
        yield hidden


class Eagle3Student:
    """A `Student` whose module reads the target's hidden states after three numbers of layers, and its embedding."""

    def __init__(self, head: Eagle3Head, embedding: Tensor, vocabulary: StudentVocabulary, *, steps: int) -> None:
        """embedding: [V, H] the target's. steps: of training-time test."""
        self.head = head
        self.module: nn.Module = _Unrolled(head, embedding)
        self.vocabulary, self._steps = vocabulary, steps

    def steps(self, share: float) -> int:
        """Return 1 while the first token of a draft is learned, which takes a fraction of the time; then all steps."""
        return 1 if share < _FIRST_TOKEN else self._steps

    def optimizers(self, learning_rate: float) -> list[Optimizer]:
        inside: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.head.named_parameters():
            (inside if parameter.ndim == 2 and not name.startswith("lm_head") else others).append(parameter)
        other_rate = _OTHER_RATE * learning_rate
        return [
            Muon(inside, lr=learning_rate, weight_decay=_DECAY, adjust_lr_fn="match_rms_adamw"),
            AdamW(others, lr=other_rate, betas=_BETAS, weight_decay=_DECAY, fused=True),
        ]

    def drafts(self, module: nn.Module, batch: Batch, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """No draft starts with an answer's first token: the target has run no token of the answer."""
        starts = [each[~batch.first[each]] for each in map(batch.starts, range(steps))]
        # Two tokens before the first of a draft is the last whose hidden states are there.
        cells = batch.counted.flatten().nonzero()[:, 0] - 1  # [N]
        logits = module(batch.features, batch.tokens, [cells[each] for each in starts])
        yield from zip(starts, logits, strict=True)


class _Unrolled(nn.Module):
    """The head with its target's embedding, from hidden states to logits."""

    embedding: Tensor  # [V, H]

    def __init__(self, head: Eagle3Head, embedding: Tensor) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("embedding", embedding, persistent=False)

    def forward(self, features: Tensor, tokens: Tensor, cells: Sequence[Tensor]) -> list[Tensor]:
        """Return each step's logits, [n, W], of those of the B · T entries that `cells` names for it, [n].

        features: [B, T, k · H]. tokens: [B, T].
        """
        dtype = self.head.fc.weight.dtype
        embeddings = functional.embedding(tokens, self.embedding).to(dtype)
        outputs = unroll(self.head, features.to(dtype), embeddings, len(cells))
        return [
            self.head.lm_head(self.head.norm(hidden.flatten(0, 1)[chosen]))
            for hidden, chosen in zip(outputs, cells, strict=True)
        ]


def start_head(target: PreTrainedModel, token_ids: Sequence[int], features: Tensor, *, seed: int) -> Eagle3Head:
    """Return a head, float32, that begins as parts of its target.

    The layer adds the next token's embedding to the target's last hidden state, by attention of each token to itself.
    The MLP and its norm are those of the target's last layer, and the output layer has rows of the target's.

    token_ids: that it can draft, ascending. features: [N, 3 · H] of some tokens; the last H are the last layer's.
    """
    config = target.config.get_text_config(decoder=True)
    size: int = config.hidden_size
    head_dim = _HEAD_DIM if size % _HEAD_DIM == 0 else size // config.num_attention_heads
    rope: dict[str, object] = getattr(config, "rope_parameters", None) or {}
    head_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=size // head_dim,
        num_key_value_heads=size // head_dim,  # the next token's embedding has to pass through the values
        head_dim=head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)},
    )
    head = Eagle3Head(head_config, target_hidden_size=size, outputs=len(token_ids))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor(token_ids)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, _STD, generator=generator)
        _copy_parts(head, target)
        identity = torch.eye(size)
        head.fc.weight.zero_()[:, -size:] = identity
        layer: Any = head.layers[0]
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight[:, :size] = identity
        attention.v_proj.weight[:, size:] = 0
        scale = features[:, -size:].float().square().mean(-1).median().sqrt()
        attention.o_proj.weight.copy_(scale * identity)
        output_layer: Any = target.get_output_embeddings()
        assert output_layer is not None
        head.lm_head.weight.copy_(output_layer.weight[ids])
    head.d2t.copy_(ids - torch.arange(len(ids)))
    return head


def _copy_parts(head: Eagle3Head, target: PreTrainedModel) -> None:
    """Copy the MLP of the target's last layer with its norm, and the final norm, where they have the same size."""
    state = target.state_dict()
    prefix = next(name for name in state if ".layers." in name).partition(".layers.")[0]
    last = target.config.get_text_config(decoder=True).num_hidden_layers - 1
    for name, parameter in head.named_parameters():
        if name.startswith(("layers.0.mlp.", "layers.0.post_attention_layernorm.", "norm.")):
            source = state.get(f"{prefix}.{name.replace('layers.0', f'layers.{last}')}")
            if source is not None and source.shape == parameter.shape:
                parameter.copy_(source)


def save_eagle3(head: Eagle3Head, layers: Sequence[int], target: str, folder: Path) -> None:
    """Write a head, bfloat16, in the format of speculators. layers: after how many it reads the target's states."""
    layer: Any = head.layers[0]
    layer_config = layer.self_attn.config.to_dict()
    tensors = head.state_dict()
    size = layer_config["vocab_size"]
    drafted = head.token_ids().cpu()
    tensors["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill_(0, drafted, value=True)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _USUAL_DRAFT}],
            "verifier": {"name_or_path": target},
        },
        "transformer_layer_config": {key: layer_config[key] for key in _LAYER_KEYS if key in layer_config},
        "draft_vocab_size": len(head.d2t),
        "target_hidden_size": layer_config["hidden_size"],
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "norm_before_residual": layer.norm_before_residual,
        "torch_dtype": "bfloat16",
    }
    write_checkpoint(tensors, config, folder)


class MedusaStudent:
    """A `Student` whose module reads the target's last hidden state. The target's output layer stays as it is."""

    def __init__(self, heads: MedusaHeads, norm: nn.Module, output_rows: Tensor, vocabulary: StudentVocabulary) -> None:
        """
        norm: the target's last, between its last layer and its output layer.
        output_rows: [W, H] of the target's output layer, for the tokens of the vocabulary.
        """
        self.heads = heads
        self.module: nn.Module = _WithOutput(heads, norm, output_rows)
        self.vocabulary = vocabulary

    def steps(self, share: float) -> int:
        return self.heads.count

    def optimizers(self, learning_rate: float) -> list[Optimizer]:
        return [
            AdamW(self.heads.parameters(), lr=_MEDUSA_RATE * learning_rate, betas=_BETAS, weight_decay=0.0, fused=True)
        ]

    def drafts(self, module: nn.Module, batch: Batch, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """No draft starts with an answer's first token: the target has run no token of the answer."""
        starts = [each[~batch.first[each]] for each in map(batch.starts, range(min(steps, self.heads.count)))]
        if not len(starts[0]):
            return  # no text has a second token, and the heads don't run on nothing
        assert batch.features is not None
        cells = batch.counted.flatten().nonzero()[starts[0], 0] - 1  # [n]
        logits = module(batch.features.flatten(0, 1)[cells])  # [K, n, W]
        for each, of_head in zip(starts, logits, strict=False):
            yield each, of_head[torch.isin(starts[0], each)]


class _WithOutput(nn.Module):
    """The heads between the target's last layer and some rows of its output layer."""

    output_rows: Tensor  # [W, H]

    def __init__(self, heads: MedusaHeads, norm: nn.Module, output_rows: Tensor) -> None:
        super().__init__()
        self.heads = heads
        self._norm: Sequence[nn.Module] = (norm,)  # in a sequence: it is not of this module, nor of its checkpoints
        self.register_buffer("output_rows", output_rows, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return [K, n, W] logits. features: [n, k · H], whose last H are the last layer's output."""
        size = self.output_rows.shape[1]
        with torch.no_grad():
            hidden = self._norm[0](features[:, -size:]).to(self.heads.weight.dtype)
        logits: Tensor = self.heads(hidden, partial(functional.linear, weight=self.output_rows))
        return logits


def save_medusa(heads: MedusaHeads, target: str, folder: Path) -> None:
    """Write heads of one layer each, bfloat16, in the format of Medusa's version 2."""
    tensors: dict[str, Tensor] = {}
    for head in range(heads.count):
        tensors[f"{head}.0.linear.weight"] = heads.weight[head, 0]
        tensors[f"{head}.0.linear.bias"] = heads.bias[head, 0]
    config: dict[str, object] = {
        "version": "2",
        "medusa_num_heads": heads.count,
        "medusa_num_layers": 1,
        "hidden_size": heads.weight.shape[-1],
        "base_model_name_or_path": target,
    }
    write_checkpoint(tensors, config, folder)
