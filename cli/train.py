"""`consort train drafter`, `consort train heads` and `consort finetune`: thin entries of training/."""

import os
import time
from collections.abc import Callable, Sequence
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
    from training.texts import TargetOptions, TextOptions

Command = Callable[..., Any]

_PROMPTS = 'What to answer: lines of text, or of {"prompt": …} in a .jsonl file.  [TARGET asks itself]'
_LOSSES = ("lk", "kl", "reverse_kl", "tv")
_console = Console(highlight=False)


def located(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return a model's folder or file on this machine. A click callback. Raises ConfigError as in `locate`."""
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


_shown = partial(click.option, show_default=True)
_COUNT, _POSITIVE = click.IntRange(1), click.FloatRange(0, min_open=True)
_FILE: click.ParamType[Path] = click.Path(path_type=Path)


def _text_options() -> Sequence[Callable[[Command], Command]]:
    """Return TARGET and the options of the texts that it writes."""
    return (
        click.argument("target", callback=located),
        _shown("--tokens", type=_COUNT, default=500_000, help="That the target writes."),
        _shown("--answer-tokens", type=_COUNT, default=256, help="The most of an answer."),
        _shown("--streams", type=_COUNT, default=64, help="Texts written at once."),
        click.option("--prompts", type=_FILE, help=_PROMPTS),
        click.option("--threads", type=_COUNT, help="CPU threads; by default torch's choice."),
        _shown("--device", default="auto", help="auto, cpu or cuda."),
        _shown("--seed", type=int, default=0),
    )


def _run_options(*, tokens_per_step: int, learning_rate: float) -> Callable[[Command], Command]:
    """Return a decorator that adds TARGET and the options that both kinds of students have, with these defaults.

    The command gets them as `run`.
    """
    options: Sequence[Callable[[Command], Command]] = (
        click.option("--output", type=_FILE, required=True, metavar="DIR", help="A new folder."),
        click.option("--work", type=_FILE, metavar="DIR", help="For texts and checkpoints.  [OUTPUT-work]"),
        *_text_options(),
        _shown("--loss", type=click.Choice(_LOSSES), default="lk", help="What is minimised."),
        _shown("--temperature", type=_POSITIVE, default=1.0, help="Of the loss."),
        _shown("--learning-rate", type=_POSITIVE, default=learning_rate),
        _shown("--epochs", type=click.IntRange(0), default=3, help="How often texts are seen; 0: never."),
        click.option("--minutes", type=_POSITIVE, help="The most for distillation."),
        _shown(
            "--save-every",
            "save_every_s",
            type=click.FloatRange(0),
            default=120.0,
            help="Seconds between two checkpoints.",
        ),
        _shown("--tokens-per-step", type=_COUNT, default=tokens_per_step, help="Of a batch."),
        _shown("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", help="Of computing."),
    )

    def add(command: Command) -> Command:
        @wraps(command)
        def gather(**values: Any) -> None:
            os.environ |= compute_environment(values["threads"])  # before torch is imported
            run = _run(values)  # takes its own
            command(run=run, **values)

        gathered: Command = gather
        for option in reversed(options):
            gathered = option(gathered)
        return gathered

    return add


def _take_texts(values: dict[str, Any]) -> tuple["TargetOptions", "TextOptions"]:
    """Take the options of `_text_options` but device and seed out of a command's values."""
    from training.texts import TargetOptions, TextOptions

    prompts = values.pop("prompts")
    questions = () if prompts is None else tuple(read_prompts(prompts))
    target = TargetOptions(path=values.pop("target"), threads=values.pop("threads"), device=values["device"])
    named = {name: values.pop(name) for name in ("tokens", "answer_tokens", "streams")}
    return target, TextOptions(**named, questions=questions, seed=values["seed"])


def _run(values: dict[str, Any]) -> "RunOptions":
    """Take the common options out of a command's values, which click names."""
    from training.distillation.loop import DistillationOptions
    from training.distillation.run import RunOptions

    def take(*names: str) -> dict[str, Any]:
        return {name: values.pop(name) for name in names}

    target, texts = _take_texts(values)
    output: Path = values.pop("output")
    work, dtype = take("work", "dtype").values()
    device, seed = take("device"), take("seed")
    trained = take("loss", "temperature", "learning_rate", "epochs", "minutes", "save_every_s")
    return RunOptions(
        target=target,
        output=output,
        work=work or output.with_name(f"{output.name}-work"),
        texts=texts,
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


@train.command(short_help="Let a target write texts to train on.")
@click.option("--work", type=_FILE, required=True, metavar="DIR", help="Where the texts go.")
@click.option("--layers", type=Layers(), help="After how many layers to keep hidden states, for heads.  [none]")
def texts(work: Path, layers: int | tuple[int, ...] | None, **values: Any) -> None:
    """Let TARGET, a folder or an id on the Hugging Face Hub, write the texts that others are trained on.

    The other commands with the same --work and fewer --tokens train on those that are there already. Killed at any
    moment, the same command goes on where it was.
    """
    os.environ |= compute_environment(values["threads"])  # before torch is imported
    from training.text_stage import write_missing
    from training.texts import fitted, load_target_tokenizer

    target, wanted = _take_texts(values)
    tokenizer = load_target_tokenizer(target.path)
    kept = (layers,) if isinstance(layers, int) else layers or ()
    write_missing(fitted(target), wanted, work, tokenizer, layers=kept, report=_timed_report())


for _option in _text_options():
    _option(texts)


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


@train.command(short_help="Make heads for any target, or let it draft for itself.")
@click.option("--kind", type=click.Choice(["eagle3", "medusa", "dflash", "self"]), required=True)
@click.option("--from", "start", callback=located, metavar="HEAD", help="Go on from this EAGLE-3 or DFlash head.")
@click.option(
    "--layers",
    type=Layers(),
    help="After how many layers the hidden states are read.  [a quarter, a half and all; five of DFlash]",
)
@click.option(
    "--vocabulary", type=click.IntRange(1), help="Tokens that can be drafted; by default 6656, or those of --from."
)
@click.option(
    "--steps",
    type=click.IntRange(1, 8),
    help="Tokens of a draft in training: steps on its own output, the number of Medusa heads, or a DFlash block's "
    "drafts.  [3; 5 of DFlash and self]",
)
@click.option("--head-layers", type=click.IntRange(1), help="Of a new DFlash head.  [2]")
@click.option("--rank", type=click.IntRange(1), help="Of the LoRA weights of --kind self.  [16]")
@_run_options(tokens_per_step=2048, learning_rate=2e-2)
def heads(
    run: "RunOptions",
    kind: "HeadsKind",
    start: str | None,
    layers: int | tuple[int, ...] | None,
    vocabulary: int | None,
    steps: int | None,
    head_layers: int | None,
    rank: int | None,
) -> None:
    """Make heads for TARGET, a folder or an id on the Hugging Face Hub, from nothing but TARGET.

    TARGET writes texts, and its hidden states along them are kept in the work folder; the heads learn to predict the
    texts from them. `consort train drafter` with the same --work shares the texts. Killed at any moment, the same
    command goes on where it was. The output folder appears when all is done, with report.md in it.

    --kind self makes LoRA weights instead, by which TARGET drafts for itself.
    """
    unused = {"--from": start, "--layers": layers, "--vocabulary": vocabulary} if kind == "self" else {"--rank": rank}
    for name, value in unused.items():
        if value is not None:
            raise click.UsageError(f"{name}: --kind {kind} has no use for it; leave it out")
    if start is not None and vocabulary is not None:
        raise click.UsageError(f"--vocabulary: the head in {start} has its own; leave it out")
    if head_layers is not None and (kind != "dflash" or start is not None):
        raise click.UsageError("--head-layers: only a new DFlash head can have another number; leave it out")
    from training.heads import HEAD_LAYERS, RANK, VOCABULARY, HeadsOptions, train_heads

    options = HeadsOptions(
        run=run,
        kind=kind,
        start=start,
        layers=(layers,) if isinstance(layers, int) else layers,
        vocabulary=vocabulary or VOCABULARY,
        steps=steps,
        head_layers=head_layers or HEAD_LAYERS,
        rank=rank or RANK,
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
