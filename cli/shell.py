"""The `consort` command. What a command needs is imported when it runs, so that `--help` is fast."""

import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal

import click
from click.shell_completion import get_completion_class
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from cli.measure import bench, compare
from cli.online import audit, chat, complete, report, scale, status
from cli.serving.options import DTYPES, ServeOptions, model_options
from cli.train import finetune, train
from decoding.errors import ConsortError

_SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_CONSORT_COMPLETE"  # click answers completions when it is set
_console = Console(highlight=False)
_address_option = click.option(
    "--address", envvar="RAY_ADDRESS", help="Serve on a running Ray cluster (auto: the one on this machine)."
)
_verbose_option = click.option("--verbose", is_flag=True, help="Show what Ray and the replicas print.")
_REMOVED = {
    "compress": "send POST /compress, or `prompt_compression` in a request (docs/http.md)",
    "convert-heads": "pickled heads are read where there are no safetensors",
    "prune": "`consort train drafter MODEL --epochs 0` writes what is left, untrained; see --layers and --vocabulary",
}


def install_completion(context: click.Context, parameter: click.Parameter, shell: str | None) -> None:
    """Write the script for a shell, say how it is found, and end. A click callback."""
    if shell is None or context.resilient_parsing:
        return
    if shell == "auto":
        shell = Path(os.environ.get("SHELL", "")).name
    completion = get_completion_class(shell) if shell in _SHELLS else None
    if completion is None:
        raise click.BadParameter(f"should be {', '.join(_SHELLS)}, not {shell!r}", context, parameter)
    file, advice = _script(shell)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(completion(context.command, {}, "consort", _VARIABLE).source(), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"can't write {file}: {error.strerror}") from error
    click.echo(f"wrote {file}; {advice}")
    context.exit()


def _script(shell: str) -> tuple[Path, str]:
    """Return the file where a shell looks for the script, and what is left to do."""
    match shell:
        case "bash":
            folder = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
            file = folder / "bash-completion" / "completions" / "consort"
            return file, f"new shells use it, or without the package bash-completion: source {file}"
        case "zsh":
            return Path.home() / ".zfunc" / "_consort", "in ~/.zshrc: fpath+=~/.zfunc; autoload -Uz compinit; compinit"
        case _:
            folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
            return folder / "fish" / "completions" / "consort.fish", "new shells use it"


def _show_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    """Print the version, and end. A click callback."""
    from importlib.metadata import PackageNotFoundError, version  # for this alone, and slow

    if not wanted or context.resilient_parsing:
        return
    try:
        number = version("consort")
    except PackageNotFoundError:
        number = "(not installed)"
    click.echo(f"consort, version {number}")
    context.exit()


class _Group(click.Group):
    """Shows our own errors as one message, and says what does the work of commands that are gone."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in _REMOVED:
            raise click.UsageError(f"`consort {args[0]}` is gone: {_REMOVED[args[0]]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ConsortError as error:
            notes: list[str] = getattr(error, "__notes__", [])
            raise click.ClickException("\n".join([str(error), *notes])) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.option(
    "--install-completion",
    metavar="[bash|zsh|fish]",
    is_flag=False,
    flag_value="auto",
    expose_value=False,
    is_eager=True,
    callback=install_completion,
    help="Let the shell complete commands and options.",
)
def main() -> None:
    """Language models that play together: a small drafter and a large target behind one OpenAI-compatible endpoint."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not all terminals have all characters


for _command in (audit, bench, chat, compare, complete, finetune, report, scale, status, train):
    main.add_command(_command)


