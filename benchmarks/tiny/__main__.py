"""Command line: `python -m benchmarks.tiny` retrains every bundled model; its commands run one part each."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch

from benchmarks.tiny.corpus import read_corpus
from benchmarks.tiny.inflate import inflate
from benchmarks.tiny.model import (
    bfloat16_copy,
    build,
    held_out_loss,
    load,
    load_tokenizer,
    pretrain,
    save,
    train_tokenizer,
)
from benchmarks.tiny.stream import RECIPES, Name, Stream, encode, training_prompts, write_prompts
from training.distillation.loop import DistillationOptions
from training.distillation.run import RunOptions
from training.drafter import DrafterOptions, train_drafter
from training.texts import TargetOptions, TextOptions

_FOLDERS = {"drafter": "drafter-start"}  # pretrained models with another folder than their name
_ANSWER_TOKENS = 96
FOLDER = click.Path(path_type=Path)
models_option = click.option(
    "--models", type=FOLDER, default=Path("models"), show_default=True, help="Folder of the models."
)
minutes_option = click.option("--minutes", type=float, required=True, help="Training time.")
threads_option = click.option("--threads", type=int, default=3, show_default=True)


@click.group(invoke_without_command=True)
@models_option
@click.option("--target-minutes", type=float, default=33, show_default=True)
@click.option("--drafter-minutes", type=float, default=22, show_default=True)
@click.option("--member-minutes", type=float, default=60, show_default=True)
@click.option("--distill-minutes", type=float, default=45, show_default=True)
@click.pass_context
def main(context: click.Context, /, models: Path, **minutes: float) -> None:
    """Train the bundled models. Without a command, train all of them on four cores."""
    if context.invoked_subcommand is not None:
        return
    _check_no_drafter(models)
    _run("heldout", "--models", models)
    target = _start("pretrain", "target", "--models", models, "--minutes", minutes["target_minutes"], "--threads", 3)
    _run("pretrain", "drafter", "--models", models, "--minutes", minutes["drafter_minutes"], "--threads", 1)
    member = _start("pretrain", "member", "--models", models, "--minutes", minutes["member_minutes"], "--threads", 1)
    _finish(target)
    _run("distill", "--models", models, "--minutes", minutes["distill_minutes"], "--threads", 1)
    _finish(member)


@main.command("heldout")
@models_option
def heldout_command(models: Path) -> None:
    """Write the held-out prompts."""
    documents = read_corpus()
    models.mkdir(parents=True, exist_ok=True)
    write_prompts(documents, train_tokenizer(documents), models / "heldout.jsonl", seed=0)


@main.command("pretrain")
@click.argument("name", type=click.Choice(list(RECIPES)))
@models_option
@minutes_option
@threads_option
def pretrain_command(name: Name, models: Path, minutes: float, threads: int) -> None:
    """Train one model on the corpus."""
    torch.set_num_threads(threads)
    recipe = RECIPES[name]
    documents = read_corpus()
    tokenizer = train_tokenizer(documents)
    model = build(recipe, tokenizer)
    training = [document for document in documents if not document.held_out]
    stream = Stream(encode(training, tokenizer, seed=recipe.seed), recipe.mix, seed=recipe.seed)
    report = _reporter(name)
    pretrain(
        model,
        stream,
        minutes=minutes,
        save=lambda: save(bfloat16_copy(model, tokenizer), tokenizer, models / _FOLDERS.get(name, name)),
        report=report,
    )
    held_out = [document for document in documents if document.held_out]
    for kind, pieces in encode(held_out, tokenizer, seed=0).items():
        report(f"held-out {kind} loss {held_out_loss(model, pieces):.4f}")


@main.command("distill")
@models_option
@minutes_option
@threads_option
@click.option("--tokens", type=int, default=1_500_000, show_default=True, help="That the target writes.")
def distill_command(models: Path, minutes: float, threads: int, tokens: int) -> None:
    """Train the drafter on texts of the target, as `consort train drafter` does."""
    _check_no_drafter(models)
    recipe = RECIPES["drafter"]
    training = [document for document in read_corpus() if not document.held_out]
    tokenizer = load_tokenizer(models / "target")
    stream = Stream(encode(training, tokenizer, seed=recipe.seed + 1), recipe.mix, seed=recipe.seed + 1)
    prompts = training_prompts(stream, tokenizer, tokens // _ANSWER_TOKENS, seed=recipe.seed)
    run = RunOptions(
        target=TargetOptions(path=str(models / "target"), threads=threads),
        output=models / "drafter",
        work=models / "drafter-work",
        texts=TextOptions(tokens=tokens, answer_tokens=_ANSWER_TOKENS, questions=tuple(prompts), chat=False),
        distillation=DistillationOptions(minutes=minutes, epochs=100, learning_rate=1e-3),
        tokens_per_step=4096,
        seed=recipe.seed,
    )
    options = DrafterOptions(run=run, model=str(models / _FOLDERS["drafter"]), vocabulary=None)
    train_drafter(options, report=_reporter("distill"))


@main.command("inflate")
@click.option("--source", type=FOLDER, default=Path("models/target"), show_default=True)
@click.option("--output", type=FOLDER, required=True, help="A new or empty folder.")
@click.option("--hidden", type=int, default=1024, show_default=True)
@click.option("--layers", type=int, default=24, show_default=True)
@click.option("--intermediate", type=int, default=2816, show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--force", is_flag=True, help="Replace the output folder.")
def inflate_command(
    source: Path, output: Path, hidden: int, layers: int, intermediate: int, dtype: str, force: bool
) -> None:
    """Write a larger checkpoint that computes the same function."""
    if not (source / "config.json").is_file():
        raise click.ClickException(f"--source {source} is not a model folder: expected a config.json in it")
    if output.exists() and (not output.is_dir() or any(output.iterdir())) and not force:
        raise click.ClickException(f"--output {output} is not an empty folder; --force replaces it")
    model = load(source, getattr(torch, dtype))
    try:
        grown = inflate(model, hidden=hidden, layers=layers, intermediate=intermediate)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    output.parent.mkdir(parents=True, exist_ok=True)
    save(grown, load_tokenizer(source), output)
    click.echo(f"{output}: {grown.num_parameters():,} parameters, {dtype}")


def _check_no_drafter(models: Path) -> None:
    """Refuse to train for hours what can't be saved."""
    if (models / "drafter").exists():
        raise click.ClickException(f"{models / 'drafter'} is there already: give another --models folder, or remove it")


def _reporter(name: str) -> Callable[[str], None]:
    start = time.monotonic()
    return lambda line: click.echo(f"{time.monotonic() - start:7.1f}s {name} {line}")


def _start(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "benchmarks.tiny", *map(str, arguments)])


def _finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        raise click.ClickException(f"a part of the training ended with status {process.returncode}")


def _run(*arguments: object) -> None:
    _finish(_start(*arguments))


if __name__ == "__main__":
    main()
