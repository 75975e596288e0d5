"""The command `consort finetune`."""

import os
import time
from pathlib import Path

import click
from rich.console import Console

from cli.commands.model_path import located
from engine.loading.host import compute_environment


@click.command(short_help="Teach a model your own chats or texts.")
@click.argument("model", callback=located)
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), required=True, metavar="DIR", help="A new folder.")
@click.option("--work", type=click.Path(path_type=Path), metavar="DIR", help="For checkpoints.  [OUTPUT-work]")
@click.option("--rank", type=click.IntRange(1), default=16, show_default=True, help="Of the adapters (LoRA).")
@click.option("--keep-adapter", is_flag=True, help="Write the adapter alone, not merged into the model.")
@click.option("--epochs", type=click.FloatRange(0, min_open=True), default=3.0, show_default=True)
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), default=2e-4, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Rows of a step.")
@click.option("--max-length", type=click.IntRange(2), default=1024, show_default=True, help="Tokens of a row.")
@click.option("--save-steps", type=click.IntRange(1), default=50, show_default=True, help="Between two checkpoints.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads; by default torch's choice.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--seed", type=int, default=0, show_default=True)
def finetune(
    model: str,
    data: Path,
    output: Path,
    work: Path | None,
    rank: int,
    keep_adapter: bool,
    epochs: float,
    learning_rate: float,
    batch: int,
    max_length: int,
    save_steps: int,
    threads: int | None,
    device: str,
    seed: int,
) -> None:
    """Finetune MODEL, a folder or an id on the Hugging Face Hub, on the lines of DATA.

    Each line is {"messages": [{"role": …, "content": …}, …]}, of which the assistant's turns are learned, or
    {"text": …}. Killed at any moment, the same command goes on where it was.
    """
    os.environ |= compute_environment(threads)  # before torch is imported
    from training.finetuning.examples import read_examples
    from training.finetuning.finetune import FinetuneOptions, finetune

    console, began_s = Console(highlight=False), time.monotonic()
    examples = read_examples(data)
    options = FinetuneOptions(
        model=model,
        output=output,
        work=work or output.with_name(f"{output.name}-work"),
        rank=rank,
        keep_adapter=keep_adapter,
        epochs=epochs,
        learning_rate=learning_rate,
        batch_size=batch,
        max_length=max_length,
        save_steps=save_steps,
        threads=threads,
        device=device,
        seed=seed,
    )

    def report(line: str) -> None:
        console.print(f"{time.monotonic() - began_s:8.1f} s  {line}", markup=False)

    finetune(options, examples, report)
    weights = f"path: {model}, adapter: {output}" if keep_adapter else f"path: {output}"
    console.print(f"Serve it by a line under `models:`\n  {output.name}: {{{weights}}}", markup=False, soft_wrap=True)
