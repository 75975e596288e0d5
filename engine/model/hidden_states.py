"""Hidden states of a model's own forward: the input of its output layer, and what chosen layers return.

They stay on the device.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.errors import ConfigError

_DIMENSIONS = 3  # of [1, N, H]


class HiddenStates(NamedTuple):
    """Hidden states of one forward over N tokens. They are valid until the next one."""

    last: Tensor  # [n, H] after the final norm, of the tokens that wanted logits
    layers: Tensor  # [N, k · H] after each of k chosen numbers of layers, of all tokens


class HiddenStateHooks:
    """Reads hidden states while a model runs. The model itself stays as it is."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = ()) -> None:
        """
        layers: after how many layers to read the hidden state; 0: the embeddings.

        Raises:
            ConfigError: the model has fewer layers, or no output layer or list of layers to read from.
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
