"""The commands that measure without a running server: `consort bench` and `consort compare`."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from cli.serving.progress import reporting
from engine.loading.host import compute_environment
from evaluation.prompts import MAX_TOKENS, PROMPTS, read_prompts

if TYPE_CHECKING:
    from deployments.configuration.config import ServerConfig
    from evaluation.workload import Workload

Command = Callable[..., Any]

_console = Console(highlight=False)
_PROMPTS = 'Lines of text, or of {"prompt": …} in a .jsonl file; by default '


@dataclass(frozen=True, slots=True, kw_only=True)
class _Texts:
    """The options of both commands that say which texts to write."""

    endpoint: str | None
    prompts: Path | None
    count: int
    new_tokens: int
    temperature: float
    as_json: bool

    def workload(self, configured: tuple["ServerConfig", str], prompts: Sequence[str]) -> "Workload":
        """Return the workload to measure. configured: a configuration and the name of its endpoint."""
        from evaluation.workload import Workload

        config, endpoint = configured
        return Workload(
            config=config,
            endpoint=endpoint,
            prompts=prompts if self.prompts is None else read_prompts(self.prompts, self.count),
            new_tokens=self.new_tokens,
            temperature=self.temperature,
        )

    @property
    def progress(self) -> Console:
        """The console for progress messages: standard error when the results are JSON."""
        return Console(stderr=True, highlight=False) if self.as_json else _console


def _text_options(
    *, endpoint: str, prompts: str, fewest_tokens: int, new_tokens: int, temperature: float
) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of `_Texts`, which the command gets as `texts`."""
    shown = partial(click.option, show_default=True)
    options = (
        click.option("--endpoint", help=f"Which of the configuration's endpoints; by default the first {endpoint}."),
        click.option("--prompts", type=click.Path(path_type=Path), help=_PROMPTS + prompts),
        shown("--count", type=click.IntRange(1), default=16, help="The most prompts."),
        shown("--new-tokens", type=click.IntRange(fewest_tokens), default=new_tokens, help="Tokens of each answer."),
        shown("--temperature", default=temperature, help="Of the answers, drafts too."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables."),
    )

    def add(command: Command) -> Command:
        @wraps(command)
        def gather(**values: Any) -> None:
            texts = _Texts(**{field.name: values.pop(field.name) for field in fields(_Texts)})
            os.environ |= compute_environment(None)  # before torch is imported
            command(texts=texts, **values)

        for option in reversed(options):
            gather = option(gather)
        return gather

    return add


@click.command(short_help="Will speculation pay for two models here?")
@click.option("--target", metavar="MODEL", help="A folder, or an id on the Hugging Face Hub.")
@click.option("--drafter", metavar="MODEL", help="The same, for the model that drafts.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="Take the pair from a server's configuration; by default the bundled pair.",
)
@click.option("--dtype", help="Of both models: auto (as stored), float32, bfloat16 or float16.")
@click.option("--target-device", metavar="DEVICE", help="auto, cpu or cuda.")
@click.option("--drafter-device", metavar="DEVICE", help="The same, for the drafter.")
@click.option("--target-threads", type=click.IntRange(1), help="CPU threads; by default torch's choice.")
@click.option("--drafter-threads", type=click.IntRange(1), help="The same, for the drafter.")
@_text_options(
    endpoint="of one model that drafts", prompts="Python code.", fewest_tokens=2, new_tokens=64, temperature=0.0
)
def bench(
    target: str | None,
    drafter: str | None,
    config_path: Path | None,
    dtype: str | None,
    texts: _Texts,
    **model_options: str | int | None,
) -> None:
    """Measure a target and its drafter or heads here: will speculation pay, with which draft length, what limits it?"""
    from deployments.configuration.config import TINY_CONFIG
    from deployments.configuration.paths import ROOT
    from evaluation.workload import drafting_endpoint, pair_config

    if (target is None) != (drafter is None):
        raise click.UsageError("--target and --drafter go together")
    if target is not None and drafter is not None:
        if config_path is not None or texts.endpoint is not None:
            raise click.UsageError("give either --target and --drafter, or --config")
        configured = pair_config(
            target,
            drafter,
            target_options=_options_of("target", model_options) | {"dtype": dtype},
            drafter_options=_options_of("drafter", model_options) | {"dtype": dtype},
        )
    elif dtype is not None or any(model_options.values()):
        raise click.UsageError("dtype, devices and threads are in the configuration; or give --target and --drafter")
    else:
        configured = drafting_endpoint(config_path or TINY_CONFIG, texts.endpoint)
    workload = texts.workload(configured, read_prompts(ROOT / "models" / "heldout.jsonl", texts.count))
    from evaluation.advice import as_json, show  # these import torch, which takes seconds
    from evaluation.profiling import measure_profile

    with reporting(texts.progress) as report:
        profile = measure_profile(workload, report)
    if texts.as_json:
        _console.print_json(json.dumps(as_json(profile)))
    else:
        show(_console, profile)


def _options_of(role: str, model_options: Mapping[str, str | int | None]) -> dict[str, str | int | None]:
    """Return the options whose names begin with the role, with that prefix removed."""
    prefix = f"{role}_"
    return {name.removeprefix(prefix): value for name, value in model_options.items() if name.startswith(prefix)}


@click.command(short_help="Is an ensemble better than its members alone?")
@click.argument("config_path", metavar="[CONFIG]", type=click.Path(path_type=Path), required=False)
@click.option("--seeds", type=click.IntRange(1), default=4, show_default=True, help="Texts for each prompt.")
@click.option("--samples", type=click.IntRange(2, 32), default=5, show_default=True, help="For self-consistency.")
@_text_options(
    endpoint="with members",
    prompts="five prompts that are built in.",
    fewest_tokens=4,
    new_tokens=MAX_TOKENS,
    temperature=1.0,
)
def compare(config_path: Path | None, seeds: int, samples: int, texts: _Texts) -> None:
    """Write the same prompts with each member alone, with self-consistency and with the ensemble, side by side."""
    from deployments.configuration.config import ENSEMBLE_CONFIG
    from evaluation.workload import ensemble_endpoint

    configured = ensemble_endpoint(config_path or ENSEMBLE_CONFIG, texts.endpoint)
    workload = texts.workload(configured, PROMPTS[: texts.count])
    from evaluation.comparison import measure_comparison  # imports torch, which takes seconds

    with reporting(texts.progress) as report:
        comparison = measure_comparison(workload, seeds=seeds, samples=samples, report=report)
    if texts.as_json:
        _console.print_json(json.dumps(comparison.document()))
    else:
        comparison.show(_console)