@main.command(short_help="Serve a model or a configuration, until Ctrl-C.")
@click.argument("source", metavar="[MODEL|CONFIG]", required=False, type=click.Path())
@model_options
@click.option("--host", help="Listen on this address instead of the configured one.")
@click.option("--port", type=click.IntRange(1, 65535), help="Listen on this port instead of the configured one.")
@click.option("--api-key", help="Ask clients for this key too. CONSORT_API_KEY does the same, unseen by `ps`.")
@click.option("--insecure", is_flag=True, help="Let other machines ask without a key.")
@click.option(
    "--max-queue-wait",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Refuse requests that would wait longer; 0: longer than half an answer takes.",
)
@click.option("--dry-run", is_flag=True, help="Check the configuration and its tokenizers, and stop there.")
@click.option("--print-config", is_flag=True, help="Print the configuration that serves the same, and stop there.")
@_address_option
@_verbose_option
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Show what Ray and the replicas print, from this level on; --verbose is info.",
)
def serve(source: str | None, verbose: bool, **values: Any) -> None:
    """Serve a MODEL (a folder, a .gguf file or an id on the Hugging Face Hub), or what a CONFIG says (a .yaml file).

    By default smollm2 (SmolLM2-135M-Instruct), until Ctrl-C. GPUs are used where there are any.
    """
    from cli.serving.server import run_server

    if verbose:
        values["log_level"] = "info"
    options = ServeOptions.take(values)
    run_server(source, options, model_options=values)


@main.command(short_help="Show the default model at work, and stop.")
@click.option("--keep", is_flag=True, help="Keep serving afterwards, until Ctrl-C.")
@click.option("--port", type=click.IntRange(1, 65535), help="Listen on this port instead of a free one.")
@_verbose_option
def demo(keep: bool, port: int | None, verbose: bool) -> None:
    """Serve the default model, show a streamed answer and what speculation saved, and stop."""
    from cli.serving.server import run_demo_server

    run_demo_server(keep=keep, port=port, log_level="info" if verbose else None)


@main.command(short_help="List what clients can ask for.")
@click.argument("config_path", metavar="[CONFIG]", type=click.Path(path_type=Path), required=False)
@click.option("--url", help="Ask the server at this URL instead of reading a configuration.")
@click.option("--api-key", envvar="CONSORT_API_KEY", help="The server's key; better in CONSORT_API_KEY.")
def models(config_path: Path | None, url: str | None, api_key: str | None) -> None:
    """List what clients can ask for, and the models behind it."""
    if url is not None:
        from deployments.client import Client

        table = Table("model", "target", "drafter", "draft length", "context", "ready", box=SIMPLE)
        for card in Client(url, api_key).document("/v1/models")["data"]:
            shown = (card["id"], card["target"], card["drafter"] or "–", card["draft_length"], card["context_length"])
            table.add_row(*map(str, shown), "yes" if card["ready"] else "no")
        _console.print(table)
        return
    from cli.serving.source import configured_table
    from deployments.configuration.config import DEFAULT_CONFIG, load_config

    _console.print(configured_table(load_config(config_path or DEFAULT_CONFIG)))


@main.command(short_help="Get models ready: from the Hub, or from a .gguf file.")
@click.argument("model", required=False, type=click.Path())
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="auto", help="Of the weights of a .gguf file.")
def pull(model: str | None, revision: str | None, dtype: str) -> None:
    """Download MODEL, an id on the Hugging Face Hub, into its cache; or convert it, a .gguf file. Default: SmolLM2.

    A .gguf file of the Hub, org/name/file.gguf, is downloaded and converted.

    MODEL may also be a configuration that ends in .yaml: then all that it names is downloaded or converted.
    """
    from cli.serving.pull import pull_configuration, pull_model

    if model is None or not model.lower().endswith((".yaml", ".yml")):
        pull_model(model, revision, DTYPES[dtype])
    elif revision is not None or dtype != "auto":
        raise click.UsageError("--revision and --dtype are for a MODEL; in a configuration, set the keys")
    else:
        pull_configuration(Path(model))


@main.command(short_help="Write a copy of a model in 4 or 8 bits.")
@click.argument("model")
@click.option("--to", "kind", type=click.Choice(["int4", "int8", "nf4"]), default="int4", show_default=True)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="A new folder.")
def quantize(model: str, kind: Literal["int4", "int8", "nf4"], output: Path) -> None:
    """Write a quantised copy of MODEL, a folder or an id on the Hugging Face Hub.

    It serves like MODEL with `quantization`, but starts faster and takes less room on disk and while it is loaded.
    """
    from cli.serving.pull import quantize_model

    quantize_model(model, kind, output)
