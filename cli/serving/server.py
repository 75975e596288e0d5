"""What `consort serve` and `consort demo` do: plan, check, start, and say how to go on."""

import json
import math
import os
import secrets
import shlex
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

import click
from rich.console import Console

from cli.serving.cluster import check_demand, drain, local_client, serving, start_standby
from cli.serving.demo import run_demo
from cli.serving.options import ServeOptions
from cli.serving.progress import ProgressDisplay
from cli.serving.source import Source, as_yaml, configured_table, plan_lines, read_source
from decoding.errors import ConsortError
from deployments.client import Client
from deployments.configuration.api_keys import ENVIRONMENT_KEY, key_of
from deployments.configuration.config import ServerConfig, load_config
from deployments.configuration.document import Mistakes
from deployments.configuration.paths import IS_CHECKOUT
from deployments.fields.loopback import DEFAULT_URL
from deployments.planning.devices import has_room_for_standby, prefer_gpus, this_machine
from deployments.planning.hub import Snapshot, fetch_all, on_disk, stay_offline

_console = Console(highlight=False)


def run_server(source: str | None, options: ServeOptions, *, model_options: Mapping[str, object]) -> None:
    """Serve until Ctrl-C or SIGTERM, or only check or print what would be served.

    Raises ConfigError if the configuration is wrong, or this machine can't serve it; UnavailableError if Ray or Serve
    did not start.
    """
    own = read_source(source, model_options)
    http = {"host": options.host, "port": options.port, "max_queue_wait_s": options.max_queue_wait}
    config = _with_http(own.config, **http)
    if options.api_key is not None:
        config.http.add_key("command-line", key_of(options.api_key, field="--api-key", admin=True))
    if not options.print_config:
        config.http = config.http.guarded(insecure=options.insecure)
    own = replace(own, config=config)
    snapshots: Mapping[str, Snapshot] = {}
    if options.address is None:
        config, snapshots = _plan(
            own, weights=not (options.dry_run or options.print_config), quiet=options.print_config
        )
    if options.print_config:
        click.echo(as_yaml(config).encode(), nl=False)  # files are read as UTF-8, whatever the terminal has
        return
    if options.dry_run:
        _check(on_disk(config, snapshots))
        return
    own_key = _add_own_key(config)
    with _served(config, address=options.address, log_level=options.log_level):
        _show_cards(config, own_key)
        _show_how_to_go_on(config)
        _console.print("[dim]Ctrl-C stops the server.[/]")
        may_stand_by = options.address is None and has_room_for_standby()
        _wait_for_interrupt(standby=may_stand_by if config.http.standby is None else config.http.standby)
        _drain(config)


def run_demo_server(*, keep: bool, port: int | None, log_level: str | None) -> None:
    """Serve the default model, show it at work, and stop. keep: serve until Ctrl-C afterwards."""
    source = Source(_with_http(load_config(), port=port or _free_port()))
    config, _ = _plan(source, weights=True, quiet=True)
    with _served(config, address=None, log_level=log_level):
        run_demo(Client(config.http.url, os.environ.get(ENVIRONMENT_KEY)), _console, model=next(iter(config.endpoints)))
        if keep:
            _show_how_to_go_on(config)
            _wait_for_interrupt()
    if not keep:
        command = "make serve" if IS_CHECKOUT else "consort serve"  # a checkout's environment is not on the PATH
        _console.print(f"\nNext: [bold]{command}[/], and in another terminal:")
        _show_request(load_config())


def _plan(source: Source, *, weights: bool, quiet: bool) -> tuple[ServerConfig, Mapping[str, Snapshot]]:
    """Get what the Hub has, decide what this machine decides, and say so. What can't be here is said first.

    weights: whether to get them, too.

    Returns:
        The configuration, and its models of the Hub by name.
    """
    machine = this_machine()
    gpus = math.inf if machine.uncounted_gpus else len(machine.gpus)  # Ray may find what nvidia-smi does not
    check_demand(source.config, {"GPU": gpus, "CPU": os.cpu_count() or 1}, machine.unusable_gpus)
    snapshots = fetch_all(source.config, files="weights" if weights else "settings")
    config, plan = source.planned(machine, snapshots)
    if not quiet:
        _console.print(*plan_lines(plan, config), sep="\n", markup=False, soft_wrap=True)
    if weights:
        stay_offline(config)
        prefer_gpus(plan.gpus)
    return config, snapshots


