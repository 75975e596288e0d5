"""DFlash and DSpark heads in files: the layout of speculators, and the flat one of the authors and SpecForge."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import Qwen3Config

from engine.heads.checkpoint import HeadsCheckpoint, drafted_tokens, speculators_config
from engine.heads.dflash import DFlashConfig, DFlashHead
from engine.heads.markov import MarkovKind

_SLIDING = "sliding_attention"
_BLOCK = 16  # of the authors' configurations without `block_size`
_HEAD_DIM = 128  # of Qwen 3's configurations without `head_dim`
_MARKOV_RANK = 256  # of speculators' DSpark configurations without `markov_rank`
_UNSUPPORTED = ("selector_rank", "conv_kernel_size", "attention_sink_bias", "add_swa_attention_sink_bias")
# Measured rates take the place of a DSpark head's confidence.
_CONFIDENCE = ("confidence_head.proj", "confidence_proj")
_IGNORED = {"t2d", *(f"{layer}.{kind}" for layer in _CONFIDENCE for kind in ("weight", "bias"))}
_MARKOV = ("markov_w1.", "markov_w2.", "gate_proj.", "joint_proj.")  # of ModelOpt's files, which don't nest them
_OUTPUTS = {"lm_head.weight", "markov_head.markov_w2.weight"}  # with a row for each token that can be drafted


def read_dflash(checkpoint: HeadsCheckpoint, *, hidden_size: int, vocab_size: int) -> DFlashHead:
    """Return the head. hidden_size, vocab_size: the target's.

    Raises ConfigError if a tensor is missing, surplus or of another size, or the configuration asks for what can't run.
    """
    tensors = {_own_name(name.removeprefix("model.")): tensor for name, tensor in checkpoint.tensors.items()}
    checkpoint = checkpoint._replace(tensors=tensors)
    config = dflash_config(checkpoint, hidden_size=hidden_size, vocab_size=vocab_size)
    with torch.device("meta"):
        head = DFlashHead(config)
    checkpoint.fill(head, vocab_size, outputs=_OUTPUTS, ignored=_IGNORED)
    head.rotary_emb = type(head.rotary_emb)(config.layers)  # its buffers are not stored
    return head


def dflash_config(checkpoint: HeadsCheckpoint, *, hidden_size: int, vocab_size: int) -> DFlashConfig:
    """Return what config.json says. hidden_size, vocab_size: the target's. Raises ConfigError as `read_dflash`."""
    config, tensors = checkpoint.config, checkpoint.tensors
    if not config:
        raise checkpoint.error("has no config.json")
    stated = _stated(config)
    for key in _UNSUPPORTED:
        if stated.get(key):
            raise checkpoint.error(f"config.json has {key}, which can't run; use a head without it")
    layers = _layers(checkpoint, stated, vocab_size)
    count = len(layer_ids(checkpoint))
    target_size = int(stated.get("target_hidden_size") or hidden_size)
    if target_size != hidden_size:
        raise checkpoint.error(f"is for targets with {target_size} hidden features, but this one has {hidden_size}")
    own_output, own_embedding = "lm_head.weight" in tensors, "embed_tokens.weight" in tensors
    if layers.hidden_size != hidden_size and not (own_output and own_embedding):
        raise checkpoint.error("lacks embed_tokens.weight or lm_head.weight, and its hidden size is not the target's")
    mask = stated.get("mask_token_id")
    if mask is None or not 0 <= int(mask) < vocab_size:
        raise checkpoint.error(f"mask_token_id in config.json is {mask}; it has to be a token of the target")
    block_size = int(stated.get("block_size") or _BLOCK)
    if block_size < 2:
        raise checkpoint.error(f"block_size in config.json is {block_size}; a block has two tokens or more")
    softcap = stated.get("final_logit_softcapping")
    is_dspark = _is_dspark(stated)
    markov, rank = _markov(
        checkpoint, stated, _MARKOV_RANK if "transformer_layer_config" in config and is_dspark else 0
    )
    return DFlashConfig(
        layers=layers,
        feature_size=count * hidden_size,
        outputs=len(tensors["lm_head.weight"]) if own_output else vocab_size,
        block_size=block_size,
        mask_token_id=int(mask),
        anchor_drafts=bool(stated.get("sample_from_anchor", is_dspark or stated.get("shift_label"))),
        markov=markov,
        markov_rank=rank,
        causal=_causal(stated, layers),
        own_embedding=own_embedding,
        own_output=own_output,
        embedding_scale=float(stated.get("input_embedding_scale") or 1.0),
        logit_scale=float(stated.get("output_multiplier") or stated.get("logit_scale") or 1.0),
        softcap=float(softcap) if softcap else None,
    )


