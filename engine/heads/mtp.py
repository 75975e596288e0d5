"""The MTP layer of a target's own checkpoint as a head: one decoder layer of the model's class over the last state.

DeepSeek-V3, arXiv 2412.19437, section 2.2. The layer is the only one of a small model of the target's class, which
transformers loads, so experts that are stored one by one and rotary positions are as in the target.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from decoding.errors import ConfigError
from engine.heads.checkpoint import heads_folder, is_same
from engine.heads.mtp_layout import (
    BLOCK_SCALES,
    EMBEDDING,
    EMBEDDING_NORM,
    FINAL_NORM,
    HIDDEN_NORM,
    LAYER,
    OUTPUT,
    PROJECTION,
    MtpLayout,
    mtp_layout,
    quantized_name,
)
from engine.heads.proposer import ChainHead
from engine.heads.spec import HeadsSpec
from engine.model.attention import use_pages

_FILES = "model*.safetensors", "mtp*.safetensors"
_BLOCK = 128, 128
_NOT_STORED = "rotary_emb.inv_freq"  # in older files
_Module = TypeVar("_Module", bound=nn.Module)
_LOAD_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError)


class MtpHead(ChainHead):
    """Predicts token p + 2 from token p + 1 and the target's last hidden state at token p.

    It uses the target's embedding and output layer unless the checkpoint has others for it.
    """

    kind = "mtp"

    def __init__(
        self, layout: MtpLayout, block: Any, weights: Mapping[str, Mapping[str, Tensor]], vocab_size: int
    ) -> None:
        """
        block: the base model of the layer alone, with the head's final norm.
        weights: of all other parts, by part and name.
        vocab_size: the target's, V.
        """
        super().__init__()
        size = self.hidden_size = self.feature_size = int(block.config.get_text_config().hidden_size)
        self.hidden_first = layout.hidden_first
        self.block = block
        self.embedding_norm, self.hidden_norm = (
            _filled(deepcopy(block.norm), weights[part]) for part in (EMBEDDING_NORM, HIDDEN_NORM)
        )
        with torch.device("meta"):
            projection = nn.Linear(2 * size, size, bias="bias" in weights[PROJECTION])
            embedding, output = nn.Embedding(vocab_size, size), nn.Linear(size, vocab_size, bias=False)
        self.projection = _filled(projection, weights[PROJECTION])
        self.embed_tokens = _filled(embedding, weights[EMBEDDING]) if EMBEDDING in weights else None
        self.output = _filled(output, weights[OUTPUT]) if OUTPUT in weights else None
        self.outputs = vocab_size
        # ERNIE's layer has no final norm: it uses the target's, and reads states before that norm.
        self.reads_normed = FINAL_NORM in weights
        if not self.reads_normed:
            block.norm = nn.Identity()
        self.register_buffer("no_mask", torch.zeros(1, 1, 1, 1), persistent=False)  # models make no mask then
        self._shared: tuple[nn.Module, nn.Module] | None = None  # a tuple, since these are no parts of the head

    def share(self, target: PreTrainedModel) -> None:
        """Use the target's final norm and output layer. Call it after all replacements in the target."""
        decoder, output = target.get_decoder(), target.get_output_embeddings()
        assert output is not None
        self._shared = decoder.norm, self.output or output

    def layer_input(self, states: Tensor) -> Tensor:
        return self._norm(states) if self.reads_normed else states

    def logits(self, hidden: Tensor) -> Tensor:
        assert self._shared is not None
        logits: Tensor = self._shared[1](hidden if self.reads_normed else self._norm(hidden))
        return logits.float()

    def forward(self, hidden: Tensor, embeddings: Tensor, positions: Tensor) -> Tensor:
        parts = [self.embedding_norm(embeddings), self.hidden_norm(hidden)]
        joined = torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1)  # [1, N, 2 H]
        output: Tensor = self.block(
            inputs_embeds=self.projection(joined), position_ids=positions, attention_mask=self.no_mask, use_cache=False
        ).last_hidden_state
        return output

    def _norm(self, states: Tensor) -> Tensor:
        assert self._shared is not None
        normed: Tensor = self._shared[0](states)
        return normed


