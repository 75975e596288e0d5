"""The commands that talk to a running server: `consort chat`, `complete`, `audit`, `report`, `status`, `scale`."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
from rich.console import Console
from rich.text import Text

from deployments.fields.loopback import DEFAULT_URL

if TYPE_CHECKING:
    from deployments.client import Client

_FILE = click.Path(path_type=Path, dir_okay=False)
_VERDICTS = {"kept": "green", "differs": "red", "not offered": "dim"}  # of an audit, and their colours
_INTERRUPTED = 130  # the shells' exit status after Ctrl-C
_console = Console(highlight=False)
_errors = Console(highlight=False, stderr=True)
_model_option = click.option("--model", help="An endpoint of the server; by default the first that is ready.")
_set_option = click.option(
    "--set", "assignments", metavar="NAME=VALUE", multiple=True, help="Set a request parameter; may be repeated."
)
_colours_option = click.option(
    "--colours/--no-colours", default=True, help="Show by colour how each token came to be, on a terminal."
)


def _server_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options --url and --api-key."""
    url = click.option("--url", envvar="CONSORT_URL", default=DEFAULT_URL, show_default=True, help="The server.")
    key = click.option("--api-key", envvar="CONSORT_API_KEY", help="Its key; better in CONSORT_API_KEY.")
    return url(key(function))


def _client(url: str, api_key: str | None) -> "Client":
    from deployments.client import Client  # imports httpx, which `--help` does without

    return Client(url, api_key)


@click.command()
@_server_options
@_model_option
@click.option("--system", help="The system prompt.")
@_set_option
@_colours_option
def chat(
    url: str, api_key: str | None, model: str | None, system: str | None, assignments: Sequence[str], colours: bool
) -> None:
    """Talk to a model. /help lists commands; Ctrl-C stops a reply, Ctrl-D or /quit ends."""
    from cli.console.chat import Chat  # these import pydantic and the line editor
    from cli.console.conversation import Conversation, choose_model
    from cli.console.editor import PipeReader, TerminalEditor

    client = _client(url, api_key)
    card = choose_model(client.document("/v1/models")["data"], model)
    conversation = Conversation(card["id"])
    conversation.system = system
    for assignment in assignments:
        conversation.parameters.assign(assignment)
    session = Chat(client, _console, conversation, colours=colours)
    if sys.stdin.isatty() and sys.stdout.isatty():
        session.greet(card)
        session.run(TerminalEditor(session.suggestions, session.toolbar))
    else:
        session.run(PipeReader(sys.stdin))
        if session.failed:
            raise SystemExit(1)


@click.command()
@click.argument("prompt", required=False)
@_server_options
@_model_option
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Most tokens to add.")
@click.option("--temperature", type=float, help="0 is greedy; 1 by default.")
@click.option("--seed", type=int, help="The same seed gives the same text.")
@click.option("--speculate/--no-speculate", default=None, help="With the drafter, or the target alone: the same text.")
@_set_option
@_colours_option
@click.option("--compare", "comparing", is_flag=True, help="Both ways, one after the other, with their speeds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end.")
def complete(
    prompt: str | None,
    url: str,
    api_key: str | None,
    model: str | None,
    assignments: Sequence[str],
    colours: bool,
    comparing: bool,
    as_json: bool,
    **shorthands: object,
) -> None:
    """Continue a text: PROMPT, or what standard input has."""
    from cli.console import printer
    from cli.console.conversation import choose_model

    if comparing and as_json:
        raise click.UsageError("--compare and --json don't go together")
    client = _client(url, api_key)
    body = {**_parameters(assignments, shorthands), "prompt": _text(prompt)}
    body["model"] = choose_model(client.document("/v1/models")["data"], model)["id"]
    if as_json:
        generation = printer.complete_as_json(client, body, _console)
    elif comparing:
        generation = printer.complete_twice(client, body, _console, colours=colours)
    else:
        generation = printer.complete(client, body, _console, _errors, colours=colours)
    if generation.stopped:
        raise SystemExit(_INTERRUPTED)


@click.command()
@_server_options
@click.option("--endpoint", help="Measured with drafts and without; by default the first that drafts.")
@click.option("--prompts", type=click.File(encoding="utf-8"), help="Lines of text; by default five built-in prompts.")
@click.option("--max-tokens", type=click.IntRange(2), default=50, show_default=True, help="Tokens of each answer.")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), default="report", show_default=True, help="A folder."
)
def report(
    url: str,
    api_key: str | None,
    endpoint: str | None,
    prompts: TextIO | None,
    max_tokens: int,
    temperature: float,
    output: Path,
) -> None:
    """Compare ways of decoding on a running server: texts, speed, draft lengths. Writes Markdown, pictures and JSON."""
    from evaluation.prompts import PROMPTS
    from evaluation.server_report import Reporter, has_pictures, write_page

    texts = PROMPTS if prompts is None else [line for line in _read(prompts).split("\n") if line.strip()]
    if prompts is not None and not texts:
        raise click.UsageError(f"{prompts.name} has no prompts")
    measured = Reporter(_client(url, api_key), max_tokens=max_tokens, temperature=temperature).run(endpoint, texts)
    for path in write_page(measured, output):
        _console.print(str(path), markup=False)
    if not has_pictures():
        _console.print("There are no pictures, which need matplotlib: pip install 'consort[bench]'", markup=False)