def layer_ids(checkpoint: HeadsCheckpoint) -> tuple[int, ...]:
    """Return after how many of the target's layers its hidden states are read.

    In speculators' format the ids are such numbers. In flat ones they are indices of layers, whose output is read.

    Raises ConfigError if config.json names none.
    """
    stated = _stated(checkpoint.config)
    speculators = "transformer_layer_config" in checkpoint.config
    ids: Sequence[int] | None = stated.get("aux_hidden_state_layer_ids" if speculators else "target_layer_ids")
    if not ids:
        raise checkpoint.error("config.json does not say which hidden states are read (target_layer_ids)")
    return tuple(int(number) + (0 if speculators else 1) for number in ids)


def stored_dflash(head: DFlashHead, layers: Sequence[int], target: str) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return a head's tensors and config.json in the format of speculators.

    layers: after how many of the target's layers its states are read. target: its path or Hub id.
    """
    config = head.config
    tensors, size = dict(head.state_dict()), config.layers.vocab_size
    if config.outputs == size:
        del tensors["d2t"]
    else:
        tensors["t2d"] = drafted_tokens(head.token_ids(), size)
    kind = ("dflash", "DFlash") if config.markov is None else ("dspark", "DSpark")
    markov = {"markov_rank": config.markov_rank, "markov_head_type": config.markov, "enable_confidence_head": False}
    return tensors, {
        **speculators_config(*kind, config.length, config.layers, target),
        "draft_vocab_size": config.outputs,
        "target_hidden_size": config.feature_size // len(layers),
        "aux_hidden_state_layer_ids": list(layers),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.anchor_drafts,
        "sliding_window_non_causal": head.has_two_sided_windows,
        **({} if config.markov is None else markov),
    }


def _own_name(name: str) -> str:
    return f"markov_head.{name}" if name.startswith(_MARKOV) else name


def _is_dspark(stated: Mapping[str, Any]) -> bool:
    """Whether it is a DSpark head, whose anchor drafts, too: by its name, or by what only these have."""
    names = [stated.get(key) for key in ("speculators_model_type", "architectures", "projector_type")]
    return "dspark" in str(names).lower() or bool(stated.get("markov_rank"))


def _stated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of the head, of which flat configurations keep some in `dflash_config`."""
    return {**config, **(config.get("dflash_config") or {})}


def _layers(checkpoint: HeadsCheckpoint, stated: Mapping[str, Any], vocab_size: int) -> Qwen3Config:
    parameters = dict(stated.get("transformer_layer_config") or stated)
    size = int(parameters.get("vocab_size", vocab_size))
    if size != vocab_size:
        raise checkpoint.error(f"is for targets with {size} tokens, but this one has {vocab_size}")
    if parameters.get("model_type", "qwen3") != "qwen3" and not parameters.get("head_dim"):
        parameters["head_dim"] = parameters["hidden_size"] // parameters["num_attention_heads"]
    window = stated.get("swa_window_size") or parameters.get("sliding_window")
    if stated.get("use_swa") and _SLIDING not in (parameters.get("layer_types") or ()):
        parameters["layer_types"] = [_SLIDING] * int(parameters["num_hidden_layers"])
    kinds = parameters.get("layer_types")  # without them they follow from `max_window_layers`
    slides = _SLIDING in kinds if kinds else bool(parameters.get("use_sliding_window") and window)
    parameters["use_sliding_window"] = slides
    if parameters["use_sliding_window"] and not window:
        raise checkpoint.error("config.json has layers of sliding attention but no sliding_window")
    parameters |= {"sliding_window": window, "model_type": "qwen3"}
    return Qwen3Config.from_dict(parameters | {"vocab_size": vocab_size})


def _markov(checkpoint: HeadsCheckpoint, stated: Mapping[str, Any], default_rank: int) -> tuple[MarkovKind | None, int]:
    """Return the kind and rank of a DSpark head's sequential part; None: it has none."""
    rank, kind = int(stated.get("markov_rank", default_rank) or 0), stated.get("markov_head_type", "vanilla")
    if rank and kind not in get_args(MarkovKind):
        raise checkpoint.error(f"markov_head_type in config.json is {kind!r}, not {', '.join(get_args(MarkovKind))}")
    return (kind if rank else None), rank


def _causal(stated: Mapping[str, Any], layers: Qwen3Config) -> list[bool]:
    """Return for each layer whether a block is seen causally: where a key says so, or else in sliding layers."""
    given = stated.get("is_causal")
    given = stated.get("causal") if given is None else given
    if given is None and stated.get("sliding_window_non_causal"):
        given = False
    kinds = layers.layer_types or ["full_attention"] * layers.num_hidden_layers
    return [kind == _SLIDING if given is None else bool(given) for kind in kinds]
