"""`consort complete`: continues a text, streamed, for terminals and for pipes."""

import json
from collections.abc import Mapping

from rich.console import Console

from deployments.client import Client
from deployments.ui.console.attribution import Piece
from deployments.ui.console.comparison import compare
from deployments.ui.console.generation import COMPLETIONS, Generation, Generator
from deployments.ui.console.ink import Ink
from deployments.ui.console.summary import summary


def complete(
    client: Client, body: Mapping[str, object], console: Console, statistics: Console, *, colours: bool
) -> Generation:
    """Stream the continuation to the console. On a terminal the prompt stands before it, and statistics follow."""
    ink = Ink(console, colours=colours)
    if console.is_terminal:
        ink.write(Piece(str(body["prompt"]), ""), dim=True)
    try:
        generation = Generator(client).run(COMPLETIONS, body, ink.write)
    finally:
        ink.end_line()
    if console.is_terminal:
        statistics.print(summary(generation, colours=colours))
    return generation


def complete_twice(client: Client, body: Mapping[str, object], console: Console, *, colours: bool) -> Generation:
    """With the drafter and without; returns the answer that came last."""
    return compare(Generator(client), COMPLETIONS, body, console, Ink(console, colours=colours))


def complete_as_json(client: Client, body: Mapping[str, object], console: Console) -> Generation:
    """Print the whole continuation and its statistics as one JSON document."""
    generation = Generator(client).run(COMPLETIONS, body, lambda piece: None)
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
    console.file.write(json.dumps(document, ensure_ascii=False) + "\n")
    return generation
