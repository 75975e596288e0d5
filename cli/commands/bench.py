"""`consort bench`: the worth of speculation for a target and its drafter or heads here, as a table and in words."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from decoding.errors import ConfigError
from engine.model.thread_environment import compute_environment

if TYPE_CHECKING:
    from cli.commands.profiling import Profile
    from deployments.configuration.config import ServerConfig

_ENDPOINT = "bench"
_SLOTS = 16  # the most streams that are measured
_MAX_LENGTH = 512


@click.command(short_help="Will speculation pay for two models here?")
@click.option("--target", metavar="MODEL", help="A folder, or an id on the Hugging Face Hub.")
@click.option("--drafter", metavar="MODEL", help="The same, for the model that drafts.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="Take the pair from a server's configuration; by default the bundled pair.",
)
@click.option(
    "--endpoint", help="Which of the configuration's endpoints; by default the first of one model that drafts."
)
@click.option("--dtype", help="Of both models: auto (as stored), float32, bfloat16 or float16.")
@click.option("--target-device", metavar="DEVICE", help="auto, cpu or cuda.")
@click.option("--drafter-device", metavar="DEVICE", help="The same, for the drafter.")
@click.option("--target-threads", type=click.IntRange(1), help="CPU threads; by default torch's choice.")
@click.option("--drafter-threads", type=click.IntRange(1), help="The same, for the drafter.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help='Lines of text, or of {"prompt": …} in a .jsonl file; by default Python code.',
)
@click.option("--count", type=click.IntRange(1), default=16, show_default=True, help="Prompts to answer.")
@click.option("--new-tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens of each answer.")
@click.option("--temperature", default=0.0, show_default=True, help="Of the answers, and of the drafts.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def bench(
    target: str | None,
    drafter: str | None,
    config_path: Path | None,
    endpoint: str | None,
    dtype: str | None,
    prompts: Path | None,
    count: int,
    new_tokens: int,
    temperature: float,
    as_json: bool,
    **model_options: str | int | None,
) -> None:
    """Measure a target and its drafter or heads here: will speculation pay, with which draft length, what limits it?"""
    if (target is None) != (drafter is None):
        raise click.UsageError("--target and --drafter go together")
    if target is not None and drafter is not None:
        if config_path is not None or endpoint is not None:
            raise click.UsageError("give either --target and --drafter, or --config")
        config, name = pair_config(
            target,
            drafter,
            target_options=_options_of("target", model_options) | {"dtype": dtype},
            drafter_options=_options_of("drafter", model_options) | {"dtype": dtype},
        )
    elif dtype is not None or any(model_options.values()):
        raise click.UsageError("dtype, devices and threads are in the configuration; or give --target and --drafter")
    else:
        config, name = configured_pair(config_path, endpoint)
    texts = read_prompts(prompts, count)
    os.environ |= compute_environment(None)  # before torch is imported
    run_bench(
        Console(highlight=False), config, name, texts, new_tokens=new_tokens, temperature=temperature, as_json=as_json
    )


def _options_of(role: str, model_options: Mapping[str, str | int | None]) -> dict[str, str | int | None]:
    """The options that begin with a role's name, without it."""
    prefix = f"{role}_"
    return {name.removeprefix(prefix): value for name, value in model_options.items() if name.startswith(prefix)}


def run_bench(
    console: Console,
    config: "ServerConfig",
    endpoint: str,
    prompts: Sequence[str],
    *,
    new_tokens: int,
    temperature: float,
    as_json: bool,
) -> None:
    """Measure and print the results.

    Raises:
        ConfigError: a model can't be loaded, or the answers are too short for a measurement.
        InvalidRequestError: a prompt does not fit, or the temperature is out of range.
    """
    from transformers.utils.logging import disable_progress_bar  # this and the next import torch, which takes seconds

    from cli.commands.advice import as_json as json_of
    from cli.commands.profiling import measure_profile

    disable_progress_bar()
    progress = Console(stderr=True, highlight=False) if as_json else console
    with reporting(progress) as report:
        profile = measure_profile(
            config, endpoint, prompts, new_tokens=new_tokens, temperature=temperature, report=report
        )
    if as_json:
        console.print_json(json.dumps(json_of(profile)))
    else:
        _show(console, profile)


def pair_config(
    target: str, drafter: str, *, target_options: dict[str, Any], drafter_options: dict[str, Any]
) -> tuple["ServerConfig", str]:
    """Return a configuration of two models, and its endpoint. Options are keys of `models.NAME`; None for the default.

    Raises:
        ConfigError: an option is wrong, or there is no such folder.
    """
    from deployments.configuration.config import parse_config

    models = {
        name: {"path": path, **_model_options(options)}
        for name, path, options in (("target", target, target_options), ("drafter", drafter, drafter_options))
    }
    document = {"models": models, "endpoints": {_ENDPOINT: {"target": "target", "drafter": "drafter"}}}
    return parse_config(document, folder=Path.cwd()), _ENDPOINT


