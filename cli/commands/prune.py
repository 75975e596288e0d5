"""The command `consort prune`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from cli.commands.model_path import located
from decoding.errors import ConfigError
from engine.loading.host import compute_environment

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MOST_TOKENS = 512  # of a text
_MOST_TEXTS = 64  # for the influence of layers
_TEXTS = (
    "A drafter is a small model that guesses what a large one will write. The large one checks its guesses.",
    "To cook rice, rinse it, add one and a half times as much water, bring it to the boil, and let it rest.",
    "def mean(values):\n    if not values:\n        raise ValueError('none')\n    return sum(values) / len(values)\n",
)


@click.command(short_help="Make a model smaller: fewer layers, fewer tokens.")
@click.argument("target", callback=located)
@click.option("--output", type=click.Path(path_type=Path), required=True, metavar="DIR", help="A new folder.")
@click.option("--layers", type=click.IntRange(1), help="Keep so many layers, those that change their input most.")
@click.option("--drop-layers", metavar="I,J,…", help="Drop these layers instead; the first is 0.")
@click.option("--vocabulary", type=click.IntRange(1), help="Keep so many tokens; the result can only draft.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Chats or texts, as for `consort finetune`: which layers matter and which tokens are used is seen on them. "
    "Without, on three short texts that are built in, and the tokens with the lowest ids are kept.",
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads; by default torch's choice.")
def prune(
    target: str,
    output: Path,
    layers: int | None,
    drop_layers: str | None,
    vocabulary: int | None,
    data: Path | None,
    threads: int | None,
) -> None:
    """Write what is left of TARGET, a folder or an id on the Hugging Face Hub, without some layers or tokens.

    The result is meant as a drafter, or to be trained further: `consort train drafter` does both.
    """
    if layers is None and drop_layers is None and vocabulary is None:
        raise click.UsageError("give --layers, --drop-layers or --vocabulary: there is nothing to prune")
    if layers is not None and drop_layers is not None:
        raise click.UsageError("--layers and --drop-layers don't go together")
    if output.exists():
        raise ConfigError(f"--output {output} exists already; name a new folder")
    dropped = None if drop_layers is None else _indices(drop_layers)
    os.environ |= compute_environment(threads)  # before torch is imported
    _prune(Console(highlight=False), target, output, layers, dropped, vocabulary, data, threads)


def _indices(text: str) -> set[int]:
    try:
        return {int(part) for part in text.split(",")}
    except ValueError as error:
        raise click.UsageError(f"--drop-layers {text}: give layers like 3,5,8") from error


def _prune(
    console: Console,
    target: str,
    output: Path,
    layers: int | None,
    dropped: set[int] | None,
    vocabulary: int | None,
    data: Path | None,
    threads: int | None,
) -> None:
    from engine.loading.checkpoint import ModelSpec, load_model
    from engine.loading.draft_vocabulary import save_draft_vocabulary
    from engine.loading.settings import is_trimmed, load_tokenizer
    from training.files import whole_folder
    from training.pruning import keep_layers, most_frequent, trim_vocabulary

    tokenizer = load_tokenizer(target)
    texts = _texts(tokenizer, data)
    model = load_model(ModelSpec(name="target", path=target, device="cpu", threads=threads))
    if is_trimmed(model.config):
        raise ConfigError(f"{target} is a drafter with a trimmed vocabulary; prune the model that it was made from")
    before = model.num_parameters()
    if layers is not None or dropped is not None:
        keep_layers(model, _kept(console, model, texts, layers, dropped))
    tokens: list[int] | None = None
    if vocabulary is not None:
        size = int(model.config.get_text_config(decoder=True).vocab_size)
        tokens = most_frequent(texts if data is not None else [], vocabulary, _special(model, tokenizer), size)
        trim_vocabulary(model, tokens)
    with whole_folder(output) as folder:
        model.save_pretrained(folder, max_shard_size="2GB")
        tokenizer.save_pretrained(folder)
        if tokens is not None:
            save_draft_vocabulary(tokens, folder)
    console.print(f"{target}: {before:,} parameters; {output}: {model.num_parameters():,}", markup=False)
    if tokens is not None:
        console.print(f"It knows {len(tokens):,} of the target's tokens, so it can only draft.")
    use = f" and `drafter: {output.name}` in an endpoint" if tokens is not None else ""
    line = f"Serve it by a line under `models:`{use}\n  {output.name}: {{path: {output}}}"
    console.print(line, markup=False, soft_wrap=True)


def _texts(tokenizer: "PreTrainedTokenizerBase", data: Path | None) -> list[list[int]]:
    from training.finetuning.examples import encode, read_examples

    if data is None:
        return [tokenizer(text)["input_ids"][:_MOST_TOKENS] for text in _TEXTS]
    rows = [row for example in read_examples(data) for row in encode(example, tokenizer, max_length=_MOST_TOKENS)]
    return [row.tokens for row in rows]


def _kept(
    console: Console,
    model: "PreTrainedModel",
    texts: Sequence[Sequence[int]],
    layers: int | None,
    dropped: set[int] | None,
) -> list[int]:
    """Return the layers to keep, and show all layers with their influence."""
    import torch

    from training.pruning import block_influence, most_influential

    influence = block_influence(model, (torch.tensor([text]) for text in texts[:_MOST_TEXTS]))
    count = len(influence)
    if dropped is not None and not dropped < set(range(count)):
        raise ConfigError(f"--drop-layers {sorted(dropped)}: the model has layers 0 to {count - 1}, and must keep one")
    if dropped is None:
        kept = most_influential(influence, count if layers is None else layers)
    else:
        kept = sorted(set(range(count)) - dropped)
    table = Table("layer", "influence", "", box=SIMPLE)
    for index, value in enumerate(influence):
        table.add_row(str(index), f"{value:.4f}", "" if index in kept else "dropped")
    console.print(table)
    return kept


def _special(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the tokens that a drafter can't do without: control tokens, and those that end texts."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, *listed})
