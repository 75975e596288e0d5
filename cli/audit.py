"""`consort audit`: does a server keep its word?"""

import json
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

_console = Console(highlight=False, soft_wrap=True)
_COLOURS = {"kept": "green", "differs": "red", "not offered": "dim"}
_FILE = click.Path(path_type=Path, dir_okay=False)


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

    other = connect(against, None, api_key) if against else None
    server = connect(url, model, api_key, other=other)
    _console.print(f"{server.model} at {server.url}, {server.name}", markup=False)
    results = []
    for result in run_audit(server, make_sample(server, **size), names):
        results.append(result)
        line = f"{SIGNS[result.verdict]} {result.check.name}: {summary(result)}"
        _console.print(line, markup=False, style=_COLOURS[result.verdict])
        if result.difference is not None:
            _console.print(command(server, result.difference), markup=False, style="dim")
    _console.print(limits(results), markup=False)
    if json_path is not None:
        json_path.write_text(json.dumps(document(server, results), indent=1, ensure_ascii=False), encoding="utf-8")
    if html_path is not None:
        html_path.write_text(page(server, results), encoding="utf-8")
    if any(result.verdict == "differs" for result in results):
        raise SystemExit(1)
