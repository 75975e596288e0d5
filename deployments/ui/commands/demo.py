"""`consort demo`: one streamed answer, what speculation saved, and proof that the drafter did not change the text."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from deployments.client import Client

_PROMPT = "def read_lines(path):"
_REQUEST = {"prompt": _PROMPT, "max_tokens": 110, "temperature": 0.5, "seed": 7}


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """A streamed answer."""

    text: str
    tokens: int
    steps: int
    drafted: int
    accepted: int
    first_s: float  # until the first text
    total_s: float


def run_demo(client: Client, console: Console, *, model: str) -> None:
    """Ask twice, with the drafter and without; show the first answer as it comes.

    Raises:
        UnavailableError: the server could not answer.
    """
    console.rule("[bold]a streamed completion[/]", align="left")
    console.print(escape(_PROMPT), style="bold", end="", highlight=False)
    body = {**_REQUEST, "model": model, "stream_options": {"include_usage": True}}
    _collect(client, {**body, "max_tokens": 8}, None)  # the very first request warms both models up
    ours = _collect(client, body, console)
    plain = _collect(client, {**body, "speculate": False}, None)
    console.print()
    console.rule("[bold]what speculation did[/]", align="left")
    _show_statistics(console, ours, plain)


def _collect(client: Client, body: Mapping[str, object], console: Console | None) -> StreamedAnswer:
    """Stream an answer, and show it on the console if there is one."""
    began_s = time.perf_counter()
    first_s = 0.0
    pieces = []
    last: Any = None
    for document in client.stream("/v1/completions", body):
        last = document
        for choice in document["choices"]:
            first_s = first_s or time.perf_counter() - began_s
            pieces.append(choice["text"])
            if console is not None:
                console.print(escape(choice["text"]), end="", style="cyan", highlight=False, soft_wrap=True)
    speculation = last["speculation"]
    return StreamedAnswer(
        text="".join(pieces),
        tokens=last["usage"]["completion_tokens"],
        steps=speculation["steps"],
        drafted=speculation["drafted"],
        accepted=speculation["accepted"],
        first_s=first_s,
        total_s=time.perf_counter() - began_s,
    )


def _show_statistics(console: Console, ours: StreamedAnswer, plain: StreamedAnswer) -> None:
    share = ours.accepted / ours.drafted if ours.drafted else 0.0
    console.print(
        f"{ours.tokens} tokens in {ours.total_s:.2f} s ({ours.tokens / ours.total_s:.0f} per second, "
        f"the first after {ours.first_s * 1e3:.0f} ms); without the drafter in {plain.total_s:.2f} s",
        f"{ours.accepted} of {ours.drafted} draft tokens accepted ({share:.0%})",
        f"{ours.steps} steps of the target instead of {plain.steps}: {ours.tokens / ours.steps:.2f} tokens per step",
        sep="\n",
        highlight=False,
    )
    if ours.text == plain.text:
        console.print("[green]✓[/] without the drafter, the same seed gives the same text", highlight=False)
    else:
        console.print("[red]✗[/] without the drafter, the text differs: please report this", highlight=False)