def configured_pair(path: Path | None, endpoint: str | None) -> tuple["ServerConfig", str]:
    """Return a configuration and its endpoint of one model that drafts. path: None for the bundled pair.

    endpoint: None for the first.

    Raises:
        ConfigError: the configuration is wrong, or has no such endpoint.
    """
    from deployments.configuration.config import TINY_CONFIG, load_config

    path = path or TINY_CONFIG
    config = load_config(path)
    drafting = [
        name
        for name, settings in config.endpoints.items()
        if (settings.drafter or settings.heads) and settings.kind not in ("ensemble", "contrastive")
    ]
    wanted = drafting[0] if endpoint is None and drafting else endpoint
    if wanted not in drafting:
        known = ", ".join(drafting) or "none"
        raise ConfigError(f"{path}: no endpoint {wanted or ''} of one model that drafts; those that do: {known}")
    for model in config.models.values():
        model.slots, model.max_length = _SLOTS, min(model.max_length or _MAX_LENGTH, _MAX_LENGTH)
    return config, wanted


def read_prompts(path: Path | None, count: int) -> list[str]:
    """Read the first prompts of a file: a .jsonl file has a "prompt" per line, any other file a text per line.

    path: None for the bundled Python code.

    Raises:
        ConfigError: the file can't be read, or has no prompts.
    """
    from deployments.configuration.paths import ROOT

    path = path or ROOT / "models" / "heldout.jsonl"
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()][:count]
        prompts = [json.loads(line)["prompt"] for line in lines] if path.suffix == ".jsonl" else lines
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"can't read prompts from {path}: {error!r}") from error
    if not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        raise ConfigError(f"{path}: prompts should be one text per line, and at least one")
    return prompts


def _model_options(options: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if value is not None}
    gpus = {"num_gpus": 1} if str(given.get("device", "")).startswith("cuda") else {}
    return {"slots": _SLOTS, "max_length": _MAX_LENGTH, **gpus, **given}


@contextmanager
def reporting(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that reports the step that begins; shows finished steps with their durations."""
    from cli.commands.progress import ProgressDisplay
    from deployments.cluster import StartProgress

    with ProgressDisplay(console, done="done") as display:
        yield lambda step: display.watch([StartProgress(step, "loading")])
        display.watch([])


def _show(console: Console, profile: "Profile") -> None:
    from cli.commands.advice import NOISY, advise

    tokens = sum(map(len, profile.accepted))
    kind, has = (f"{profile.proposer} heads", "have") if profile.is_in_step else ("drafter", "has")
    console.print(
        f"\n{profile.target} with the {kind} {profile.drafter}, temperature {profile.temperature:g}: over {tokens} "
        f"tokens of the target's own answers, the {kind} {has} the same token {profile.acceptance:.0%} of the time.",
        soft_wrap=True,
    )
    console.print(_time_table(profile))
    console.print(_speed_up_table(profile))
    if profile.spread > NOISY:
        console.print(
            f"[yellow]![/] The machine is noisy: repeated steps differ by {profile.spread:.0%}. Something else may be "
            "running; don't trust differences below that.",
            soft_wrap=True,
        )
    for advice in advise(profile):
        mark = "[green]✓[/]" if advice.pays else "[yellow]✗[/]"
        console.print(f"{mark} {advice.sentence}", soft_wrap=True)


def _time_table(profile: "Profile") -> Table:
    """Return a table of step times: the target's by tokens per stream, and those of one draft token."""
    widths = sorted({width for _, width in profile.target_step_s})
    title = "ms per draft token, and per step of the target by tokens per stream"
    table = Table("streams", "drafts", *map(str, widths), box=SIMPLE, title=title)
    for streams, draft_step_s in profile.draft_step_s.items():
        steps = (profile.target_step_s[streams, width] for width in widths)
        table.add_row(str(streams), *(f"{seconds * 1e3:.1f}" for seconds in (draft_step_s, *steps)))
    return table


def _speed_up_table(profile: "Profile") -> Table:
    """Return a table by draft length: tokens per step, and speed-ups with drafting hidden and alternating."""
    title = "speed-up at best" if profile.is_in_step else "speed-up at best: drafting hidden (alternating)"
    table = Table("draft length", "tokens/step", box=SIMPLE, title=title)
    for streams in profile.draft_step_s:
        table.add_column(f"{streams} stream{'s' if streams > 1 else ''}", justify="right")
    for draft_length in profile.draft_lengths:
        columns = [profile.limits(streams, draft_length) for streams in profile.draft_step_s]
        speed_ups = (
            f"{limits.hidden:.2f}" + ("" if profile.is_in_step else f" ({limits.alternating:.2f})")
            for limits in columns
        )
        table.add_row(str(draft_length), f"{columns[0].tokens_per_step:.2f}", *speed_ups)
    return table