def read_mtp(spec: HeadsSpec, target: PreTrainedModel) -> MtpHead:
    """Return the first MTP layer of a target's checkpoint as a head, in the target's dtype.

    Raises ConfigError if the checkpoint has no MTP layer that can be read, or its tensors are not those of the layer.
    """
    config = target.config.get_text_config(decoder=True)
    folder, layers = heads_folder(spec, _FILES), int(config.num_hidden_layers)
    try:
        stored = _stored(folder)
        names = [name for file in stored.values() for name in file]
        layout = mtp_layout(names, layers)
        if layout is None:
            raise _error(spec, "has no MTP layers under known names")
        if (name := quantized_name(layout, names, layers)) is not None:
            raise _error(spec, f"stores its MTP layers quantised ({name}); only plain ones and FP8 in blocks are read")
        block_size = _block_of(folder)
        weights = {part: _plain(each, block_size) for part, each in _read(layout, stored, layers).items()}
        for part, shared in ((EMBEDDING, target.get_input_embeddings()), (OUTPUT, target.get_output_embeddings())):
            if part in weights and is_same(weights[part]["weight"], shared):
                del weights[part]
        block = _load_block(spec, target, weights)
        return MtpHead(layout, block, weights, int(config.vocab_size))
    except _LOAD_ERRORS as error:
        raise _error(spec, f"has MTP layers that can't be loaded: {error}") from error


def _stored(folder: Path) -> dict[Path, list[str]]:
    """Return the names of the tensors in each file."""
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    names: dict[Path, list[str]] = {}
    for file in {*files, *folder.glob("mtp*.safetensors")}:  # some checkpoints have it in a file of its own
        with safe_open(file, framework="pt") as tensors:
            names[file] = list(tensors.keys())
    return names


def _read(layout: MtpLayout, stored: Mapping[Path, Sequence[str]], layers: int) -> dict[str, dict[str, Tensor]]:
    """Return the module's tensors by part and name in it."""
    weights: dict[str, dict[str, Tensor]] = {}
    for file, names in stored.items():
        with safe_open(file, framework="pt") as tensors:
            for name in names:
                own = layout.part(name, layers)
                if own is not None and not name.endswith(_NOT_STORED):
                    weights.setdefault(own[0], {})[own[1]] = tensors.get_tensor(name)
    return weights


def _plain(weights: Mapping[str, Tensor], block: Sequence[int]) -> dict[str, Tensor]:
    """Multiply FP8 weights by their scales, one for each block of rows and columns. Other tensors stay."""
    plain = {}
    for name, tensor in weights.items():
        scale = weights.get(name + BLOCK_SCALES)
        if scale is not None:
            wide = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            tensor = tensor.float() * wide[: tensor.shape[0], : tensor.shape[1]]  # the last blocks may be smaller
        if not name.endswith(BLOCK_SCALES):
            plain[name] = tensor
    return plain


def _block_of(folder: Path) -> Sequence[int]:
    """Return the rows and columns of a block of FP8 weights."""
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config") or {}
    block: Sequence[int] = settings.get("weight_block_size") or _BLOCK
    return block


def _load_block(spec: HeadsSpec, target: PreTrainedModel, weights: Mapping[str, Mapping[str, Tensor]]) -> Any:
    """Return the base model of the target's class with the module's layer as its only one."""
    config = _one_layer(target.config.get_text_config(decoder=True), sparse=any("experts" in n for n in weights[LAYER]))
    base = target.base_model_prefix
    states = {f"{base}.layers.0.{name}": tensor for name, tensor in weights[LAYER].items()}
    norm = weights.get(FINAL_NORM, {"weight": torch.ones(config.hidden_size)})
    states |= {f"{base}.norm.{name}": tensor for name, tensor in norm.items()}
    unused = torch.zeros(1, config.hidden_size)
    states |= {f"{base}.embed_tokens.weight": unused, "lm_head.weight": unused}
    loader: Any = type(target)
    model, info = loader.from_pretrained(
        None, config=config, state_dict=states, dtype=target.dtype, output_loading_info=True
    )
    for kind, problem in (("missing_keys", "lack"), ("unexpected_keys", "should not have")):
        names = sorted(name.removeprefix(f"{base}.layers.0.") for name in info[kind] if name != "lm_head.weight")
        if names:
            raise _error(spec, f"has MTP layers that {problem} {', '.join(names[:4])}{', …' if len(names) > 4 else ''}")
    use_pages(model)
    block = getattr(model, base)
    block.embed_tokens = None
    return block


def _one_layer(config: PretrainedConfig, *, sparse: bool) -> PretrainedConfig:
    """Return the configuration of a model with one layer of attention. sparse: whether the layer has experts."""
    config = deepcopy(config)
    config.quantization_config = None
    changed = {
        "num_hidden_layers": 1,
        "vocab_size": 1,
        "pad_token_id": None,
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
        "first_k_dense_replace": 0 if sparse else 1,
        "moe_layer_start_index": 0 if sparse else 1,
        "moe_layer_end_index": 1,
        "moe_layer_interval": 1,
    }
    for name, value in changed.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return config


def _filled(module: _Module, weights: Mapping[str, Tensor]) -> _Module:
    module.load_state_dict(dict(weights), assign=True)
    return module


def _error(spec: HeadsSpec, problem: str) -> ConfigError:
    return ConfigError(f"{spec.name}: {spec.path!r} {problem}; set `heads: null`")
