"""One prompt answered twice, with the drafter and by the target alone: the same text, at which speed?"""

import secrets
from collections.abc import Mapping

from rich.console import Console
from rich.rule import Rule

from deployments.ui.console.generation import Generation, Generator
from deployments.ui.console.ink import Ink
from deployments.ui.console.summary import compared

_SEEDS = 2**31


def compare(generator: Generator, path: str, body: Mapping[str, object], console: Console, ink: Ink) -> Generation:
    """Both answers, one after the other so that neither slows the other down, and what tells them apart.

    Returns the answer that came last; there is no second one if Ctrl-C stopped the first.
    """
    seeded = {"seed": secrets.randbelow(_SEEDS), **body}
    ours = _answer(generator, path, {**seeded, "speculate": True}, console, ink, "speculative")
    if ours.stopped:
        return ours
    plain = _answer(generator, path, {**seeded, "speculate": False}, console, ink, "target alone")
    if not plain.stopped:
        console.print(Rule(style="dim"), compared(ours, plain))
    return plain


def _answer(
    generator: Generator, path: str, body: Mapping[str, object], console: Console, ink: Ink, title: str
) -> Generation:
    console.print(Rule(title, align="left", style="dim"))
    ink.wait()
    try:
        return generator.run(path, body, ink.write)
    finally:
        ink.end_line()
