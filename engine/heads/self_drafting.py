"""Self-drafting: the target drafts by its own forward, with LoRA weights on noise tokens after its text.

Uno, as in vLLM (#55947) and SGLang (#37667). K tokens run: the text's last one as the target would run it, then K - 1
of noise with the weights. After each of them a draft token is chosen. They write where verification writes next.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.drafts.choices import DraftChoice
from decoding.errors import ConfigError
from engine.heads.proposer import DraftStart, HeadProposer, HeadSampler, Reading
from engine.heads.spec import HeadsKind, HeadsSpec
from engine.model.hidden_states import HiddenStates
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner

_LENGTH = 8  # tokens of a draft, as many as published weights are run with
_PERIOD = 4096  # columns after which the noise begins anew


def noise_tokens(mask_token_id: int | None, vocab_size: int) -> list[int]:
    """Return what stands at each column, again and again, [_PERIOD]: Uno's noise, any token but the first, or a mask.

    Raises ValueError if the mask is not one of the tokens.
    """
    if mask_token_id is None:
        noise: list[int] = torch.randint(1, vocab_size, (_PERIOD,), generator=torch.Generator().manual_seed(0)).tolist()
        return noise
    if not 0 <= mask_token_id < vocab_size:
        raise ValueError(f"mask_token_id is {mask_token_id}, not one of its {vocab_size} tokens")
    return [mask_token_id] * _PERIOD


class SelfProposer(HeadProposer):
    """All tokens of a draft are chosen at once, so any candidate may follow any.

    A text with an adapter has it on its last token, and so on the first draft token, but not on the noise.
    """

    kind: HeadsKind = "self"
    length: int = _LENGTH

    def __init__(self, spec: HeadsSpec, mask_token_id: int | None, runner: Runner) -> None:
        """runner: the target's, whose last adapter slot has the weights. mask_token_id: None: they know noise.

        Raises ConfigError if the target can't take drafts of its own back, or has no such token.
        """
        assert runner.lora is not None
        if runner.has_states:
            raise ConfigError(
                f"{spec.name}: the target has layers that carry a state, which can't draft for themselves"
            )
        try:
            self._noise = noise_tokens(mask_token_id, runner.vocab_size)
        except ValueError as error:
            raise ConfigError(f"{spec.name}.path: {spec.path!r}: {error}") from error
        self._runner, self._adapter = runner, runner.lora.slots
        self._anchors = [0] * runner.cache.slots  # the last token of each slot's text, which is not in the cache yet

    def read(self, readings: Sequence[Reading], hidden: HiddenStates) -> None:
        """Note the last tokens: all else of the texts is in the target's pages."""
        for reading in readings:
            if reading.following:
                self._anchors[reading.slot] = reading.following[-1]

    @torch.inference_mode()
    def propose(self, starts: Sequence[DraftStart], length: int, ranks: int) -> list[list[DraftChoice]]:
        """Draft for each text by one forward of the target, whose logits and hidden states it overwrites."""
        chooser = HeadSampler(starts, length, ranks, self._runner.device)
        chooser.choose_steps(self.logits(starts, length).transpose(0, 1))
        return chooser.choices()

    def logits(self, starts: Sequence[DraftStart], length: int) -> Tensor:
        """Return the logits of each text's next `length` tokens, [B, length, V]."""
        rows = []
        for slot, end, _, adapter in starts:
            noise = [self._noise[column % _PERIOD] for column in range(end, end + length - 1)]
            adapters = [adapter, *[self._adapter] * len(noise)]
            rows.append(RowInput(slot, end - 1, [self._anchors[slot], *noise], adapters=adapters))
        return self._runner.logits(rows).view(len(rows), length, -1)
