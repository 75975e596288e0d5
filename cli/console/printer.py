"""Print an answer's text: coloured by source on a terminal, plain elsewhere."""

from collections.abc import Mapping

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from cli.console.attribution import TextSpan

COLOURS = {
    "accepted": "green",
    "ngram": "bright_green",
    "medusa": "magenta",
    "eagle3": "blue",
    "recovered": "yellow",
    "bonus": "cyan",
    "plain": None,  # None: the terminal's own
}

# A model's text must not control the terminal: control characters are shown as symbols.
_SYMBOLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"} | {0x7F: "␡"}
_SYMBOLS |= dict.fromkeys(range(0x80, 0xA0), "�")


class TextPrinter:
    """Prints text on a console without wrapping it."""

    def __init__(self, console: Console, *, colours: bool = True) -> None:
        self._console = console
        self.colours = colours
        self._at_line_start = True
        self._spinner = console.status("", spinner_style="dim")

    def wait(self) -> None:
        """Show a spinner until the next text."""
        if self._console.is_terminal and self._at_line_start:
            self._spinner.start()

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
        colour = COLOURS.get(span.source) if self.colours else None
        segment = Segment(span.text.translate(_SYMBOLS), Style(color=colour, dim=dim or None))
        self._console.print(Segments([segment]), end="", soft_wrap=True)

    def end_line(self) -> None:
        """Stop the spinner, and end the line if it is open."""
        self._spinner.stop()
        if not self._at_line_start:
            self.write(TextSpan("\n", ""))


def legend(counts: Mapping[str, int]) -> Text:
    """Return the legend of the colours, with the number of tokens of each source."""
    sources = [source for source in COLOURS if counts.get(source)]
    return Text("  ").join(
        Text.assemble(("■ ", COLOURS[source] or ""), (f"{counts[source]} {source}", "dim")) for source in sources
    )
