"""Muon for the matrices, AdamW for the rest, and a learning rate that follows the clock.

Must not know what is being learned.
"""

import time

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

WARM_UP_SHARE = 0.02
DECAY_SHARE = 0.35
FINAL_SCALE = 0.02


class TimedOptimizer:
    """Steps until its minutes are over: warm-up, constant, then linear decay, by elapsed time."""

    def __init__(self, model: nn.Module, *, minutes: float, muon_rate: float, adam_rate: float) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        muon = Muon(matrices, lr=muon_rate, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
        adam = AdamW(others, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._optimizers: list[tuple[Optimizer, float]] = [(muon, muon_rate), (adam, adam_rate)]
        self._parameters = list(model.parameters())
        self._seconds = 60 * minutes
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Share of the time that is over, 0 to 1 and beyond."""
        return (time.monotonic() - self._start) / self._seconds

    def step(self) -> None:
        """Apply the gradients at the rate that the clock asks for, and clear them."""
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        scale = min(self.elapsed / WARM_UP_SHARE, 1.0, (1.0 - self.elapsed) / DECAY_SHARE)
        for optimizer, rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * max(scale, FINAL_SCALE)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def autocast() -> torch.autocast:
    """Forward passes in bfloat16 over float32 weights."""
    return torch.autocast("cpu", dtype=torch.bfloat16)
