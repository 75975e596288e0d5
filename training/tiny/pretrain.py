"""Next-token training for a given time: Muon for matrices, AdamW for the rest, a learning rate by elapsed time."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Muon, Optimizer
from transformers import LlamaForCausalLM

from training.tiny.stream import Stream

WARM_UP_SHARE = 0.02
DECAY_SHARE = 0.35
FINAL_SCALE = 0.02
TOKENS_PER_STEP = 4096
LENGTHS = ((0.55, 256), (0.9, 512), (1.0, 1024))
SAVE_EVERY_STEPS = 250
_HELD_OUT_LENGTH = 512  # tokens of a row


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


def pretrain(
    model: LlamaForCausalLM,
    stream: Stream,
    *,
    minutes: float,
    save: Callable[[], None],
    report: Callable[[str], None],
) -> None:
    """Train until the time is over. Rows grow from 256 to 1024 tokens; `save` is called every few hundred steps."""
    optimizer = TimedOptimizer(model, minutes=minutes, muon_rate=0.008, adam_rate=0.003)
    model.train()
    step = 0
    while optimizer.elapsed < 1.0:
        length = next(length for until, length in LENGTHS if optimizer.elapsed < until)
        loss = cross_entropy(model, stream.rows(TOKENS_PER_STEP // length, length))
        loss.backward()
        optimizer.step()
        step += 1
        if step % 10 == 0:
            report(f"step {step} elapsed {optimizer.elapsed:.3f} rows of {length} loss {loss.item():.4f}")
        if step % SAVE_EVERY_STEPS == 0:
            save()
    save()


def cross_entropy(model: LlamaForCausalLM, rows: Tensor) -> Tensor:
    """Return the mean next-token loss in nats.

    Args:
        rows: int64, (B, T)
    """
    with autocast():
        logits = model(rows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, pieces: Sequence[Sequence[int]]) -> float:
    """Return the mean next-token loss in nats over held-out pieces, packed in rows."""
    flat = torch.tensor([token for piece in pieces for token in piece])
    rows = flat[: len(flat) // _HELD_OUT_LENGTH * _HELD_OUT_LENGTH].view(-1, _HELD_OUT_LENGTH)
    losses = [cross_entropy(model, batch).item() * len(batch) for batch in rows.split(16)]
    return sum(losses) / len(rows)
