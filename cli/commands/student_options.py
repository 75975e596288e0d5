"""The options of `consort train …` that all students of a target share. Thin: what they mean is in `training`."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from evaluation.prompts import read_prompts

if TYPE_CHECKING:
    from training.distillation.loop import DistillationOptions
    from training.distillation.losses import LossName
    from training.distillation.text_stage import TextOptions

_MOST_PROMPTS = 1_000_000
_LOSSES = ("lk", "kl", "reverse_kl", "tv")

Command = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentOptions:
    """Values of the shared options, by the names that click gives them."""

    output: Path
    work: Path | None
    tokens: int
    answer_tokens: int
    streams: int
    prompts: Path | None
    loss: "LossName"
    temperature: float
    learning_rate: float
    epochs: int
    minutes: float | None
    save_every: float
    tokens_per_step: int
    threads: int | None
    device: str
    dtype: str
    seed: int

    @property
    def work_folder(self) -> Path:
        """Folder for texts and checkpoints."""
        return self.work or self.output.with_name(f"{self.output.name}-work")

    def text_options(self) -> "TextOptions":
        """Options of the texts that the target writes. Raises ConfigError if the prompts can't be read."""
        from training.distillation.text_stage import TextOptions

        return TextOptions(
            tokens=self.tokens,
            answer_tokens=self.answer_tokens,
            streams=self.streams,
            questions=() if self.prompts is None else tuple(read_prompts(self.prompts, _MOST_PROMPTS)),
            seed=self.seed,
        )

    def distillation_options(self) -> "DistillationOptions":
        """Options of the training."""
        from training.distillation.loop import DistillationOptions

        return DistillationOptions(
            loss=self.loss,
            temperature=self.temperature,
            learning_rate=self.learning_rate,
            epochs=self.epochs,
            minutes=self.minutes,
            save_every_s=self.save_every,
            device=self.device,
            bfloat16=self.dtype == "bfloat16",
        )


def student_options(*, tokens_per_step: int, learning_rate: float) -> Callable[[Command], Command]:
    """Return a decorator that adds the shared options, with these defaults. The command gets them as `student`."""
    options = (
        click.option("--output", type=click.Path(path_type=Path), required=True, metavar="DIR", help="A new folder."),
        click.option(
            "--work", type=click.Path(path_type=Path), metavar="DIR", help="For texts and checkpoints.  [OUTPUT-work]"
        ),
        click.option(
            "--tokens", type=click.IntRange(1), default=500_000, show_default=True, help="That the target writes."
        ),
        click.option(
            "--answer-tokens", type=click.IntRange(1), default=256, show_default=True, help="The most of an answer."
        ),
        click.option("--streams", type=click.IntRange(1), default=32, show_default=True, help="Texts written at once."),
        click.option(
            "--prompts",
            type=click.Path(path_type=Path),
            help='What to answer: lines of text, or of {"prompt": …} in a .jsonl file.  [TARGET asks itself]',
        ),
        click.option("--loss", type=click.Choice(_LOSSES), default="lk", show_default=True, help="What is minimised."),
        click.option(
            "--temperature",
            type=click.FloatRange(0, min_open=True),
            default=1.0,
            show_default=True,
            help="Of the loss.",
        ),
        click.option(
            "--learning-rate", type=click.FloatRange(0, min_open=True), default=learning_rate, show_default=True
        ),
        click.option(
            "--epochs", type=click.IntRange(0), default=3, show_default=True, help="How often texts are seen; 0: never."
        ),
        click.option("--minutes", type=click.FloatRange(0, min_open=True), help="The most for distillation."),
        click.option(
            "--save-every",
            type=click.FloatRange(0),
            default=120.0,
            show_default=True,
            help="Seconds between two checkpoints.",
        ),
        click.option(
            "--tokens-per-step",
            type=click.IntRange(1),
            default=tokens_per_step,
            show_default=True,
            help="Of a batch.",
        ),
        click.option("--threads", type=click.IntRange(1), help="CPU threads; by default torch's choice."),
        click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
        click.option(
            "--dtype",
            type=click.Choice(["bfloat16", "float32"]),
            default="bfloat16",
            show_default=True,
            help="Of computing.",
        ),
        click.option("--seed", type=int, default=0, show_default=True),
    )

    def add(command: Command) -> Command:
        @wraps(command)
        def gather(**values: Any) -> None:
            student = StudentOptions(**{field.name: values.pop(field.name) for field in fields(StudentOptions)})
            command(student=student, **values)

        for option in reversed(options):
            gather = option(gather)
        return gather

    return add


def timed_report() -> Callable[[str], None]:
    """Return a function that prints lines with the seconds since this call."""
    console, began_s = Console(highlight=False), time.monotonic()
    return lambda line: console.print(f"{time.monotonic() - began_s:8.1f} s  {line}")
