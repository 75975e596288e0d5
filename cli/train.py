"""`consort train drafter`, `consort train heads` and `consort finetune`: thin entries of training/."""

import os
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from engine.loading.host import compute_environment
from evaluation.prompts import read_prompts

if TYPE_CHECKING:
    from engine.heads.spec import HeadsKind
    from training.distillation.run import RunOptions

Command = Callable[..., Any]

_PROMPTS = 'What to answer: lines of text, or of {"prompt": …} in a .jsonl file.  [TARGET asks itself]'
_LOSSES = ("lk", "kl", "reverse_kl", "tv")
_console = Console(highlight=False)


def located(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return a model's folder or file on this machine. A click callback.

    Raises:
        ConfigError: as in `locate`.
    """
    from deployments.configuration.paths import locate  # imports pydantic, which `--help` does without

    return value if value is None or Path(value).exists() else locate(value)


class Layers(click.ParamType[int | tuple[int, ...]]):
    """A number of layers, or their indices with commas between."""

    name = "N|I,J,…"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | tuple[int, ...]:
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is neither a number of layers nor indices like 0,1,15", param, ctx)
        return numbers if len(numbers) > 1 else numbers[0]


def _run_options(*, tokens_per_step: int, learning_rate: float) -> Callable[[Command], Command]:
    """Return a decorator that adds TARGET and the options that both kinds of students have, with these defaults.

    The command gets them as `run`.
    """
    shown = partial(click.option, show_default=True)
    count, positive = click.IntRange(1), click.FloatRange(0, min_open=True)
    file = click.Path(path_type=Path)
    options = (
        click.argument("target", callback=located),
        click.option("--output", type=file, required=True, metavar="DIR", help="A new folder."),
        click.option("--work", type=file, metavar="DIR", help="For texts and checkpoints.  [OUTPUT-work]"),
        shown("--tokens", type=count, default=500_000, help="That the target writes."),
        shown("--answer-tokens", type=count, default=256, help="The most of an answer."),
        shown("--streams", type=count, default=32, help="Texts written at once."),
        click.option("--prompts", type=file, help=_PROMPTS),
        shown("--loss", type=click.Choice(_LOSSES), default="lk", help="What is minimised."),
        shown("--temperature", type=positive, default=1.0, help="Of the loss."),
        shown("--learning-rate", type=positive, default=learning_rate),
        shown("--epochs", type=click.IntRange(0), default=3, help="How often texts are seen; 0: never."),
        click.option("--minutes", type=positive, help="The most for distillation."),
        shown(
            "--save-every",
            "save_every_s",
            type=click.FloatRange(0),
            default=120.0,
            help="Seconds between two checkpoints.",
        ),
        shown("--tokens-per-step", type=count, default=tokens_per_step, help="Of a batch."),
        click.option("--threads", type=count, help="CPU threads; by default torch's choice."),
        shown("--device", default="auto", help="auto, cpu or cuda."),
        shown("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", help="Of computing."),
        shown("--seed", type=int, default=0),
    )

    def add(command: Command) -> Command:
        @wraps(command)
        def gather(**values: Any) -> None:
            os.environ |= compute_environment(values["threads"])  # before torch is imported
            run = _run(values)  # takes its own
            command(run=run, **values)

        for option in reversed(options):
            gather = option(gather)
        return gather

    return add


def _run(values: dict[str, Any]) -> "RunOptions":
    """Take the common options out of a command's values, which click names."""
    from training.distillation.loop import DistillationOptions
    from training.distillation.run import RunOptions
    from training.texts import TargetOptions, TextOptions

    def take(*names: str) -> dict[str, Any]:
        return {name: values.pop(name) for name in names}

    output: Path = values.pop("output")
    work, prompts, dtype = take("work", "prompts", "dtype").values()
    device, seed = take("device"), take("seed")
    questions = () if prompts is None else tuple(read_prompts(prompts))
    trained = take("loss", "temperature", "learning_rate", "epochs", "minutes", "save_every_s")
    return RunOptions(
        target=TargetOptions(path=values.pop("target"), **take("threads"), **device),
        output=output,
        work=work or output.with_name(f"{output.name}-work"),
        texts=TextOptions(**take("tokens", "answer_tokens", "streams"), questions=questions, **seed),
        distillation=DistillationOptions(**trained, **device, bfloat16=dtype == "bfloat16"),
        **take("tokens_per_step"),
        **seed,
    )


def _timed_report() -> Callable[[str], None]:
    """Return a function that prints lines with the seconds since this call."""
    began_s = time.monotonic()
    return lambda line: _console.print(f"{time.monotonic() - began_s:8.1f} s  {line}", markup=False)


@click.group(short_help="Train models that work with a target.")
def train() -> None:
    """Train models that work with a target."""


@train.command(short_help="Make a drafter for any target.")
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
@_run_options(tokens_per_step=4096, learning_rate=5e-4)
def drafter(
    run: "RunOptions", start: str | None, layers: int | tuple[int, ...] | None, vocabulary: int, lora_rank: int | None
) -> None:
    """Make a drafter for TARGET, a folder or an id on the Hugging Face Hub, from nothing but TARGET.

    TARGET writes texts; some of its layers and of its vocabulary are trained to predict what it writes. Killed at any
    moment, the same command goes on where it was. The output folder appears when all is done, with report.md in it.
    """
    from training.drafter import DrafterOptions, train_drafter

    options = DrafterOptions(run=run, model=start, layers=layers, vocabulary=vocabulary or None, lora_rank=lora_rank)
    train_drafter(options, report=_timed_report())


@train.command(short_help="Make Medusa or EAGLE-3 heads for any target.")
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
@_run_options(tokens_per_step=2048, learning_rate=2e-2)
def heads(
    run: "RunOptions",
    kind: "HeadsKind",
    start: str | None,
    layers: int | tuple[int, ...] | None,
    vocabulary: int | None,
    steps: int,
) -> None:
    """Make heads for TARGET, a folder or an id on the Hugging Face Hub, from nothing but TARGET.

    TARGET writes texts, and its hidden states along them are kept in the work folder; the heads learn to predict the
    texts from them. `consort train drafter` with the same --work shares the texts. Killed at any moment, the same
    command goes on where it was. The output folder appears when all is done, with report.md in it.
    """
    if start is not None and vocabulary is not None:
        raise click.UsageError(f"--vocabulary: the head in {start} has its own; leave it out")
    from training.heads import VOCABULARY, HeadsOptions, train_heads

    options = HeadsOptions(
        run=run,
        kind=kind,
        start=start,
        layers=(layers,) if isinstance(layers, int) else layers,
        vocabulary=vocabulary or VOCABULARY,
        steps=steps,
    )
    train_heads(options, report=_timed_report())


@click.command(short_help="Teach a model your own chats or texts.")
@click.argument("model", callback=located)
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), required=True, metavar="DIR", help="A new folder.")
@click.option("--work", type=click.Path(path_type=Path), metavar="DIR", help="For checkpoints.  [OUTPUT-work]")
@click.option("--rank", type=click.IntRange(1), default=16, show_default=True, help="Of the adapters (LoRA).")
@click.option("--keep-adapter", is_flag=True, help="Write the adapter alone, not merged into the model.")
@click.option("--epochs", type=click.FloatRange(0, min_open=True), default=3.0, show_default=True)
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), default=2e-4, show_default=True)
@click.option("--batch", "batch_size", type=click.IntRange(1), default=8, show_default=True, help="Rows of a step.")
@click.option("--max-length", type=click.IntRange(2), default=1024, show_default=True, help="Tokens of a row.")
@click.option("--save-steps", type=click.IntRange(1), default=50, show_default=True, help="Between two checkpoints.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads; by default torch's choice.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--seed", type=int, default=0, show_default=True)
def finetune(data: Path, *, output: Path, work: Path | None, threads: int | None, **given: Any) -> None:
    """Finetune MODEL, a folder or an id on the Hugging Face Hub, on the lines of DATA.

    Each line is {"messages": [{"role": …, "content": …}, …]}, of which the assistant's turns are learned, or
    {"text": …}. Killed at any moment, the same command goes on where it was.
    """
    os.environ |= compute_environment(threads)  # before torch is imported
    from training.finetune import FinetuneOptions, finetune, read_examples

    work = work or output.with_name(f"{output.name}-work")
    examples = read_examples(data)
    options = FinetuneOptions(output=output, work=work, threads=threads, **given)
    finetune(options, examples, _timed_report())
    weights = f"path: {options.model}, adapter: {output}" if options.keep_adapter else f"path: {output}"
    _console.print(f"Serve it by a line under `models:`\n  {output.name}: {{{weights}}}", markup=False, soft_wrap=True)
