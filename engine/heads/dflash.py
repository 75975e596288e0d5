"""A DFlash head: a few decoder layers that draft a block of tokens in one pass, by mask tokens.

Chen et al., arXiv 2602.06036, and DeepSeek-AI's DSpark, which adds to each entry's logits what follows from the token
before (`markov_head`). Several of the target's hidden states after each token of the text, joined, are the
context: every layer takes its keys and values from them. A block is the text's last token, the anchor, and mask tokens
after it; its tokens see the context before the anchor, and each other. The layers are transformers' own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from engine.heads.markov import MarkovHead, MarkovKind
from engine.layers.packing import joined_linear
from engine.model.attention import NAME

KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DFlashConfig:
    """The shape of a head, and how it drafts."""

    layers: Qwen3Config  # of the layers; its `vocab_size` is the target's
    feature_size: int  # of the target's hidden states of a token, joined
    outputs: int  # the number of tokens that it can draft, W
    block_size: int  # tokens of a block, the anchor included, S
    mask_token_id: int
    anchor_drafts: bool = False  # whether entry i of a block drafts the token i + 1 after the anchor; otherwise i
    causal: Sequence[bool] = ()  # of each layer: whether a token of a block sees only itself and those before it
    own_embedding: bool = False  # of the target's tokens; otherwise it gets the target's
    own_output: bool = True  # otherwise it uses the target's output layer
    markov: MarkovKind | None = None  # of DSpark; None: entries don't depend on each other
    markov_rank: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None  # bounds logits

    @property
    def length(self) -> int:
        """The number of tokens that a block drafts."""
        return self.block_size if self.anchor_drafts else self.block_size - 1

    def entries(self, length: int) -> int:
        """Return how many tokens of a block draft so many."""
        return length if self.anchor_drafts else length + 1


class DFlashHead(nn.Module):
    """Drafts blocks. Parameters have the names of the format `speculators`.

    B rows, T tokens, A anchors of each row, S tokens of a block, F numbers of a token's hidden states.
    """

    d2t: Tensor  # [W] int64: output i is the target's token i + d2t[i]

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        layers = config.layers
        layers._attn_implementation = NAME  # plain attention where there are no pages, as in training
        size = layers.hidden_size
        self.config = config
        self.fc = nn.Linear(config.feature_size, size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(size, eps=layers.rms_norm_eps)
        self.embed_tokens = nn.Embedding(layers.vocab_size, size) if config.own_embedding else None
        self.layers = nn.ModuleList(Qwen3DecoderLayer(layers, index) for index in range(layers.num_hidden_layers))
        self.norm = Qwen3RMSNorm(size, eps=layers.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.outputs, bias=False) if config.own_output else None
        self.markov_head: MarkovHead | None = None
        if config.markov is not None:
            sizes = {"vocab_size": layers.vocab_size, "outputs": config.outputs, "hidden_size": size}
            self.markov_head = MarkovHead(config.markov, config.markov_rank, **sizes)
        self.rotary_emb = Qwen3RotaryEmbedding(layers)
        self.context_projection: nn.Module | None = None
        self._shared: tuple[nn.Module, ...] = ()  # a tuple, since the target's layer is no part of the head
        self.register_buffer("d2t", torch.zeros(config.outputs, dtype=torch.int64))

    def blocks(self, anchor_tokens: Tensor) -> Tensor:
        """Return the tokens of blocks, [..., S], from those of their anchors, [...]."""
        blocks = anchor_tokens.new_full((*anchor_tokens.shape, self.config.block_size), self.config.mask_token_id)
        blocks[..., 0] = anchor_tokens
        return blocks

    def share_output(self, layer: nn.Module) -> None:
        """Use the target's output layer, if the head has none. Call it after all replacements in the target."""
        self._shared = (layer,)

    def join_context(self) -> None:
        """Let all layers' keys and values of the context be one product. The head is then for drafting only."""
        pairs = [(attention.k_proj, attention.v_proj) for attention in self._attentions()]
        self.context_projection = joined_linear([projection for pair in pairs for projection in pair])

    def context_parts(self, context: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's keys and values of the context, without norm or rotation, [1, N, kv_heads, head_dim].

        context: [1, N, H] by `context`.
        """
        attentions = self._attentions()
        assert self.context_projection is not None
        parts = self.context_projection(context).chunk(2 * len(attentions), dim=-1)
        states = [part.unflatten(-1, (-1, attentions[0].head_dim)) for part in parts]
        return list(zip(states[::2], states[1::2], strict=True))

    def context(self, states: Tensor) -> Tensor:
        """Return what the layers take keys and values from, [..., H]. states: [..., F] the target's."""
        context: Tensor = self.hidden_norm(self.fc(states))
        return context

    def forward(self, states: Tensor, embeddings: Tensor, anchors: Tensor) -> Tensor:
        """Return what `logits` takes, [B, A, S, H].

        In training, blocks start at many anchors of a text. To draft, a row's only anchor is the position T.

        states: [B, T, F] the target's hidden states after each token.
        embeddings: [B, A, S, H] of the tokens that `blocks` returns.
        anchors: [B, A] int64, the position of each anchor. Its block sees the T tokens before that only.
        """
        rows, blocks, size, _ = embeddings.shape
        count = states.shape[1]
        context = self.context(states)
        before = torch.arange(count, device=anchors.device).expand(rows, count)
        inside = anchors[..., None] + torch.arange(size, device=anchors.device)  # [B, A, S]
        rotary = self.rotary_emb(context, position_ids=before)
        hidden = self.config.embedding_scale * embeddings.flatten(1, 2)
        own_rotary = self.rotary_emb(hidden, position_ids=inside.flatten(1))
        masks: dict[tuple[int | None, bool], Tensor] = {}
        for index, layer in enumerate(self.layers):
            kind = layer_window(layer), self.is_causal(index)
            if kind not in masks:
                masks[kind] = _unseen(anchors, size, count, *kind).to(hidden.dtype)
            before_block = _Before(keys_values(layer, context, rotary))
            hidden = layer(
                hidden, attention_mask=masks[kind], position_embeddings=own_rotary, past_key_values=before_block
            )
        normed: Tensor = self.norm(hidden)
        return normed.view(rows, blocks, size, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., W] float logits, without what `markov_head` adds. hidden: [..., H] by `forward`."""
        return self.bounded(self.raw_logits(hidden))

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """Return [..., W] float, to which `markov_head` adds before `bounded` makes logits of them."""
        output = self._shared[0] if self.lm_head is None else self.lm_head
        logits: Tensor = output(hidden)
        return logits.float()

    def bounded(self, logits: Tensor) -> Tensor:
        """Return scaled logits, [..., W], bounded if the configuration says so."""
        scale, softcap = self.config.logit_scale, self.config.softcap
        if scale != 1.0:
            logits = logits * scale
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits

    def is_causal(self, index: int) -> bool:
        """Whether the tokens of a block see only those before them in a layer."""
        return bool(self.config.causal) and self.config.causal[index]

    @property
    def has_two_sided_windows(self) -> bool:
        """Whether a layer's tokens see so many positions before and after them."""
        return any(layer_window(layer) and not self.is_causal(index) for index, layer in enumerate(self.layers))

    def token_ids(self) -> Tensor:
        """Return the tokens that it can draft, [W] int64, rising."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @property
    def column_numbers(self) -> int:
        """How many numbers pages keep for a token."""
        layers = self.config.layers
        return 2 * (layers.num_key_value_heads or layers.num_attention_heads) * layers.head_dim * len(self.layers)

    def _attentions(self) -> list[Any]:
        layers: list[Any] = list(self.layers)
        return [layer.self_attn for layer in layers]


def layer_window(layer: nn.Module) -> int | None:
    """Return how many positions a layer's tokens see, their own included; None: all."""
    attention: Any = layer.self_attn
    window: int | None = attention.sliding_window
    return window


def keys_values(layer: nn.Module, context: Tensor, rotary: KeysValues) -> KeysValues:
    """Return a layer's keys and values of the context, each [B, kv_heads, T, head_dim].

    context: [B, T, H]. rotary: cosines and sines, each [B, T, head_dim].
    """
    attention: Any = layer.self_attn
    keys, values = (
        projection(context).unflatten(-1, (-1, attention.head_dim))
        for projection in (attention.k_proj, attention.v_proj)
    )
    keys = attention.k_norm(keys).transpose(1, 2)
    rotated: Tensor = apply_rotary_pos_emb(keys, keys, *rotary)[1]
    return rotated, values.transpose(1, 2)


class _Before:
    """Takes the place of a layer's cache: puts the context before the keys and values of blocks."""

    def __init__(self, context: KeysValues) -> None:
        self._context = context

    def update(self, keys: Tensor, values: Tensor, layer: int) -> KeysValues:
        before_keys, before_values = self._context
        return torch.cat([before_keys, keys], dim=2), torch.cat([before_values, values], dim=2)


def _unseen(anchors: Tensor, size: int, count: int, window: int | None, causal: bool) -> Tensor:
    """Return what is added to scores, [B, 1, A · S, T + A · S]: 0, or a number that hides a key.

    anchors: [B, A] positions. size: of a block, S. count: tokens of the context, T.
    """
    offsets = torch.arange(size, device=anchors.device)
    blocks = anchors.shape[1]
    block_of = torch.arange(blocks, device=anchors.device).repeat_interleave(size)  # [A · S]
    positions = (anchors[..., None] + offsets).flatten(1)  # [B, A · S]
    before = torch.arange(count, device=anchors.device).expand(len(anchors), count)
    columns = torch.cat([before, positions], dim=1)[:, None]  # [B, 1, T + A · S]
    same = (block_of[:, None] == block_of).expand(len(anchors), -1, -1)
    earlier = before[:, None] < anchors.repeat_interleave(size, dim=1)[..., None]
    seen = torch.cat([earlier, same], dim=2)  # [B, A · S, T + A · S]
    distance = positions[..., None] - columns
    if causal:
        seen = seen & (distance >= 0)
    if window is not None:
        seen = seen & (distance.abs() < window)
    hidden = torch.zeros(seen.shape, device=anchors.device).masked_fill(~seen, torch.finfo(torch.bfloat16).min)
    return hidden[:, None]
