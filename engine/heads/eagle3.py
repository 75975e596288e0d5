"""An EAGLE-3 head: one decoder layer over the target's hidden states and the tokens that followed them.

Li et al., arXiv 2503.01840, section 3. The parts are transformers' own. Heads are stored in speculators' layout, or in
the flat one of SafeAI, SpecForge and NVIDIA.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from engine.heads.checkpoint import HeadsCheckpoint
from engine.heads.proposer import ChainHead
from engine.kernels.native import join
from engine.model.attention import NAME

_STATES = 3
_FLAT_LAYER, _LAYER = "midlayer.", "layers.0."
_IDS = "eagle_aux_hidden_state_layer_ids"


class Eagle3Layer(nn.Module):
    """A Llama layer whose queries, keys and values are projected from 2 H numbers: embedding and hidden state."""

    def __init__(self, config: LlamaConfig, *, norm_before_residual: bool = False) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow: nn.Linear = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None))
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden: Tensor, embeddings: Tensor, rotary: tuple[Tensor, Tensor], **attention: Any) -> Tensor:
        """hidden, embeddings: [1, N, H]. rotary: cosines and sines. Returns [1, N, H]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = join(self.input_layernorm(embeddings), normed)  # [1, N, 2 H]
        attention.setdefault("attention_mask", None)
        attended, _ = self.self_attn(both, position_embeddings=rotary, **attention)
        residual = residual + attended
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return output


class Eagle3Head(ChainHead):
    """A head over several hidden states. Parameters have the names of the format `speculators`."""

    kind = "eagle3"
    d2t: Tensor  # [W] int64: output i is the target's token i + d2t[i]

    def __init__(
        self,
        config: LlamaConfig,
        *,
        target_hidden_size: int,
        outputs: int,
        states: int = 3,
        norm_before_residual: bool = False,
        own_embedding: bool = False,
    ) -> None:
        """
        config: of the layer; its `vocab_size` is the target's.
        target_hidden_size, states: the size and number of hidden states that are joined.
        outputs: the number of tokens that it can draft, W.
        own_embedding: whether it has an embedding of the target's tokens; otherwise it gets the target's.
        """
        super().__init__()
        config._attn_implementation = NAME  # plain attention where there are no pages, as in training
        size = config.hidden_size
        self.feature_size = states * target_hidden_size
        self.fc = nn.Linear(self.feature_size, size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if own_embedding else None
        self.layers = nn.ModuleList([Eagle3Layer(config, norm_before_residual=norm_before_residual)])
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(size, outputs, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.vocab_size, self.hidden_size, self.outputs = config.vocab_size, size, outputs
        kv_heads = config.num_key_value_heads or config.num_attention_heads
        head_dim = config.head_dim or size // config.num_attention_heads
        self.column_numbers = 2 * kv_heads * head_dim  # of a token's keys and values
        self.register_buffer("d2t", torch.zeros(outputs, dtype=torch.int64))

    def layer_input(self, states: Tensor) -> Tensor:
        joined: Tensor = self.fc(states)
        return joined

    def forward(self, hidden: Tensor, embeddings: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """As in `ChainHead`. attention: for `attend_to_pages`, or `attention_mask`."""
        rotary = self.rotary_emb(hidden, position_ids=positions)
        output: Tensor = self.layers[0](hidden, embeddings, rotary, **attention)
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden)).float()
        return logits

    def token_ids(self) -> Tensor:
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t


def read_eagle3(checkpoint: HeadsCheckpoint, *, hidden_size: int, vocab_size: int) -> Eagle3Head:
    """Return the head. hidden_size, vocab_size: the target's.

    Raises ConfigError if a tensor is missing, surplus or of another size, or the layer is of another kind than Llama's.
    """
    config = checkpoint.config
    layer_config = _layer_config(checkpoint, vocab_size)
    tensors = {_renamed(name): tensor for name, tensor in checkpoint.tensors.items()}
    checkpoint = checkpoint._replace(tensors=tensors)
    if "lm_head.weight" not in tensors or "fc.weight" not in tensors:
        checkpoint.check_names(["fc.weight", "lm_head.weight"], ignored=tensors)
    stated = int(config.get("target_hidden_size") or hidden_size)
    if stated != hidden_size:
        raise checkpoint.error(f"is for targets with {stated} hidden features, but this one has {hidden_size}")
    outputs = int(config.get("draft_vocab_size") or len(tensors["lm_head.weight"]))
    if outputs < 2:
        raise checkpoint.error(f"can draft {outputs} tokens; a head must know two or more")
    own_embedding = "embed_tokens.weight" in tensors
    if not own_embedding and layer_config.hidden_size != hidden_size:
        raise checkpoint.error("lacks embed_tokens.weight, and its hidden size is not the target's")
    with torch.device("meta"):
        head = Eagle3Head(
            layer_config,
            target_hidden_size=hidden_size,
            outputs=outputs,
            states=_STATES,
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            own_embedding=own_embedding,
        )
    checkpoint.fill(head, vocab_size, outputs={"lm_head.weight"}, ignored={"t2d"})
    head.rotary_emb = type(head.rotary_emb)(layer_config)  # its buffers are not stored
    return head


def stated_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return after how many of the target's layers its hidden states are read.

    In speculators' format the ids are such numbers. In flat ones they are indices of layers, whose output is read.
    Without ids: as in the paper's code.
    """
    speculators = "transformer_layer_config" in config
    nested: Mapping[str, Any] = config.get("eagle_config") or {}
    ids: Sequence[int] | None = config.get(_IDS) or nested.get(_IDS)
    if ids:
        return tuple(int(number) + (0 if speculators else 1) for number in ids)
    return 2, layers // 2, layers - 3


def _layer_config(checkpoint: HeadsCheckpoint, vocab_size: int) -> LlamaConfig:
    config = checkpoint.config
    if not config:
        raise checkpoint.error("has no config.json")
    parameters = dict(config.get("transformer_layer_config") or config)
    kind = parameters.get("model_type", "llama")
    if kind != "llama":
        raise checkpoint.error(f"has a layer of kind {kind!r}; only llama can run")
    stated = int(parameters.get("vocab_size", vocab_size))
    if stated != vocab_size:
        raise checkpoint.error(f"is for targets with {stated} tokens, but this one has {vocab_size}")
    return LlamaConfig.from_dict(parameters | {"num_hidden_layers": 1, "vocab_size": vocab_size})


def _renamed(name: str) -> str:
    name = name.removeprefix("model.")
    return _LAYER + name.removeprefix(_FLAT_LAYER) if name.startswith(_FLAT_LAYER) else name
