"""The commands `consort train …`. Thin: what they do is in `training`."""

import os
from typing import TYPE_CHECKING

import click

from cli.commands.model_path import located
from cli.commands.student_options import StudentOptions, student_options, timed_report
from engine.loading.host import compute_environment

if TYPE_CHECKING:
    from engine.heads.proposer import HeadsKind


class Layers(click.ParamType[int | tuple[int, ...]]):
    """A number of layers, or their indices with commas between."""

    name = "N|I,J,…"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | tuple[int, ...]:
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is neither a number of layers nor indices like 0,1,15", param, ctx)
        return numbers if len(numbers) > 1 else numbers[0]


@click.group(short_help="Train models that work with a target.")
def train() -> None:
    """Train models that work with a target."""


@train.command(short_help="Make a drafter for any target.")
@click.argument("target", callback=located)
@click.option(
    "--from", "start", callback=located, metavar="MODEL", help="Train this small model instead of layers of the target."
)
@click.option(
    "--layers",
    type=Layers(),
    help="How many to keep, or which: 0,1,15,29.  [one for 8 of the target's, at least 2; all of another model's]",
)
@click.option("--vocabulary", type=click.IntRange(0), default=8192, show_default=True, help="Tokens to keep; 0: all.")
@click.option("--lora", "lora_rank", type=click.IntRange(1), metavar="RANK", help="Train adapters of this rank only.")
@student_options(tokens_per_step=4096, learning_rate=5e-4)
def drafter(
    target: str,
    start: str | None,
    layers: int | tuple[int, ...] | None,
    vocabulary: int,
    lora_rank: int | None,
    student: StudentOptions,
) -> None:
    """Make a drafter for TARGET, a folder or an id on the Hugging Face Hub, from nothing but TARGET.

    TARGET writes texts; some of its layers and of its vocabulary are trained to predict what it writes. Killed at any
    moment, the same command goes on where it was. The output folder appears when all is done, with report.md in it.
    """
    os.environ |= compute_environment(student.threads)  # before torch is imported
    from training.drafter.make import DrafterOptions, train_drafter
    from training.drafter.start import StartOptions

    options = DrafterOptions(
        output=student.output,
        work=student.work_folder,
        start=StartOptions(
            target=target, model=start, layers=layers, vocabulary=vocabulary or None, device=student.device
        ),
        texts=student.text_options(),
        distillation=student.distillation_options(),
        lora_rank=lora_rank,
        tokens_per_step=student.tokens_per_step,
        threads=student.threads,
        seed=student.seed,
    )
    train_drafter(options, report=timed_report())


@train.command(short_help="Make Medusa or EAGLE-3 heads for any target.")
@click.argument("target", callback=located)
@click.option("--kind", type=click.Choice(["eagle3", "medusa"]), required=True)
@click.option("--from", "start", callback=located, metavar="HEAD", help="Go on from this EAGLE-3 head.")
@click.option(
    "--layers",
    type=Layers(),
    help="After how many layers the hidden states are read; the last is all of them.  [a quarter, a half and all]",
)
@click.option(
    "--vocabulary", type=click.IntRange(1), help="Tokens that can be drafted; by default 6656, or those of --from."
)
@click.option(
    "--steps",
    type=click.IntRange(1, 8),
    default=3,
    show_default=True,
    help="Tokens of a draft in training: steps on its own output, or the number of Medusa heads.",
)
@student_options(tokens_per_step=2048, learning_rate=2e-2)
def heads(
    target: str,
    kind: "HeadsKind",
    start: str | None,
    layers: int | tuple[int, ...] | None,
    vocabulary: int | None,
    steps: int,
    student: StudentOptions,
) -> None:
    """Make heads for TARGET, a folder or an id on the Hugging Face Hub, from nothing but TARGET.

    TARGET writes texts, and its hidden states along them are kept in the work folder; the heads learn to predict the
    texts from them. `consort train drafter` with the same --work shares the texts. Killed at any moment, the same
    command goes on where it was. The output folder appears when all is done, with report.md in it.
    """
    if start is not None and vocabulary is not None:
        raise click.UsageError(f"--vocabulary: the head in {start} has its own; leave it out")
    os.environ |= compute_environment(student.threads)  # before torch is imported
    from training.distillation.text_stage import TargetOptions
    from training.heads.make import train_heads
    from training.heads.options import VOCABULARY, HeadsOptions

    options = HeadsOptions(
        kind=kind,
        target=TargetOptions(path=target, device=student.device, threads=student.threads),
        output=student.output,
        work=student.work_folder,
        texts=student.text_options(),
        distillation=student.distillation_options(),
        start=start,
        layers=(layers,) if isinstance(layers, int) else layers,
        vocabulary=vocabulary or VOCABULARY,
        steps=steps,
        tokens_per_step=student.tokens_per_step,
        seed=student.seed,
    )
    train_heads(options, report=timed_report())
