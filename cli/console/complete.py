"""`consort complete`: continue a text on a terminal or in a pipe; with drafts and without, to compare."""

import json
import secrets
from collections.abc import Mapping

from rich.console import Console
from rich.rule import Rule

from cli.console.generation import COMPLETIONS, Generation, Generator, TextSpan
from cli.console.printer import TextPrinter, compared, summary
from deployments.client import Client

_SEEDS = 2**31


def compare(
    generator: Generator, path: str, body: Mapping[str, object], console: Console, printer: TextPrinter
) -> Generation:
    """Print both answers, one after the other so that neither slows the other, and their comparison.

    Returns the last answer, which is the first one if Ctrl-C stopped it.
    """
    seeded = {"seed": secrets.randbelow(_SEEDS), **body}
    ours = _answer(generator, path, {**seeded, "speculate": True}, console, printer, "speculative")
    if ours.stopped:
        return ours
    plain = _answer(generator, path, {**seeded, "speculate": False}, console, printer, "target alone")
    if not plain.stopped:
        console.print(Rule(style="dim"), compared(ours, plain))
    return plain


def _answer(
    generator: Generator, path: str, body: Mapping[str, object], console: Console, printer: TextPrinter, title: str
) -> Generation:
    """Answer with a salt of its own, so that the prompt is read again, whatever was answered before."""
    console.print(Rule(title, align="left", style="dim"))
    return printer.answer(generator, path, {"cache_salt": secrets.token_hex(), **body})


def complete(
    client: Client, body: Mapping[str, object], console: Console, statistics: Console, *, colours: bool
) -> Generation:
    """Stream the continuation to the console. A terminal also shows the prompt, and statistics at the end."""
    printer = TextPrinter(console, colours=colours)
    if console.is_terminal:
        printer.write(TextSpan(str(body["prompt"]), ""), dim=True)
    generation = printer.answer(Generator(client), COMPLETIONS, body)
    if console.is_terminal:
        statistics.print(summary(generation, colours=colours))
    return generation


def complete_twice(client: Client, body: Mapping[str, object], console: Console, *, colours: bool) -> Generation:
    """Complete with the drafter and without; returns the last answer."""
    return compare(Generator(client), COMPLETIONS, body, console, TextPrinter(console, colours=colours))


def complete_as_json(client: Client, body: Mapping[str, object], console: Console) -> Generation:
    """Print the continuation and its statistics as one JSON document."""
    generation = Generator(client).run(COMPLETIONS, body, lambda span: None)
    document = {
        "model": body["model"],
        "prompt": body["prompt"],
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "seed": generation.seed,
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.tokens,
        "first_text_s": round(generation.first_s, 6),
        "total_s": round(generation.total_s, 6),
        "speculation": generation.speculation,
        "token_sources": generation.sources,
    }
    console.file.write(json.dumps(document) + "\n")
    return generation
