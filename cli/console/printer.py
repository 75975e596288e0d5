"""Print answers: on a terminal in colours, by the source of each token, or in a pipe; twice, to compare with plain."""

import json
import secrets
from collections.abc import Iterator, Mapping

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.rule import Rule
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from cli.console.generation import COMPLETIONS, Generation, Generator, TextSpan
from deployments.client import Client

COLOURS = {
    "accepted": "green",
    "ngram": "bright_green",
    "medusa": "magenta",
    "eagle3": "blue",
    "mtp": "bright_blue",
    "prediction": "bright_cyan",
    "corpus": "bright_magenta",
    "dflash": "bright_red",
    "pard": "red",
    "self": "bright_yellow",
    "recovered": "yellow",
    "bonus": "cyan",
    "plain": None,  # None: the terminal's own
}

# A model's text must not control the terminal: control characters are shown as symbols.
_SYMBOLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"} | {0x7F: "␡"}
_SYMBOLS |= dict.fromkeys(range(0x80, 0xA0), "�")
_COMPARED = ("tokens", "tokens/s", "first token", "target steps")
_CONTEXT = 20  # characters shown on each side of a difference
_SEEDS = 2**31


class TextPrinter:
    """Prints text on a console without wrapping it."""

    def __init__(self, console: Console, *, colours: bool = True, palette: Mapping[str, str | None] = COLOURS) -> None:
        """palette: the colour of each source's tokens; others have the terminal's own."""
        self._console = console
        self.colours, self._palette = colours, palette
        self._at_line_start = True
        self._spinner = console.status("", spinner_style="dim")

    def answer(self, generator: Generator, path: str, body: Mapping[str, object]) -> Generation:
        """Print an answer as it comes, with a spinner before it, and end its line.

        Raises ConsortError as `Client.stream` does.
        """
        if self._console.is_terminal and self._at_line_start:
            self._spinner.start()
        try:
            return generator.run(path, body, self.write)
        finally:
            self._spinner.stop()
            if not self._at_line_start:
                self.write(TextSpan("\n", ""))

    def write(self, span: TextSpan, *, dim: bool = False) -> None:
        """Print text at once, after what was printed before."""
        if not span.text:
            return
        self._spinner.stop()
        self._at_line_start = span.text.endswith("\n")
        if not self._console.is_terminal:
            self._console.file.write(span.text)
            self._console.file.flush()
            return
        colour = self._palette.get(span.source) if self.colours else None
        segment = Segment(span.text.translate(_SYMBOLS), Style(color=colour, dim=dim or None))
        self._console.print(Segments([segment]), end="", soft_wrap=True)


def legend(counts: Mapping[str, int]) -> Text:
    """Return the legend of the colours, with the number of tokens of each source."""
    sources = [source for source in COLOURS if counts.get(source)]
    return Text("  ").join(
        Text.assemble(("■ ", COLOURS[source] or ""), (f"{counts[source]} {source}", "dim")) for source in sources
    )


def summary(generation: Generation, *, colours: bool) -> Group:
    """Return at most three lines: speed, drafts, and a legend of the colours."""
    lines = [Text(" · ".join(_speed(generation)), style="dim")]
    drafts = " · ".join(_drafts(generation))
    if drafts:
        lines.append(Text(drafts, style="dim"))
    if colours and set(generation.sources) - {"plain"}:
        lines.append(legend(generation.sources))
    return Group(*lines)


def _speed(generation: Generation) -> Iterator[str]:
    if generation.stopped:
        yield "stopped"
    if generation.tokens is not None:
        yield f"{generation.tokens} token{'' if generation.tokens == 1 else 's'}"
    if generation.tokens_per_s:
        yield f"{generation.tokens_per_s:.1f} tokens/s"
    if generation.first_s:
        yield f"first after {generation.first_s * 1e3:.0f} ms"
    if generation.finish_reason not in (None, "stop"):
        yield f"ended by {generation.finish_reason}"


def _drafts(generation: Generation) -> Iterator[str]:
    speculation = generation.speculation
    if not speculation:
        return
    if speculation["drafted"]:
        rate = speculation["acceptance_rate"]
        yield f"{speculation['accepted']} of {speculation['drafted']} draft tokens accepted ({rate:.0%})"
        proposers = speculation.get("proposers") or {}
        if set(proposers) - {"drafter"}:
            yield ", ".join(f"{name} {count['accepted']} of {count['drafted']}" for name, count in proposers.items())
    else:
        yield "nothing drafted"
    yield f"{speculation['acceptance_length']:.2f} tokens per step"
    if speculation.get("hit_rate") is not None and speculation["drafted"]:
        yield f"hit rate {speculation['hit_rate']:.0%}"


def compared(ours: Generation, plain: Generation) -> Group:
    """Return a table of two answers to one prompt and seed, with the drafter and without, and their difference."""
    table = Table("", "speculative", "target alone", box=SIMPLE, show_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in zip(_COMPARED, _row(ours), _row(plain), strict=True):
        table.add_row(*row)
    return Group(table, _difference_text(ours, plain))


def _row(generation: Generation) -> tuple[str, str, str, str]:
    tokens, speed = generation.tokens, generation.tokens_per_s
    return (
        "–" if tokens is None else str(tokens),
        "–" if speed is None else f"{speed:.1f}",
        f"{generation.first_s * 1e3:.0f} ms",
        str(generation.speculation.get("steps", "–")),
    )


def _difference_text(ours: Generation, plain: Generation) -> Text:
    if ours.text != plain.text:
        index = difference(ours.text, plain.text)
        left, right = (repr(text[max(0, index - _CONTEXT) : index + _CONTEXT]) for text in (ours.text, plain.text))
        return Text.assemble(("same text: no", "red"), f", from character {index} on: {left}, target alone {right}")
    if not ours.tokens_per_s or not plain.tokens_per_s:
        return Text("same text: yes", style="green")
    if ours.speculation and not ours.speculation["drafted"]:
        reason = "nothing was drafted, as plain decoding is faster at this load; both answers were decoded alike"
        return Text.assemble(("same text: yes", "green"), f" · {reason} · seed {ours.seed}")
    ratio = ours.tokens_per_s / plain.tokens_per_s
    return Text.assemble(("same text: yes", "green"), f" · {ratio:.2f} times as fast · seed {ours.seed}")


def difference(left: str, right: str) -> int:
    """Return the index of the first difference between two texts."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def compare(
    generator: Generator, path: str, body: Mapping[str, object], console: Console, printer: TextPrinter
) -> Generation:
    """Print both answers, one after the other so that neither slows the other, and their comparison.

    Returns the last answer, which is the first one if Ctrl-C stopped it.
    """
    seeded = {"seed": secrets.randbelow(_SEEDS), **body}
    ours = _titled(generator, path, {**seeded, "speculate": True}, console, printer, "speculative")
    if ours.stopped:
        return ours
    plain = _titled(generator, path, {**seeded, "speculate": False}, console, printer, "target alone")
    if not plain.stopped:
        console.print(Rule(style="dim"), compared(ours, plain))
    return plain


def _titled(
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
