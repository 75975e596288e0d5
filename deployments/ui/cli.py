"""The `consort` command. Ray and torch are imported late, so that it starts fast."""

import importlib.metadata
import json
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from decoding.errors import ConsortError
from deployments.client import DEFAULT_URL, Client
from deployments.cluster import check_demand, drain, local_client, serving
from deployments.configuration.access.keys import ENVIRONMENT_KEY, key_of
from deployments.configuration.catalogue import catalogue
from deployments.configuration.config import DEFAULT_CONFIG, ServerConfig, load_config
from deployments.configuration.model import IS_CHECKOUT
from deployments.planning.hub import Snapshot, fetch_all, on_disk, stay_offline
from deployments.planning.machine import prefer_gpus, this_machine
from deployments.ui.commands.bench import bench
from deployments.ui.commands.compare import compare
from deployments.ui.commands.demo import run_demo
from deployments.ui.commands.finetune import finetune
from deployments.ui.commands.progress import ProgressDisplay
from deployments.ui.commands.prune import prune
from deployments.ui.commands.train import train
from deployments.ui.console.commands import chat, complete, compress, report, status
from deployments.ui.serving.completion import install_completion
from deployments.ui.serving.options import model_options
from deployments.ui.serving.plan_lines import plan_lines
from deployments.ui.serving.pull import pull
from deployments.ui.serving.source import Source, as_yaml, read_source

_console = Console(highlight=False)
_config_argument = click.argument(
    "config_path", metavar="[CONFIG]", type=click.Path(path_type=Path), default=DEFAULT_CONFIG
)
_address_option = click.option(
    "--address", envvar="RAY_ADDRESS", help="Serve on a running Ray cluster (auto: the one on this machine)."
)
_verbose_option = click.option("--verbose", is_flag=True, help="Show what Ray and the replicas print.")


def _version() -> str:
    try:
        return importlib.metadata.version("consort")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