@click.command(short_help="Does a server keep its word?")
@click.argument("url")
@click.option("--against", metavar="URL", help="A second server that should give the same answers, with other drafts.")
@click.option("--model", help="By default the first that the server lists.")
@click.option("--api-key", envvar="CONSORT_API_KEY", help="Both servers' key; better in CONSORT_API_KEY.")
@click.option("--requests", type=click.IntRange(2), default=16, show_default=True, help="Of most checks.")
@click.option("--max-tokens", type=click.IntRange(8), default=64, show_default=True, help="Of each of their answers.")
@click.option("--crowd", type=click.IntRange(1), default=32, show_default=True, help="Long requests at once.")
@click.option("--check", "names", multiple=True, help="Only this check; may be repeated.")
@click.option("--json", "json_path", type=_FILE, help="Write what it says to this file, too.")
@click.option("--html", "html_path", type=_FILE, help="The same, as a page.")
def audit(
    url: str,
    against: str | None,
    model: str | None,
    api_key: str | None,
    names: Sequence[str],
    json_path: Path | None,
    html_path: Path | None,
    **size: int,
) -> None:
    """Check whether the server at URL, with OpenAI's API, does what such servers promise.

    Does the same request get the same answer alone, in company, streamed, with drafts and without? Are usage,
    log-probabilities, stop strings, schemas and errors right? Fails if anything differs, and shows the smallest
    request that shows it. Let nobody else use the server meanwhile.
    """
    from evaluation.audit.audit import audit as run_audit
    from evaluation.audit.audit import limits, make_sample
    from evaluation.audit.report import SIGNS, command, document, page, summary
    from evaluation.audit.server import connect

    console = Console(highlight=False, soft_wrap=True)  # commands in it can be copied
    other = connect(against, None, api_key) if against else None
    server = connect(url, model, api_key, other=other)
    console.print(f"{server.model} at {server.url}, {server.name}", markup=False)
    results = []
    for result in run_audit(server, make_sample(server, **size), names):
        results.append(result)
        line = f"{SIGNS[result.verdict]} {result.check.name}: {summary(result)}"
        console.print(line, markup=False, style=_VERDICTS[result.verdict])
        if result.difference is not None:
            console.print(command(server, result.difference), markup=False, style="dim")
    console.print(limits(results), markup=False)
    if json_path is not None:
        json_path.write_text(json.dumps(document(server, results), indent=1, ensure_ascii=False), encoding="utf-8")
    if html_path is not None:
        html_path.write_text(page(server, results), encoding="utf-8")
    if any(result.verdict == "differs" for result in results):
        raise SystemExit(1)


@click.command()
@_server_options
@click.option("--watch", "watching", is_flag=True, help="Look again and again, until Ctrl-C.")
@click.option(
    "--interval", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between two looks."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with --watch a line for each look.")
def status(url: str, api_key: str | None, watching: bool, interval: float, as_json: bool) -> None:
    """Show what a server is doing: replicas, load, acceptance. Fails while no model can answer."""
    from cli.status import StatusReader, show, watch

    reader = StatusReader(_client(url, api_key))
    if watching:
        with suppress(KeyboardInterrupt):
            watch(reader, _console, interval_s=interval, as_json=as_json)
        return
    current = reader.read()
    show(current, _console, as_json=as_json)
    if current["status"] != "ready":
        raise SystemExit(1)


@click.command(short_help="Set how many replicas a model has.")
@click.argument("model")
@click.argument("replicas", type=click.IntRange(0))
@_server_options
@click.option("--wait", is_flag=True, help="Wait until so many are up, and fail if they are not in time.")
@click.option("--timeout", type=click.FloatRange(0), default=600, show_default=True, help="Seconds for --wait.")
def scale(model: str, replicas: int, url: str, api_key: str | None, wait: bool, timeout: float) -> None:
    """Give a MODEL of a running server so many REPLICAS, whatever its load. Drafters can do with 0."""
    from cli.status import wait_for_replicas

    client, body = _client(url, api_key), {"model": model, "replicas": replicas}
    client.checked("/scale", client.post("/scale", body))
    if wait:
        wait_for_replicas(
            client, model, replicas, partial(_console.print, markup=False, soft_wrap=True), timeout_s=timeout
        )
        _console.print(f"{model}: {replicas} replica(s)", markup=False)
    else:
        _console.print(f"{model}: {replicas} replica(s) wanted; `consort status` says how many are up", markup=False)


def _parameters(assignments: Sequence[str], shorthands: Mapping[str, object]) -> dict[str, object]:
    """Return the request parameters given by --set, or by options of their own such as --seed."""
    from cli.console.conversation import Parameters
    from deployments.apis.completions.request import CompletionRequest

    parameters = Parameters(CompletionRequest)
    for name, value in shorthands.items():
        if value is not None:
            parameters.set(name, json.dumps(value))
    for assignment in assignments:
        parameters.assign(assignment)
    return parameters.values


def _read(file: TextIO) -> str:
    """Return a file's text; raises ClickException if it can't be decoded."""
    try:
        return file.read()
    except UnicodeDecodeError as error:
        raise click.ClickException(f"can't read {file.name}: it is not {error.encoding.upper()} text") from error


def _text(prompt: str | None) -> str:
    """Return the prompt, or the text on standard input."""
    if prompt is None:
        if sys.stdin.isatty():
            _errors.print(Text("The text to continue; Ctrl-D at the start of a line ends it.", style="dim"))
        prompt = _read(sys.stdin)
    if not prompt:
        raise click.UsageError("there is no text to continue; give it as PROMPT or on standard input")
    return prompt
