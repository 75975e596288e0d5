"""The command `consort compare`."""

import os
from pathlib import Path

import click
from rich.console import Console

from cli.commands.bench import read_prompts
from engine.model.thread_environment import compute_environment
from evaluation.prompts import MAX_TOKENS, PROMPTS


@click.command(short_help="Is an ensemble better than its members alone?")
@click.argument("config_path", metavar="[CONFIG]", type=click.Path(path_type=Path), required=False)
@click.option("--endpoint", help="Which of the configuration's endpoints; by default the first with members.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help='Lines of text, or of {"prompt": …} in a .jsonl file; by default five prompts that are built in.',
)
@click.option("--count", type=click.IntRange(1), default=16, show_default=True, help="The most prompts to take.")
@click.option("--new-tokens", type=click.IntRange(4), default=MAX_TOKENS, show_default=True, help="Of each text.")
@click.option("--temperature", default=1.0, show_default=True, help="Of the texts.")
@click.option("--seeds", type=click.IntRange(1), default=4, show_default=True, help="Texts for each prompt.")
@click.option("--samples", type=click.IntRange(2, 32), default=5, show_default=True, help="For self-consistency.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, texts included, instead of a table.")
def compare(
    config_path: Path | None,
    endpoint: str | None,
    prompts: Path | None,
    count: int,
    new_tokens: int,
    temperature: float,
    seeds: int,
    samples: int,
    as_json: bool,
) -> None:
    """Write the same prompts with each member alone, with self-consistency and with the ensemble, side by side."""
    from cli.commands.comparison.report import configured_ensemble, run_compare
    from deployments.configuration.config import ENSEMBLE_CONFIG

    config, name = configured_ensemble(config_path or ENSEMBLE_CONFIG, endpoint)
    texts = list(PROMPTS[:count]) if prompts is None else read_prompts(prompts, count)
    os.environ |= compute_environment(None)  # before torch is imported
    run_compare(
        Console(highlight=False),
        config,
        name,
        texts,
        new_tokens=new_tokens,
        temperature=temperature,
        seeds=seeds,
        samples=samples,
        as_json=as_json,
    )
