"""Distillation of a student from the probabilities of its target, in steps that resume where they were killed."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from decoding.errors import ConfigError
from training.distillation.lessons import Batch, Lessons, Student
from training.distillation.rates import LOSSES, LossName, acceptance, student_logprobs, teacher_probabilities
from training.files import remove, whole_folder

_WARM_UP = 0.03
_LOWEST_RATE = 0.05
_STEP_DECAY = 0.8  # of the weight of each further token of a draft
_IMPOSSIBLE = -1e4  # log-probability of candidates that the student lacks; 0 · −∞ would be NaN


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
    measure_every_s: float = 600.0
    device: str = "auto"
    bfloat16: bool = True  # autocast


@dataclass(slots=True)
class Progress:
    """How far a distillation has come; part of each checkpoint."""

    step: int = 0
    elapsed_s: float = 0.0

    def state_dict(self) -> dict[str, float]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
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

    def add(self, batch: Batch, result: "BatchResult") -> None:
        positions = len(batch.candidates)
        self.tokens += batch.tokens.numel()
        self.positions += positions
        self.loss += positions * result.loss.item()
        self.agreement += positions * result.agreement.item()
        self.acceptance += positions * result.acceptance.item()

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
    student: Student,
    lessons: Lessons,
    options: DistillationOptions,
    folder: Path,
    *,
    report: Callable[[str], None],
    measure: Callable[[], str] | None = None,
) -> None:
    """Train the student's module, float32, until the epochs or the minutes are over. Without epochs it stays as it is.

    measure: says how good the student is, every now and then.

    Checkpoints go to `folder`. A run that was killed goes on after the newest; with epochs alone, on a CPU, it computes
    the same weights to the bit.

    Raises ConfigError if there are no texts, the loss is no longer a number, or the disk is full.
    """
    if not options.epochs:
        return
    schedule = lessons.schedule(options.epochs)
    if not schedule:
        raise ConfigError("there are no texts to train on")
    trainer = _Trainer(student, options, folder)
    progress, sums = trainer.progress, _Sums()
    saved_s = measured_s = time.monotonic()
    began_s = saved_s - progress.elapsed_s
    while (share := _share(progress, len(schedule), options.minutes)) < 1.0:
        batch = lessons.batch(schedule[progress.step]).to(trainer.accelerator.device)
        if (result := trainer.step(batch, share)) is not None:
            sums.add(batch, result)
        now_s = time.monotonic()
        progress.elapsed_s = now_s - began_s
        if now_s - sums.began_s >= options.report_every_s:
            report(sums.line(progress, len(schedule), _share(progress, len(schedule), options.minutes)))
            sums = _Sums()
        if now_s - saved_s >= options.save_every_s:
            trainer.save()
            saved_s = now_s
        if measure is not None and now_s - measured_s >= options.measure_every_s:
            report(measure())
            student.module.train()
            measured_s = time.monotonic()
    trainer.save()
    if sums.positions:
        report(sums.line(progress, len(schedule), 1.0))
    trainer.finish()


class _Trainer:
    """A student with its optimizers, and their newest state in a folder."""

    def __init__(self, student: Student, options: DistillationOptions, folder: Path) -> None:
        self._student, self._options, self._folder = student, options, folder
        self._parameters = [parameter for parameter in student.module.parameters() if parameter.requires_grad]
        optimizers = student.optimizers(options.learning_rate)
        self._rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        precision = "bf16" if options.bfloat16 else "no"
        self.accelerator = Accelerator(cpu=options.device == "cpu", mixed_precision=precision)
        self._model, *self._optimizers = self.accelerator.prepare(student.module.train(), *optimizers)
        self.progress = Progress()
        self.accelerator.register_for_checkpointing(self.progress)
        if steps := self._saved_steps():
            self.accelerator.load_state(str(folder / f"step-{max(steps)}"))

    def step(self, batch: Batch, share: float) -> "BatchResult | None":
        """Train on a batch, at the learning rate for that share of the training. None: no draft starts in it."""
        for optimizer, rates in zip(self._optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * _rate(share)
        result = batch_result(self._student, self._model, batch, self._options, share)
        self.progress.step += 1
        if result is None:
            return None
        if not math.isfinite(result.loss.item()):
            raise ConfigError(
                f"the loss is {result.loss.item()} after {self.progress.step - 1} steps: lower --learning-rate"
            )
        self.accelerator.backward(result.loss)
        self.accelerator.clip_grad_norm_(self._parameters, 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return result

    def save(self) -> None:
        """Write a checkpoint, then remove the older ones."""
        older = self._saved_steps()
        if self.progress.step in older:
            return
        with whole_folder(self._folder / f"step-{self.progress.step}") as unfinished:
            self.accelerator.save_state(str(unfinished))
        for step in older:
            remove(self._folder / f"step-{step}")

    def finish(self) -> None:
        """Unwrap the student's module."""
        self.accelerator.unwrap_model(self._model, keep_fp32_wrapper=False)
        self.accelerator.free_memory()
        self._student.module.eval()

    def _saved_steps(self) -> list[int]:
        return [int(path.name.removeprefix("step-")) for path in self._folder.glob("step-*")]


@dataclass(frozen=True, slots=True, eq=False)
class BatchResult:
    """What a batch says about a student, each []."""

    loss: Tensor
    agreement: Tensor  # share of positions where both models have the same most probable token
    acceptance: Tensor  # mean of the sum of min(p, q)


def batch_result(
    student: Student, module: nn.Module, batch: Batch, options: DistillationOptions, share: float
) -> BatchResult | None:
    """Compare a student with its teacher on a batch. Agreement and acceptance are those of a draft's first token.

    Steps that all answers are too short for don't count. None: no draft starts in the batch.
    """
    losses: list[Tensor] = []
    weights: list[float] = []
    measured: list[Tensor] = []
    for step, (starts, logits) in enumerate(student.drafts(module, batch, student.steps(share))):
        if not len(starts):
            continue
        rows = starts + step
        candidates, known = batch.candidates[rows], batch.known[rows]
        p = teacher_probabilities(batch.logprobs[rows], options.temperature) * known
        log_q = student_logprobs(logits, candidates, options.temperature).masked_fill(~known, _IMPOSSIBLE)
        losses.append(_STEP_DECAY**step * LOSSES[options.loss](log_q, p))
        weights.append(_STEP_DECAY**step)
        if step == 0:
            with torch.no_grad():
                agreement = ((logits.argmax(-1) == candidates[:, 0]) & known[:, 0]).float().mean()
                measured = [agreement, acceptance(log_q, p).mean()]
    return BatchResult(torch.stack(losses).sum() / sum(weights), *measured) if losses else None


def _share(progress: Progress, steps: int, minutes: float | None) -> float:
    """Return how much of the training is over; 1 or more: all."""
    timed = 0.0 if minutes is None else progress.elapsed_s / (60 * minutes)
    return max(progress.step / steps, timed)


def _rate(share: float) -> float:
    """Return the part of the learning rate to use: linear warm-up, then cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * max(share - _WARM_UP, 0.0) / (1 - _WARM_UP)))
    return min((share + 1e-3) / _WARM_UP, 1.0) * (_LOWEST_RATE + (1 - _LOWEST_RATE) * cosine)