class _Group(click.Group):
    """Shows our own errors as one message."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ConsortError as error:
            notes: list[str] = getattr(error, "__notes__", [])
            raise click.ClickException("\n".join([str(error), *notes])) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), prog_name="consort")
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


for _command in (bench, chat, compare, complete, compress, finetune, prune, pull, report, status, train):
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
    help="Refuse what would wait for longer; 0: than half an answer.",
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
def serve(
    source: str | None,
    host: str | None,
    port: int | None,
    api_key: str | None,
    insecure: bool,
    max_queue_wait: float | None,
    dry_run: bool,
    print_config: bool,
    address: str | None,
    verbose: bool,
    log_level: str | None,
    **options: object,
) -> None:
    """Serve a MODEL (a folder, a .gguf file or an id on the Hugging Face Hub), or what a CONFIG says (a .yaml file).

    By default SmolLM2-135M-Instruct, until Ctrl-C. GPUs are used where there are any.
    """
    own = read_source(source, options)
    config = _with_http(own.config, host=host, port=port, max_queue_wait_s=max_queue_wait)
    if api_key is not None:
        config.http.add_key("command-line", key_of(api_key, field="--api-key", admin=True))
    if not print_config:
        config.http = config.http.guarded(insecure=insecure)
    own = replace(own, config=config)
    snapshots: Mapping[str, Snapshot] = {}
    if address is None:
        config, snapshots = _plan(own, weights=not (dry_run or print_config), quiet=print_config)
    if print_config:
        click.echo(as_yaml(config).encode(), nl=False)  # files are read as UTF-8, whatever the terminal has
        return
    if dry_run:
        _check(on_disk(config, snapshots))
        return
    own_key = _add_own_key(config)
    with _served(config, address=address, log_level="info" if verbose else log_level):
        _show_token_reports(config, own_key)
        _show_how_to_go_on(config)
        _console.print("[dim]Ctrl-C stops the server.[/]")
        _wait_for_interrupt()
        _drain(config)


@main.command(short_help="Show the default model at work, and stop.")
@click.option("--keep", is_flag=True, help="Keep serving afterwards, until Ctrl-C.")
@click.option("--port", type=click.IntRange(1, 65535), help="Listen on this port instead of a free one.")
@_verbose_option
def demo(keep: bool, port: int | None, verbose: bool) -> None:
    """Serve the default model, show a streamed answer and what speculation saved, and stop."""
    source = Source(_with_http(load_config(), port=port or _free_port()))
    config, _ = _plan(source, weights=True, quiet=True)
    with _served(config, address=None, log_level="info" if verbose else None):
        run_demo(Client(config.http.url, os.environ.get(ENVIRONMENT_KEY)), _console, model=next(iter(config.endpoints)))
        if keep:
            _show_how_to_go_on(config)
            _wait_for_interrupt()
    if not keep:
        command = "make serve" if IS_CHECKOUT else "consort serve"  # a checkout's environment is not on the PATH
        _console.print(f"\nNext: [bold]{command}[/], and in another terminal:")
        _show_request(load_config())


@main.command(short_help="List what clients can ask for.")
@_config_argument
@click.option("--url", help="Ask the server at this URL instead of reading a configuration.")
@click.option("--api-key", envvar=ENVIRONMENT_KEY, help="The server's key; better in CONSORT_API_KEY.")
def models(config_path: Path, url: str | None, api_key: str | None) -> None:
    """List what clients can ask for, and the models behind it."""
    if url is not None:
        _console.print(_served_table(Client(url, api_key)))
    else:
        _console.print(_configured_table(load_config(config_path)))


@main.command(short_help="Set how many replicas a model has.")
@click.argument("model")
@click.argument("replicas", type=click.IntRange(0))
@click.option("--url", envvar="CONSORT_URL", default=DEFAULT_URL, show_default=True, help="The server.")
@click.option("--api-key", envvar="CONSORT_API_KEY", help="Its key; better in CONSORT_API_KEY.")
def scale(model: str, replicas: int, url: str, api_key: str | None) -> None:
    """Give a MODEL of a running server so many REPLICAS, whatever its load. Drafters can do with 0."""
    client, body = Client(url, api_key), {"model": model, "replicas": replicas}
    client.checked("/scale", client.post("/scale", body))
    _console.print(f"{model}: {replicas} replica(s), once they are up or drained; `consort status` shows them")


@main.command(short_help="Turn pickled heads into safetensors, without running their code.")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
def convert_heads(folder: Path) -> None:
    """Write a .safetensors file beside each pickled file of tensors in FOLDER."""
    from actors.heads.converter import convert  # imports torch

    for file in convert(folder):
        _console.print(f"wrote {file}")


def _plan(source: Source, *, weights: bool, quiet: bool) -> tuple[ServerConfig, Mapping[str, Snapshot]]:
    """Get what the Hub has, decide what this machine decides, and say so. weights: whether to get them, too.

    Returns:
        The configuration, and its models of the Hub by name.
    """
    snapshots = fetch_all(source.config, files="weights" if weights else "settings")
    config, plan = source.planned(this_machine(), snapshots)
    if not quiet:
        _console.print(*plan_lines(plan, config), sep="\n", markup=False, soft_wrap=True)
    if weights:
        stay_offline(config)
        prefer_gpus(plan.gpus)
    return config, snapshots


@contextmanager
def _served(config: ServerConfig, *, address: str | None, log_level: str | None) -> Iterator[None]:
    """The application, with its progress on the terminal while it comes up. log_level: None shows no logs."""
    with ProgressDisplay(_console) as display:
        with serving(
            config, address=address, verbose=log_level is not None, log_level=log_level or "error", watch=display.watch
        ):
            display.finish()
            yield
        _console.print("[dim]Stopped.[/]")


def _with_http(config: ServerConfig, **given: object) -> ServerConfig:
    """The configuration with what the command line says of `http`; None: nothing."""
    changed = {name: value for name, value in given.items() if value is not None}
    return config.model_copy(update={"http": config.http.model_copy(update=changed)})


def _check(config: ServerConfig) -> None:
    from torch.cuda import device_count  # this and the next imports take seconds

    from actors.loading.checkpoint import check_model
    from deployments.endpoints.loading import load_endpoints

    check_demand(config, {"GPU": device_count(), "CPU": os.cpu_count() or 1})
    for name, model in config.models.items():
        check_model(model.spec(name))
    for name, served in load_endpoints(config).items():
        _show_reports_of(name, served.token_reports())
    _console.print(_configured_table(config))
    _console.print("[green]✓[/] the configuration can be served")


def _add_own_key(config: ServerConfig) -> str | None:
    """A key with which this command asks the server: of the others it knows digests. None where anybody may ask."""
    if not config.http.api_keys:
        return None
    secret = secrets.token_urlsafe(32)
    config.http.add_key("consort-serve", key_of(secret, field="", admin=False))
    return secret


def _show_token_reports(config: ServerConfig, key: str | None) -> None:
    """What the server has found out about models that have other tokens than their target."""
    with suppress(ConsortError):  # where it listens may be out of reach from here
        for card in local_client(config.http, key).document("/v1/models")["data"]:
            _show_reports_of(card["id"], card["through_text"])


def _show_reports_of(endpoint: str, reports: Mapping[str, str]) -> None:
    for model, words in reports.items():
        _console.print(f"{endpoint}: {model} reads and writes in tokens of its own: {words}", markup=False)


def _show_how_to_go_on(config: ServerConfig) -> None:
    url = config.http.url
    option = "" if url == DEFAULT_URL else f" --url {url}"
    _console.print(f"\n[bold green]Serving[/] on [bold]{url}[/], for browsers too. In another terminal:")
    _console.print(f"  consort chat{option}", soft_wrap=True)
    if config.http.metrics_port is not None:
        _console.print(f"The replicas' metrics: http://127.0.0.1:{config.http.metrics_port}/metrics", soft_wrap=True)
    _show_request(config)


def _show_request(config: ServerConfig) -> None:
    """A curl command, on lines that can be copied whatever the terminal's width."""
    messages = [{"role": "user", "content": "How do I sleep better?"}]
    body = {"model": next(iter(config.endpoints)), "messages": messages, "max_tokens": 128, "stream": True}
    lines = (
        f"  curl -N {config.http.url}/v1/chat/completions \\",
        "    -H 'Content-Type: application/json' \\",
        *(['    -H "Authorization: Bearer $CONSORT_API_KEY" \\'] if config.http.api_keys else []),
        f"    -d {shlex.quote(json.dumps(body))}",
    )
    _console.print("\n".join(lines), markup=False, soft_wrap=True)


