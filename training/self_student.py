"""A target that learns to draft for itself: LoRA weights on noise tokens after many anchors of a text at once.

The text runs once without the weights. Then each anchor's noise sees what the target sees there, and itself.
B rows, T tokens, N answer tokens, A anchors of a row, C of a batch, Q noise tokens of a row, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers import DynamicCache, PreTrainedModel

from decoding.errors import ConfigError
from training.dflash_student import choose_starts, place
from training.distillation.lessons import Batch, StudentVocabulary
from training.drafter import counted_logits
from training.finetune import add_lora
from training.head_starts import BETAS, DECAY

_RATE = 0.15  # of AdamW on these weights, in parts of the learning rate, which is Muon's
_ATTENTION = {"full_attention", "sliding_attention"}


class SelfStudent:
    """A `Student` whose first draft token is the teacher's own."""

    def __init__(self, target: PreTrainedModel, *, rank: int, steps: int, longest: int, seed: int) -> None:
        """longest: tokens of a text. Raises ConfigError if the target can't be trained so."""
        if steps < 2:
            raise ConfigError(f"--steps {steps}: the first token of a draft is the target's own; give at least 2")
        config = target.config.get_text_config(decoder=True)
        window = getattr(config, "sliding_window", None) or longest
        if window < longest or not _ATTENTION.issuperset(getattr(config, "layer_types", None) or ()):
            raise ConfigError(
                f"{type(target).__name__} has layers that don't see all of a text; none is trained to draft for itself"
            )
        adapted: Any = add_lora(target, rank, seed=seed)
        self.adapted = adapted
        if adapted.peft_config["default"].target_parameters or any(".experts." in n for n, _ in self._weights()):
            raise ConfigError(f"{type(target).__name__} has experts, which take no adapters in a server")
        self._steps, self._size = steps, int(config.vocab_size)
        self.vocabulary = StudentVocabulary.of_heads(range(self._size), self._size)
        self.module: nn.Module = _Noise(self.adapted, [weight for _, weight in self._weights()])

    def _weights(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, weight) for name, weight in self.adapted.named_parameters() if weight.requires_grad]

    def steps(self, share: float) -> int:
        return self._steps

    def optimizers(self, learning_rate: float) -> list[Optimizer]:
        weights = self.module.parameters()
        return [AdamW(weights, lr=_RATE * learning_rate, betas=BETAS, weight_decay=DECAY, fused=True)]

    def drafts(self, module: nn.Module, batch: Batch, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Drafts start at some of the places after which more tokens follow; which, follows from the batch."""
        starts = choose_starts(batch)
        starts = starts[torch.isin(starts, batch.starts(1))]  # [C]
        if not len(starts):
            return
        anchors, cells = place(batch, starts)
        chosen = [torch.isin(starts, batch.starts(step)) for step in range(steps)]
        generator = torch.Generator().manual_seed(int(batch.tokens.sum()))
        shape = len(anchors), anchors.shape[1] * (steps - 1)
        noise = torch.randint(1, self._size, shape, generator=generator).to(anchors.device)
        yield from zip(
            [starts[each] for each in chosen], module(batch.tokens, anchors, cells, chosen, noise), strict=True
        )


class _Noise(nn.Module):
    """The target over texts and noise. Only the LoRA weights are its own, so that checkpoints have no others."""

    def __init__(self, adapted: Any, weights: Sequence[nn.Parameter]) -> None:
        """adapted: peft's model of the target and the weights."""
        super().__init__()
        self.weights = nn.ParameterList(weights)
        self._adapted = (adapted,)

    def forward(
        self, tokens: Tensor, anchors: Tensor, cells: tuple[Tensor, Tensor], chosen: Sequence[Tensor], noise: Tensor
    ) -> list[Tensor]:
        """Return each step's logits, [n, V], of the drafts that are chosen for it.

        tokens: [B, T]. anchors: [B, A] their positions. cells: the C that count, as rows and columns of `anchors`.
        chosen: for each step which of them, [C] bool. noise: [B, Q] tokens, those of an anchor together.
        """
        (adapted,) = self._adapted
        rows, columns = cells
        count, cache = len(chosen) - 1, DynamicCache()
        is_anchor = torch.zeros_like(tokens, dtype=torch.bool)
        is_anchor[rows, anchors[cells]] = True
        with torch.no_grad(), adapted.disable_adapter():
            own = counted_logits(adapted, tokens, is_anchor, past_key_values=cache, use_cache=True)
        if not count:
            return [own]
        wanted = torch.zeros(*anchors.shape, count, dtype=torch.bool, device=tokens.device)
        for step, each in enumerate(chosen[1:]):
            wanted[rows[each], columns[each], step] = True
        logits = counted_logits(
            adapted,
            noise,
            wanted.flatten(1),
            past_key_values=cache,
            use_cache=True,
            position_ids=(anchors[..., None] + 1 + torch.arange(count, device=tokens.device)).flatten(1),
            attention_mask=_bias(anchors, count, tokens.shape[1], adapted.dtype),
        )
        steps = wanted.nonzero()[:, 2]
        return [own, *(logits[steps == step] for step in range(count))]


def _bias(anchors: Tensor, count: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return what hides from each noise token the text after its anchor, and noise but its own before it.

    anchors: [B, A]. count: noise tokens of each. length: T. Returns [B, 1, Q, T + Q].
    """
    index = torch.arange(anchors.shape[1] * count, device=anchors.device)  # [Q]
    own = (index[:, None] // count == index // count) & (index <= index[:, None])
    text = torch.arange(length, device=anchors.device) <= anchors.repeat_interleave(count, 1)[..., None]
    visible = torch.cat([text, own.expand(len(anchors), -1, -1)], dim=-1)[:, None]
    return torch.zeros(visible.shape, dtype=dtype, device=anchors.device).masked_fill_(~visible, torch.finfo(dtype).min)