@contextmanager
def _served(config: ServerConfig, *, address: str | None, log_level: str | None) -> Iterator[None]:
    """Run the application in the block; show its progress while it comes up. log_level: None shows no logs."""
    with ProgressDisplay(_console) as display:
        with serving(config, address=address, watch=display.watch, log_level=log_level):
            display.finish()
            yield
        _console.print("[dim]Stopped.[/]")


def _with_http(config: ServerConfig, **given: object) -> ServerConfig:
    """Return the configuration with these keys of `http`; None: as configured."""
    changed = {name: value for name, value in given.items() if value is not None}
    return config.model_copy(update={"http": config.http.model_copy(update=changed)})


def _check(config: ServerConfig) -> None:
    from deployments.endpoints.loading import load_endpoints
    from engine.loading.checkpoint import check_model, read_stored_config  # imports torch, which takes seconds
    from engine.loading.text_model import other_parts

    mistakes = Mistakes()
    for name, model in config.models.items():
        with mistakes.noted():
            check_model(model.spec(name))
            if parts := other_parts(read_stored_config(model.spec(name))):
                _console.print(f"{name}: serves the text model; its {' and '.join(parts)} parts are left out")
    mistakes.check()
    for name, served in load_endpoints(config).items():
        _show_reports_of(name, served.token_reports())
    _console.print(configured_table(config))
    _console.print("[green]✓[/] the configuration can be served")


def _add_own_key(config: ServerConfig) -> str | None:
    """Add a key for this command, which knows only digests of the others; None where anybody may ask."""
    if not config.http.api_keys:
        return None
    secret = secrets.token_urlsafe(32)
    config.http.add_key("consort-serve", key_of(secret, field="", admin=False))
    return secret


def _show_cards(config: ServerConfig, key: str | None) -> None:
    """Print what the server has found out about chat templates, and models that have other tokens than their target."""
    with suppress(ConsortError):  # where it listens may be out of reach from here
        for card in local_client(config.http, key).document("/v1/models")["data"]:
            _show_reports_of(card["id"], card["through_text"])
            if card["tools"] == "built-in":
                _console.print(f"{card['id']}: tools are shown by the built-in template; its own has no place for them")


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
    """Print a curl command, on lines that can be copied whatever the terminal's width."""
    messages = [{"role": "user", "content": "How do I sleep better?"}]
    body = {"model": next(iter(config.endpoints)), "messages": messages, "max_tokens": 128, "stream": True}
    lines = (
        f"  curl -N {config.http.url}/v1/chat/completions \\",
        "    -H 'Content-Type: application/json' \\",
        *(['    -H "Authorization: Bearer $CONSORT_API_KEY" \\'] if config.http.api_keys else []),
        f"    -d {shlex.quote(json.dumps(body))}",
    )
    _console.print("\n".join(lines), markup=False, soft_wrap=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _drain(config: ServerConfig) -> None:
    """Give requests in progress time to end. Another Ctrl-C or SIGTERM stops the server at once."""
    _console.print(f"[dim]Stopping: requests in progress get {config.http.drain_s:g} s. Ctrl-C again stops at once.[/]")
    with suppress(KeyboardInterrupt, TimeoutError):
        left = drain(config)
        if left:
            _console.print(f"[yellow]{left} request(s) have not ended in time.[/]")


def _wait_for_interrupt(*, standby: bool = False) -> None:
    """Wait for Ctrl-C or SIGTERM. standby: start a second coordinator meanwhile."""
    with suppress(KeyboardInterrupt):
        if standby:
            try:
                start_standby()
            except Exception as error:  # Serve's controller is busy or gone; one coordinator will do
                _console.print(f"No coordinator stands by: {error}", markup=False)
        while True:
            time.sleep(1)  # `signal.pause` would miss a signal that comes just before it
