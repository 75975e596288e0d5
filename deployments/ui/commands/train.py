"""The commands `consort train …`. Thin: what they do is in `training`."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from actors.model.thread_environment import compute_environment
from deployments.ui.commands.bench import read_prompts
from deployments.ui.commands.model_path import located

if TYPE_CHECKING:
    from actors.heads.spec import HeadsKind
    from training.distillation.losses import LossName

_MOST_PROMPTS = 1_000_000
_LOSSES = ("lk", "kl", "reverse_kl", "tv")

Command = Callable[..., Any]


class Layers(click.ParamType[int | tuple[int, ...]]):
    """A number of layers, or their indices with commas between."""

    name = "N|I,J,…"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | tuple[int, ...]:
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is neither a number of layers nor indices like 0,1,15", param, ctx)
        return numbers if len(numbers) > 1 else numbers[0]


def shared_options(*, tokens_per_step: int, learning_rate: float) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of all students, with these defaults."""
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
            "--epochs", type=click.IntRange(1), default=3, show_default=True, help="How often texts are seen."
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
        for option in reversed(options):
            command = option(command)
        return command

    return add


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
@shared_options(tokens_per_step=4096, learning_rate=5e-4)
def drafter(
    target: str,
    output: Path,
    work: Path | None,
    tokens: int,
    answer_tokens: int,
    streams: int,
    prompts: Path | None,
    start: str | None,
    layers: int | tuple[int, ...] | None,
    vocabulary: int,
    loss: "LossName",
    temperature: float,
    lora_rank: int | None,
    learning_rate: float,
    epochs: int,
    minutes: float | None,
    save_every: float,
    tokens_per_step: int,
    threads: int | None,
    device: str,
    dtype: str,
    seed: int,
) -> None:
    """Make a drafter for TARGET, a folder or an id on the Hugging Face Hub, from nothing but TARGET.

    TARGET writes texts; some of its layers and of its vocabulary are trained to predict what it writes. Killed at any
    moment, the same command goes on where it was. The output folder appears when all is done, with report.md in it.
    """
    os.environ |= compute_environment(threads)  # before torch is imported
    from training.distillation.loop import DistillationOptions
    from training.distillation.text_stage import TextOptions
    from training.drafter.make import DrafterOptions, train_drafter
    from training.drafter.start import StartOptions

    questions = () if prompts is None else tuple(read_prompts(prompts, _MOST_PROMPTS))
    console, began_s = Console(highlight=False), time.monotonic()
    options = DrafterOptions(
        output=output,
        work=work or output.with_name(f"{output.name}-work"),
        start=StartOptions(target=target, model=start, layers=layers, vocabulary=vocabulary or None, device=device),
        texts=TextOptions(tokens=tokens, answer_tokens=answer_tokens, streams=streams, questions=questions, seed=seed),
        distillation=DistillationOptions(
            loss=loss,
            temperature=temperature,
            learning_rate=learning_rate,
            epochs=epochs,
            minutes=minutes,
            save_every_s=save_every,
            device=device,
            bfloat16=dtype == "bfloat16",
        ),
        lora_rank=lora_rank,
        tokens_per_step=tokens_per_step,
        threads=threads,
        seed=seed,
    )
    train_drafter(options, report=lambda line: console.print(f"{time.monotonic() - began_s:8.1f} s  {line}"))


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
    "--vocabulary", type=click.IntRange(1), default=6656, show_default=True, help="Tokens that can be drafted."
)
@click.option(
    "--steps",
    type=click.IntRange(1, 8),
    default=3,
    show_default=True,
    help="Tokens of a draft in training: steps on its own output, or the number of Medusa heads.",
)
@shared_options(tokens_per_step=2048, learning_rate=2e-2)
def heads(
    target: str,
    output: Path,
    work: Path | None,
    kind: "HeadsKind",
    start: str | None,
    tokens: int,
    answer_tokens: int,
    streams: int,
    prompts: Path | None,
    layers: int | tuple[int, ...] | None,
    vocabulary: int,
    steps: int,
    loss: "LossName",
    temperature: float,
    learning_rate: float,
    epochs: int,
    minutes: float | None,
    save_every: float,
    tokens_per_step: int,
    threads: int | None,
    device: str,
    dtype: str,
    seed: int,
) -> None:
    """Make heads for TARGET, a folder or an id on the Hugging Face Hub, from nothing but TARGET.

    TARGET writes texts, and its hidden states along them are kept in the work folder; the heads learn to predict the
    texts from them. `consort train drafter` with the same --work shares the texts. Killed at any moment, the same
    command goes on where it was. The output folder appears when all is done, with report.md in it.
    """
    os.environ |= compute_environment(threads)  # before torch is imported
    from training.distillation.loop import DistillationOptions
    from training.distillation.text_stage import TargetOptions, TextOptions
    from training.heads.make import HeadsOptions, train_heads

    questions = () if prompts is None else tuple(read_prompts(prompts, _MOST_PROMPTS))
    console, began_s = Console(highlight=False), time.monotonic()
    options = HeadsOptions(
        kind=kind,
        target=TargetOptions(path=target, device=device, threads=threads),
        output=output,
        work=work or output.with_name(f"{output.name}-work"),
        texts=TextOptions(tokens=tokens, answer_tokens=answer_tokens, streams=streams, questions=questions, seed=seed),
        distillation=DistillationOptions(
            loss=loss,
            temperature=temperature,
            learning_rate=learning_rate,
            epochs=epochs,
            minutes=minutes,
            save_every_s=save_every,
            device=device,
            bfloat16=dtype == "bfloat16",
        ),
        start=start,
        layers=(layers,) if isinstance(layers, int) else layers,
        vocabulary=vocabulary,
        steps=steps,
        tokens_per_step=tokens_per_step,
        seed=seed,
    )
    train_heads(options, report=lambda line: console.print(f"{time.monotonic() - began_s:8.1f} s  {line}"))
