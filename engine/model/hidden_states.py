"""Hidden states of a model's own forward: the input of its output layer, and what chosen layers return.

They stay on the device. `EarlyExit` makes logits of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from engine.layers.onednn_linear import padded_size

_DIMENSIONS = 3  # of [1, N, H]
_FINAL_NORMS = "norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f", "embedding_norm"
_SCALES = "logit_scale", "logits_scaling", "lm_head_multiplier"  # of logits, in configurations


class HiddenStates(NamedTuple):
    """Hidden states of one forward over N tokens. They are valid until the next one."""

    last: Tensor  # [n, H] after the final norm, of the tokens that wanted logits
    layers: Tensor  # [N, k · H] after each of k chosen numbers of layers, of all tokens


class HiddenStateHooks:
    """Reads hidden states while a model runs. The model itself stays as it is."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = ()) -> None:
        """
        layers: after how many layers to read the hidden state; 0: the embeddings.

        Raises ConfigError if the model has fewer layers, or no output layer or list of layers to read from.
        """
        self._output_layer = model.get_output_embeddings()
        if self._output_layer is None:
            raise ConfigError(f"{type(model).__name__} has no output layer, whose input could be read")
        blocks = _blocks(model) if layers else []
        for count in layers:
            if not 0 <= count <= len(blocks):
                raise ConfigError(f"there is no hidden state after {count} layers; the model has {len(blocks)}")
        self._blocks = [blocks[max(count - 1, 0)] for count in layers]
        self._before = [count == 0 for count in layers]

    @contextmanager
    def reading(self) -> Iterator[list[Tensor]]:
        """Within the context a forward over [1, N] tokens fills the list: `HiddenStates` of the whole forward."""
        kept: list[Tensor] = []
        states: list[Tensor | None] = [None] * len(self._blocks)

        def read_last(module: nn.Module, args: tuple[Any, ...]) -> None:
            given = [state for state in states if state is not None]
            hidden: Tensor = args[0]  # [1, n, H]
            layers = torch.cat(given, dim=-1) if given else hidden[..., :0]
            kept[:] = hidden[0], layers[0]

        handles = [self._output_layer.register_forward_pre_hook(read_last)]
        for index, (block, before) in enumerate(zip(self._blocks, self._before, strict=True)):
            handles.append(_read(block, states, index, before=before))
        try:
            yield kept
        finally:
            for handle in handles:
                handle.remove()


class EarlyExit:
    """The model's output after some of its layers: their hidden state through the final norm and the output layer."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        """
        layers: whose hidden states the runner keeps, as for `HiddenStateHooks`.

        Raises ConfigError if the model has no final norm that is known, or scales its logits.
        """
        blocks, config = _blocks(model), model.config.get_text_config()
        owner = next(module for module in model.modules() if any(blocks[0] is each for each in _children(module)))
        norm = next((part for name, part in owner.named_children() if name in _FINAL_NORMS), None)
        output_layer = model.get_output_embeddings()
        if (
            norm is None
            or output_layer is None
            or any(getattr(config, name, None) not in (None, 1) for name in _SCALES)
        ):
            raise ConfigError(f"{type(model).__name__} has no final norm and output layer that can follow a layer")
        self._norm, self._output_layer, self._layers = norm, output_layer, list(layers)
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, layers: Sequence[int], last: Tensor) -> Tensor:
        """Return the logits, [N, V] float32, after the layer whose prediction differs most from the last at a position.

        By the Jensen–Shannon divergence: DoLa, Chuang et al., arXiv 2309.03883, section 2.2.

        hidden: [N, k · H] of `HiddenStates.layers`. layers: to choose from. last: [N, V] the model's own logits.
        """
        states = hidden.unflatten(-1, (len(self._layers), -1))[:, [self._layers.index(each) for each in layers]]
        states, count = states.transpose(0, 1).flatten(0, 1), len(hidden) * len(layers)
        padded = pad(states, (0, 0, 0, padded_size(count) - count))  # a token has the same bits in any number
        logits: Tensor = self._output_layer(self._norm(padded[None]))[0, :count].float()
        if self._cap is not None:
            logits = self._cap * (logits / self._cap).tanh()
        early = logits.unflatten(0, (len(layers), -1))  # [l, N, V]
        own, others = last.log_softmax(dim=-1), early.log_softmax(dim=-1)
        mean = ((own.exp() + others.exp()) / 2).log()
        divergences = (own.exp() * (own - mean) + others.exp() * (others - mean)).nan_to_num(nan=0.0).sum(dim=-1)
        chosen: Tensor = early[divergences.argmax(dim=0), torch.arange(len(last), device=last.device)]
        return chosen


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in a module's lists."""
    return (part for each in module.children() if isinstance(each, nn.ModuleList) for part in each)


def _read(block: nn.Module, states: list[Tensor | None], index: int, *, before: bool) -> Any:
    """Keep what a layer gets or returns, [1, N, H], in `states[index]`. Returns the hook's handle."""

    def read_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[index] = args[0] if args else kwargs["hidden_states"]

    def read_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        state: Tensor = output[0] if isinstance(output, tuple) else output
        if state.dim() != _DIMENSIONS:
            shape = list(state.shape)
            raise ConfigError(f"{type(module).__name__} returns {shape}, not one hidden state for each token")
        states[index] = state

    if before:
        return block.register_forward_pre_hook(read_input, with_kwargs=True)
    return block.register_forward_hook(read_output)


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    count = model.config.get_text_config().num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of its {count} layers")
    return list(lists[0])