def _configured_table(config: ServerConfig) -> Table:
    table = Table("model", "target", "drafter", "draft length", "context", box=SIMPLE)
    for entry in catalogue(config):
        row = (entry.endpoint, entry.target, entry.drafter, entry.draft_length, entry.context_length or "–")
        table.add_row(*map(str, row))
    return table


def _served_table(client: Client) -> Table:
    table = Table("model", "target", "drafter", "draft length", "context", "ready", box=SIMPLE)
    for card in client.document("/v1/models")["data"]:
        shown = (card["id"], card["target"], card["drafter"] or "–", card["draft_length"], card["context_length"])
        table.add_row(*map(str, shown), "yes" if card["ready"] else "no")
    return table


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _drain(config: ServerConfig) -> None:
    """Give requests in progress time to end. Another Ctrl-C or SIGTERM stops the server at once."""
    _console.print(f"[dim]Stopping: requests in progress get {config.http.drain_s:g} s. Ctrl-C again stops at once.[/]")
    with suppress(KeyboardInterrupt, TimeoutError):
        left = drain(config)
        if left:
            _console.print(f"[yellow]{left} request(s) have not ended in time.[/]")


def _wait_for_interrupt() -> None:
    """Until Ctrl-C or SIGTERM, which interrupts while a server runs."""
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(1)  # `signal.pause` would miss a signal that comes just before it
