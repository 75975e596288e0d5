"""Distillation of a drafter from the probabilities of its target, in steps that resume where they were killed.

Must not know where texts come from or how a drafter is used.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from training.files import remove, whole_folder
from training.lessons import Batch, Lessons
from training.losses import LOSSES, LossName, acceptance, student_logprobs, teacher_probabilities
from training.vocabulary import DraftVocabulary

_WARM_UP = 0.03
_LOWEST_RATE = 0.05
_BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationOptions:
    """How a student is trained."""

    loss: LossName = "lk"
    temperature: float = 1.0  # of both models in the loss
    learning_rate: float = 5e-4
    epochs: int = 3
    minutes: float | None = None  # the most, whatever the epochs
    save_every_s: float = 120.0
    report_every_s: float = 15.0
    device: str = "auto"
    bfloat16: bool = True  # autocast


@dataclass(slots=True)
class Progress:
    """How far a distillation has come; part of each checkpoint."""

    step: int = 0
    elapsed_s: float = 0.0

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint holds."""
        return {"step": self.step, "elapsed_s": self.elapsed_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was written."""
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]


@dataclass(slots=True)
class _Sums:
    """What the next line of progress is about."""

    tokens: int = 0
    positions: int = 0
    loss: float = 0.0
    agreement: float = 0.0
    acceptance: float = 0.0
    began_s: float = field(default_factory=time.monotonic)

    def add(self, tokens: int, positions: int, means: tuple[Tensor, Tensor, Tensor]) -> None:
        self.tokens += tokens
        self.positions += positions
        self.loss += positions * means[0].item()
        self.agreement += positions * means[1].item()
        self.acceptance += positions * means[2].item()

    def line(self, progress: Progress, steps: int, share: float) -> str:
        positions = max(self.positions, 1)
        speed = self.tokens / max(time.monotonic() - self.began_s, 1e-9)
        left_s = progress.elapsed_s * (1 - share) / max(share, 1e-9)
        return (
            f"step {progress.step} of {steps}  loss {self.loss / positions:.4f}"
            f"  agreement {self.agreement / positions:.3f}  acceptance {self.acceptance / positions:.3f}"
            f"  {speed:.0f} tokens/s  {left_s / 60:.0f} min left"
        )


def distil(
    student: PreTrainedModel,
    vocabulary: DraftVocabulary,
    lessons: Lessons,
    options: DistillationOptions,
    folder: Path,
    *,
    report: Callable[[str], None],
) -> PreTrainedModel:
    """Train the student, float32, until the epochs or the minutes are over, and return it.

    Checkpoints go to `folder`. A run that was killed goes on after the newest; with epochs alone, on a CPU, it computes
    the same weights to the bit.

    Raises:
        ConfigError: there are no texts, or the loss is no longer a number.
    """
    per_epoch = len(lessons)
    if not per_epoch:
        raise ConfigError("there are no texts to train on")
    steps = options.epochs * per_epoch
    accelerator = Accelerator(cpu=options.device == "cpu", mixed_precision="bf16" if options.bfloat16 else "no")
    parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = AdamW(parameters, lr=options.learning_rate, betas=_BETAS, weight_decay=0.01, fused=True)
    model, optimizer = accelerator.prepare(student.train(), optimizer)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    checkpoints = _Checkpoints(folder, accelerator)
    checkpoints.resume()
    began_s = time.monotonic() - progress.elapsed_s
    saved_s = reported_s = time.monotonic()
    sums, batches, epoch = _Sums(), lessons.epoch(0), 0
    while (share := _share(progress, steps, options.minutes)) < 1.0:
        if progress.step // per_epoch != epoch:
            epoch = progress.step // per_epoch
            batches = lessons.epoch(epoch)
        batch = lessons.batch(batches[progress.step % per_epoch]).to(accelerator.device)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * _rate(share)
        loss, agreement, accepted = batch_loss(model, vocabulary, batch, options)
        if not math.isfinite(loss.item()):
            raise ConfigError(f"the loss is {loss.item()} after {progress.step} steps: try a smaller --learning-rate")
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        now_s = time.monotonic()
        progress.elapsed_s = now_s - began_s
        sums.add(batch.tokens.numel(), len(batch.candidates), (loss, agreement, accepted))
        if now_s - reported_s >= options.report_every_s:
            report(sums.line(progress, steps, _share(progress, steps, options.minutes)))
            sums, reported_s = _Sums(), now_s
        if now_s - saved_s >= options.save_every_s:
            checkpoints.save(progress.step)
            saved_s = now_s
    checkpoints.save(progress.step)
    if sums.positions:
        report(sums.line(progress, steps, 1.0))
    trained: PreTrainedModel = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    accelerator.free_memory()
    return trained.eval()


def batch_loss(
    model: nn.Module, vocabulary: DraftVocabulary, batch: Batch, options: DistillationOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, the share of positions where both argmax agree, and the mean acceptance, each []."""
    logits = vocabulary.draft_logits(_counted_logits(model, batch))
    p = teacher_probabilities(batch.logprobs, options.temperature) * batch.known
    log_q = student_logprobs(logits, batch.candidates, options.temperature)
    loss = LOSSES[options.loss](log_q, p)
    with torch.no_grad():
        agreement = ((logits.argmax(-1) == batch.candidates[:, 0]) & batch.known[:, 0]).float().mean()
        accepted = acceptance(log_q, p).mean()
    return loss, agreement, accepted


def _counted_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits where an answer's token follows, [N, V]. The output layer computes no others."""
    head = getattr(model, "module", model).get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][batch.counted],))
    try:
        logits: Tensor = model(input_ids=batch.tokens, use_cache=False).logits
    finally:
        handle.remove()
    return logits


def _share(progress: Progress, steps: int, minutes: float | None) -> float:
    """Return how much of the training is over; 1 or more: all."""
    timed = 0.0 if minutes is None else progress.elapsed_s / (60 * minutes)
    return max(progress.step / steps, timed)


def _rate(share: float) -> float:
    """Return the part of the learning rate to use: linear warm-up, then cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * max(share - _WARM_UP, 0.0) / (1 - _WARM_UP)))
    return min((share + 1e-3) / _WARM_UP, 1.0) * (_LOWEST_RATE + (1 - _LOWEST_RATE) * cosine)


class _Checkpoints:
    """The newest state of a training, in a folder of its own."""

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        self._folder = folder
        self._accelerator = accelerator

    def resume(self) -> None:
        """Load the newest checkpoint, if there is one."""
        if steps := self._steps():
            self._accelerator.load_state(str(self._folder / f"step-{max(steps)}"))

    def save(self, step: int) -> None:
        """Write a checkpoint, then remove the older ones."""
        older = self._steps()
        if step in older:
            return
        with whole_folder(self._folder / f"step-{step}") as unfinished:
            self._accelerator.save_state(str(unfinished))
        for number in older:
            remove(self._folder / f"step-{number}")

    def _steps(self) -> list[int]:
        return [int(path.name.removeprefix("step-")) for path in self._folder.glob("step-*")]
