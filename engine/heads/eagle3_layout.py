"""The layouts in which EAGLE-3 heads are stored: speculators', and the flat one of SafeAI, SpecForge and NVIDIA."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import LlamaConfig

from engine.heads.checkpoint import HeadsCheckpoint
from engine.heads.eagle3 import Eagle3Head

_STATES = 3
_FLAT_LAYER, _LAYER = "midlayer.", "layers.0."
_IDS = "eagle_aux_hidden_state_layer_ids"


def read_eagle3(checkpoint: HeadsCheckpoint, *, hidden_size: int, vocab_size: int) -> Eagle3Head:
    """Return the head. hidden_size, vocab_size: the target's.

    Raises:
        ConfigError: a tensor is missing, surplus or of another size, or the layer is of another kind than Llama's.
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
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    if "d2t" not in tensors and outputs == vocab_size:
        tensors["d2t"] = torch.zeros(outputs, dtype=torch.int64)
    checkpoint.check_names(shapes, ignored={"t2d"})
    for name, shape in shapes.items():
        checkpoint.check_shape(name, *shape)
    drafted, order = (torch.arange(outputs) + tensors["d2t"].long()).sort()
    if not 0 <= int(drafted[0]) <= int(drafted[-1]) < vocab_size:
        raise checkpoint.error(f"d2t names tokens outside the target's vocabulary of {vocab_size}")
    if not (drafted[1:] > drafted[:-1]).all():
        raise checkpoint.error("d2t names a token twice")
    tensors["d2t"] = drafted - torch.arange(outputs)
    if not torch.equal(order, torch.arange(outputs)):
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    head.load_state_dict({name: tensors[name] for name in shapes}, assign=True)
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
