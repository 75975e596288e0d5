"""Distillation of a drafter from its target, mostly on the target's own texts.

The target's own texts: Kim & Rush 2016, "Sequence-Level Knowledge Distillation". Forward divergence for drafters:
Zhou et al. 2023, "DistillSpec". Must not know how a drafter is used.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from training.optimizer import TimedOptimizer, autocast
from training.stream import Stream
from training.target_texts import OwnTexts, Rows

CORPUS_EVERY_STEPS = 4
CORPUS_LENGTH = 1024
CORPUS_WEIGHT = 0.25
OWN_ROWS = 16
FIRST_BATCHES = 6
ARGMAX_WEIGHT = 0.5
SAVE_EVERY_STEPS = 400


def distill(
    drafter: LlamaForCausalLM,
    target: LlamaForCausalLM,
    stream: Stream,
    own: OwnTexts,
    *,
    minutes: float,
    save: Callable[[], None],
    report: Callable[[str], None],
) -> None:
    """Train the drafter on the target's distribution until the time is over."""
    for _ in range(FIRST_BATCHES):
        own.grow(wait=True)
    report("first texts written")
    optimizer = TimedOptimizer(drafter, minutes=minutes, muon_rate=0.006, adam_rate=0.002)
    target.eval()
    drafter.train()
    step = 0
    while optimizer.elapsed < 1.0:
        loss, agreement = own_loss(drafter, own.rows(OWN_ROWS))
        loss.backward()
        if step % CORPUS_EVERY_STEPS == 0:
            (CORPUS_WEIGHT * divergence(drafter, target, stream.rows(1, CORPUS_LENGTH))).backward()
        optimizer.step()
        own.grow()
        step += 1
        if step % 20 == 0:
            progress = f"step {step} elapsed {optimizer.elapsed:.3f} texts {own.written}"
            report(f"{progress} loss {loss.item():.4f} agreement {agreement:.3f}")
        if step % SAVE_EVERY_STEPS == 0:
            save()
    save()


def own_loss(drafter: LlamaForCausalLM, rows: Rows) -> tuple[Tensor, float]:
    """Return the loss on the target's own texts, and the share of positions with equal argmax.

    The loss is the cross-entropy with the target's best candidates, plus the weighted cross-entropy with its argmax.
    """
    counted = rows.probabilities[..., 0] > 0
    with autocast():
        logits = drafter(rows.tokens[:, :-1], use_cache=False).logits[counted].float()
    candidates, probabilities = rows.choices[counted], rows.probabilities[counted]
    log_student = logits.log_softmax(-1).gather(-1, candidates)
    soft = -(probabilities * log_student).sum(-1).mean()
    agreement = (logits.argmax(-1) == candidates[:, 0]).float().mean().item()
    return soft - ARGMAX_WEIGHT * log_student[:, 0].mean(), agreement


def divergence(drafter: LlamaForCausalLM, target: LlamaForCausalLM, rows: Tensor) -> Tensor:
    """Return KL(target || drafter) over all positions of the rows.

    Args:
        rows: int64, (B, T)
    """
    with autocast():
        with torch.no_grad():
            teacher = target(rows, use_cache=False).logits.flatten(0, 1).float()
        student = drafter(rows, use_cache=False).logits.flatten(0, 1).float()
    return functional.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean")
