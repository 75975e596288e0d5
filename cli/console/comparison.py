"""Answer a prompt twice, with the drafter and by the target alone, and compare texts and speeds."""

import secrets
from collections.abc import Mapping

from rich.console import Console
from rich.rule import Rule

from cli.console.generation import Generation, Generator
from cli.console.printer import TextPrinter
from cli.console.summary import compared

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
    printer.wait()
    try:
        return generator.run(path, {"cache_salt": secrets.token_hex(), **body}, printer.write)
    finally:
        printer.end_line()
