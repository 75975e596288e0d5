"""Muon for matrices, AdamW for other parameters, and a learning rate that depends on elapsed time.

Must not know about losses or data.
"""

import time

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

WARM_UP_SHARE = 0.02
DECAY_SHARE = 0.35
FINAL_SCALE = 0.02


class TimedOptimizer:
    """Optimizers whose learning rate warms up, stays constant, then decays linearly over the given minutes."""

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
        """Share of the minutes that has passed; above 1 after the end."""
        return (time.monotonic() - self._start) / self._seconds

    def step(self) -> None:
        """Apply the gradients at the current learning rate, and clear them."""
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        scale = min(self.elapsed / WARM_UP_SHARE, 1.0, (1.0 - self.elapsed) / DECAY_SHARE)
        for optimizer, rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * max(scale, FINAL_SCALE)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def autocast() -> torch.autocast:
    """Return a context for forward passes in bfloat16 over float32 weights."""
    return torch.autocast("cpu", dtype=torch.bfloat16)
