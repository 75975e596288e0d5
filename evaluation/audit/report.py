"""What an audit says: a document for JSON, a page, and commands that repeat a difference."""

import json
import shlex
from collections.abc import Sequence
from html import escape
from typing import Any

from evaluation.audit.audit import limits
from evaluation.audit.check import Difference, Result
from evaluation.audit.server import Body, Server, route

SIGNS = {"kept": "✓", "differs": "✗", "not offered": "–"}
_COLOURS = {"kept": "#2e7d32", "differs": "#c0392b", "not offered": "#777777"}
_HANG_UP_S = 0.3
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Audit of {model}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
td {{ vertical-align: top; padding: .4rem .8rem .4rem 0; border-top: 1px solid #ddd }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f5f5; padding: .6rem; font-size: .8rem }}
</style>
<h1>Audit of {model}</h1>
<p>{server}</p>
<table>
{rows}
</table>
<p>{limits}</p>
</html>
"""


def document(server: Server, results: Sequence[Result]) -> dict[str, Any]:
    """Return an audit as JSON has it."""
    about = {"url": server.url, "engine": server.name, "model": server.model}
    return {**about, "limits": limits(results), "checks": [_entry(server, result) for result in results]}


def page(server: Server, results: Sequence[Result]) -> str:
    """Return an audit as a page of HTML."""
    about = escape(f"{server.name} at {server.url}")
    rows = "\n".join(_row(server, result) for result in results)
    return _PAGE.format(model=escape(server.model), server=about, rows=rows, limits=limits(results))


def summary(result: Result) -> str:
    """Return a line about a result."""
    if result.verdict == "not offered":
        return f"not offered: {', '.join(result.reasons[:1]) or 'nothing to compare'}"
    lacking = f"; {len(result.reasons)} not offered: {result.reasons[0]}" if result.reasons else ""
    if result.difference is None:
        return f"{result.requests} requests, {result.tokens:,} tokens{lacking}"
    again = "" if result.repeatable else "; not seen again when it was repeated"
    return (
        f"{result.differing} differ in {result.requests} requests{again}: "
        f"expected {result.difference.expected}, got {result.difference.actual}"
    )


def command(server: Server, difference: Difference) -> str:
    """Return shell commands that send what shows a difference."""
    *before, last = difference.requests
    limit = f" --max-time {_HANG_UP_S}" if difference.abandoned else ""
    others = [f"{_curl(server, body)}{limit} > /dev/null &" for body in difference.neighbours]
    end = ["wait"] if others else []
    return "\n".join([*(_curl(server, body) for body in before), *others, _curl(server, last), *end])


def _curl(server: Server, body: Body | str) -> str:
    key = ' -H "Authorization: Bearer $CONSORT_API_KEY"' if "Authorization" in server.http.headers else ""
    content = body if isinstance(body, str) else json.dumps(server.full(body), ensure_ascii=False)
    return f"curl -s {server.url}{route(body)} -H 'Content-Type: application/json'{key} -d {shlex.quote(content)}"


def _entry(server: Server, result: Result) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": result.check.name,
        "promise": result.check.promise,
        "verdict": result.verdict,
        "requests": result.requests,
        "tokens": result.tokens,
        "not_offered": list(result.reasons),
    }
    if (difference := result.difference) is not None:
        entry |= {
            "differing": result.differing,
            "repeatable": result.repeatable,
            "expected": difference.expected,
            "actual": difference.actual,
            "command": command(server, difference),
        }
    return entry


def _row(server: Server, result: Result) -> str:
    sign = f'<td style="color: {_COLOURS[result.verdict]}">{SIGNS[result.verdict]}'
    shown = f"<pre>{escape(command(server, result.difference))}</pre>" if result.difference else ""
    name, text = escape(result.check.name), escape(summary(result))
    return f"<tr>{sign}<td><b>{name}</b><td>{escape(result.check.promise)}<br>{text}{shown}"
