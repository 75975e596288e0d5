"""An EAGLE-3 head as a student: where it starts from, and how it drafts on its own output while it is trained.

Must not know files or how it is trained.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Muon, Optimizer
from transformers import LlamaConfig, PreTrainedModel

from engine.heads.eagle3 import Eagle3Head
from training.distillation.lessons import Batch
from training.distillation.vocabulary import StudentVocabulary
from training.heads.unrolling import unroll

_HEAD_DIM = 64
_BETAS = (0.9, 0.95)
_DECAY = 0.01
_OTHER_RATE = 0.15  # of AdamW's learning rate, in parts of Muon's
_STD = 0.02
_FIRST_TOKEN = 0.4  # of the training


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
        """Return Muon for the matrices inside, and AdamW for the output layer and the norms."""
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
        """See `Student`. No draft starts with an answer's first token: the target has run no token of the answer."""
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

    Args:
        token_ids: that it can draft, ascending.
        features: [N, 3 · H] of some tokens; the last H are the last layer's.
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
