"""Next-token training for a given time. Must not know which model it trains."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from training.tiny.optimizer import TimedOptimizer, autocast
from training.tiny.stream import Stream

TOKENS_PER_STEP = 4096
LENGTHS = ((0.55, 256), (0.9, 512), (1.0, 1024))
SAVE_EVERY_STEPS = 250
_HELD_OUT_LENGTH = 512  # tokens of a row


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
