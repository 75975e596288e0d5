"""An EAGLE-3 head as a student: where it starts from, how it drafts while trained, and its files.

Drafting from every position of many texts at once is training-time test: Li et al., arXiv 2503.01840, section 3.2.
B rows, T tokens, h heads, W rows of the output layer.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import Optimizer
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from engine.heads.checkpoint import drafted_tokens, speculators_config
from engine.heads.eagle3 import Eagle3Head
from training.distillation.lessons import Batch, StudentVocabulary
from training.files import write_checkpoint
from training.head_starts import WithEmbedding, layer_settings, muon_and_adamw, start_from

_USUAL_DRAFT = 5
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
        return muon_and_adamw(self.head, learning_rate)

    def drafts(self, module: nn.Module, batch: Batch, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """No draft starts with an answer's first token: the target has run no token of the answer."""
        starts = [each[~batch.first[each]] for each in map(batch.starts, range(steps))]
        # Two tokens before the first of a draft is the last whose hidden states are there.
        cells = batch.counted.flatten().nonzero()[:, 0] - 1  # [N]
        logits = module(batch.features, batch.tokens, [cells[each] for each in starts])
        yield from zip(starts, logits, strict=True)


class _Unrolled(WithEmbedding[Eagle3Head]):
    """From hidden states to logits."""

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


def start_eagle3(target: PreTrainedModel, token_ids: Sequence[int], features: Tensor, *, seed: int) -> Eagle3Head:
    """Return a head, float32, that begins as parts of its target.

    The layer adds the next token's embedding to the target's last hidden state, by attention of each token to itself.
    The MLP and its norm are those of the target's last layer, and the output layer has rows of the target's.

    token_ids: that it can draft, ascending. features: [N, 3 · H] of some tokens; the last H are the last layer's.
    """
    size: int = target.config.get_text_config(decoder=True).hidden_size
    settings = layer_settings(target, 1)
    head = Eagle3Head(LlamaConfig(**settings), target_hidden_size=size, outputs=len(token_ids))
    start_from(head, target, token_ids, seed=seed)
    with torch.no_grad():
        identity = torch.eye(size)
        head.fc.weight.zero_()[:, -size:] = identity
        layer: Any = head.layers[0]
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight[:, :size] = identity
        attention.v_proj.weight[:, size:] = 0
        scale = features[:, -size:].float().square().mean(-1).median().sqrt()
        attention.o_proj.weight.copy_(scale * identity)
    return head


def save_eagle3(head: Eagle3Head, layers: Sequence[int], target: str, folder: Path) -> None:
    """Write a head, bfloat16, in the format of speculators. layers: after how many it reads the target's states."""
    layer: Any = head.layers[0]
    layer_config: LlamaConfig = layer.self_attn.config
    tensors = head.state_dict() | {"t2d": drafted_tokens(head.token_ids(), layer_config.vocab_size)}
    config = {
        **speculators_config("eagle3", "Eagle3", _USUAL_DRAFT, layer_config, target),
        "draft_vocab_size": len(head.d2t),
        "target_hidden_size": layer_config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "norm_before_residual": layer.norm_before_residual,
    }
    write_checkpoint(tensors, config, folder)
