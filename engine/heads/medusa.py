"""Medusa heads: several small networks on the last hidden state, one for each of the next tokens but one.

Cai et al., arXiv 2401.10774, section 2.1. Knows nothing of files, rows or caches.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


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
