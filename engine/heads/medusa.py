"""Medusa heads: several small networks on the last hidden state, one for each of the next tokens but one.

Cai et al., arXiv 2401.10774, section 2.1. They are stored in three layouts: versions 1 and 2 of the paper's code, and
vLLM's. The heads are counted in the weights, because configurations often name another number.
"""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from decoding.drafts.choices import DraftChoice
from decoding.sampling.transfer import tensor_on
from engine.heads.checkpoint import HeadsCheckpoint
from engine.heads.proposer import DraftStart, HeadProposer, HeadSampler, Reading
from engine.heads.spec import HeadsKind
from engine.model.hidden_states import HiddenStates
from engine.model.runner import Runner

# Names of the weights of a head's layers, and of its outputs.
_OWN = "{head}.{layer}.linear.weight", "{head}.{layers}.weight"
_VLLM = "blocks.{head}.layers.{layer}.weight", "lm_heads.{head}.weight"


class MedusaHeads(nn.Module):
    """K heads of L layers each: x + SiLU(W x + b), then an output layer of their own or the target's.

    Head i predicts token t + 2 + i from the hidden state after token t. New heads pass the hidden state on unchanged.
    """

    token_map: Tensor | None  # [W] int64, the target's token of each of a head's own outputs

    def __init__(
        self,
        heads: int,
        layers: int,
        hidden_size: int,
        *,
        outputs: int | None = None,
        token_map: Tensor | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """
        outputs: of each head's own output layer, W; None: the target's output layer is shared (Medusa's version 2).
        token_map: [W] target tokens of these outputs; None: all tokens, in order.
        vocab_size: the target's, V; needed with `token_map` only.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, layers, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(heads, layers, hidden_size))
        self.output = None if outputs is None else nn.Parameter(torch.zeros(heads, outputs, hidden_size))
        self.register_buffer("token_map", token_map, persistent=False)
        self._vocab_size = vocab_size

    @property
    def count(self) -> int:
        """The number of heads, K."""
        return self.weight.shape[0]

    def forward(self, hidden: Tensor, output_layer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return [K, N, V] float logits, all heads in one product. hidden: [N, H]. output_layer: the target's."""
        states = hidden.expand(self.count, *hidden.shape)  # [K, N, H]
        for layer in range(self.weight.shape[1]):
            product = torch.baddbmm(self.bias[:, layer, None], states, self.weight[:, layer].mT)
            states = states + silu(product)
        if self.output is None:
            logits: Tensor = output_layer(states.flatten(0, 1)).view(self.count, len(hidden), -1)
            return logits.float()
        logits = torch.bmm(states, self.output.mT).float()  # [K, N, W]
        if self.token_map is None:
            return logits
        assert self._vocab_size is not None
        every = logits.new_full((*logits.shape[:-1], self._vocab_size), -torch.inf)
        return every.index_copy(-1, self.token_map, logits)


def read_medusa(checkpoint: HeadsCheckpoint, *, hidden_size: int, vocab_size: int) -> MedusaHeads:
    """Return the heads. hidden_size, vocab_size: the target's.

    Raises ConfigError if a tensor is missing, surplus, or of another size.
    """
    is_vllm = bool(_find(_VLLM[0], checkpoint))
    weight_name, output_name = _VLLM if is_vllm else _OWN
    matches = _find(weight_name, checkpoint)
    if not matches:
        raise checkpoint.error("has no Medusa heads: neither 0.0.linear.weight nor blocks.0.layers.0.weight")
    heads, layers = (1 + max(int(match[group]) for match in matches) for group in (1, 2))
    weights = [weight_name.format(head=head, layer=layer) for head in range(heads) for layer in range(layers)]
    biases = [name.removesuffix("weight") + "bias" for name in weights]
    outputs = [output_name.format(head=head, layers=layers) for head in range(heads)]
    if biases[0] not in checkpoint.tensors:
        biases = []
    if not is_vllm and outputs[0] not in checkpoint.tensors:
        outputs = []
    checkpoint.check_names([*weights, *biases, *outputs], ignored={"token_map"} if is_vllm else ())
    token_map = checkpoint.tensors.get("token_map")
    if token_map is not None:
        token_map = token_map.long()
        if not 0 <= int(token_map.min()) <= int(token_map.max()) < vocab_size:
            raise checkpoint.error(f"token_map names tokens outside the target's vocabulary of {vocab_size}")
    width = vocab_size if token_map is None else len(token_map)
    module = MedusaHeads(
        *(heads, layers, hidden_size), outputs=width if outputs else None, token_map=token_map, vocab_size=vocab_size
    )
    module.weight.data = _stack(checkpoint, weights, hidden_size, hidden_size).unflatten(0, (heads, layers))
    if biases:
        module.bias.data = _stack(checkpoint, biases, hidden_size).unflatten(0, (heads, layers))
    if module.output is not None:
        module.output.data = _stack(checkpoint, outputs, width, hidden_size)
    return module


def _find(weight_name: str, checkpoint: HeadsCheckpoint) -> list[re.Match[str]]:
    """Return which weights of layers there are: the numbers of their heads and layers."""
    pattern = weight_name.replace(".", r"\.").format(head=r"(\d+)", layer=r"(\d+)")
    return [match for name in checkpoint.tensors if (match := re.fullmatch(pattern, name))]


def _stack(checkpoint: HeadsCheckpoint, names: list[str], *shape: int) -> Tensor:
    return torch.stack([checkpoint.check_shape(name, *shape) for name in names])


class MedusaProposer(HeadProposer):
    """All heads see the same state, so any candidate may follow any."""

    kind: HeadsKind = "medusa"

    def __init__(self, heads: MedusaHeads, runner: Runner, *, tree: Sequence[Sequence[int]] | None = None) -> None:
        """runner: the target's, which keeps hidden states. tree: as in `HeadProposer`."""
        self.tree = tree
        self.length = heads.count
        self._heads, self._device = heads, heads.weight.device
        output_layer = runner.model.get_output_embeddings()
        assert output_layer is not None
        self._output_layer = output_layer
        self._states = torch.zeros(
            runner.cache.slots, heads.weight.shape[-1], dtype=heads.weight.dtype, device=self._device
        )

    @torch.inference_mode()
    def read(self, readings: Sequence[Reading], hidden: HiddenStates) -> None:
        """Keep the hidden state after each text's last token that was run."""
        pairs = [(reading.slot, reading.last_row) for reading in readings if reading.last_row is not None]
        if pairs:
            slots, rows = tensor_on(self._device, pairs, torch.int64).unbind(1)
            self._states[slots] = hidden.last[rows].to(self._states)

    @torch.inference_mode()
    def propose(self, starts: Sequence[DraftStart], length: int, ranks: int) -> list[list[DraftChoice]]:
        """Return what the heads expect after the token that follows the last one that was run."""
        sampler = HeadSampler(starts, length, ranks, self._device)
        sampler.choose_steps(self.logits(starts)[:length])
        return sampler.choices()

    def logits(self, starts: Sequence[DraftStart]) -> Tensor:
        """Return the heads' logits for some texts, [K, B, V]."""
        slots = tensor_on(self._device, [start.slot for start in starts], torch.int64)
        logits: Tensor = self._heads(self._states[slots], self._output_layer)
        return logits
