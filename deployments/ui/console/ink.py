"""How pieces of an answer look: in colours by source on a terminal, as they are elsewhere."""

from collections.abc import Mapping

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from deployments.ui.console.attribution import Piece

COLOURS = {"accepted": "green", "recovered": "yellow", "bonus": "cyan", "plain": None}  # None: the terminal's own

# A model's text must not move the cursor or change the terminal: control characters are shown as their pictures.
_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"} | {0x7F: "␡"}
_PICTURES |= dict.fromkeys(range(0x80, 0xA0), "�")


class Ink:
    """Writes text to a console without wrapping or changing it."""

    def __init__(self, console: Console, *, colours: bool = True) -> None:
        self._console = console
        self.colours = colours
        self._at_line_start = True
        self._spinner = console.status("", spinner_style="dim")

    def wait(self) -> None:
        """Show that something is to come, until it comes."""
        if self._console.is_terminal and self._at_line_start:
            self._spinner.start()

    def write(self, piece: Piece, *, dim: bool = False) -> None:
        """Append a piece to what stands there, and show it at once."""
        if not piece.text:
            return
        self._spinner.stop()
        self._at_line_start = piece.text.endswith("\n")
        if not self._console.is_terminal:
            self._console.file.write(piece.text)
            self._console.file.flush()
            return
        colour = COLOURS.get(piece.source) if self.colours else None
        segment = Segment(piece.text.translate(_PICTURES), Style(color=colour, dim=dim or None))
        self._console.print(Segments([segment]), end="", soft_wrap=True)

    def end_line(self) -> None:
        """Go to the start of a line, if the last piece did not. Nothing more is to come."""
        self._spinner.stop()
        if not self._at_line_start:
            self.write(Piece("\n", ""))


def legend(counts: Mapping[str, int]) -> Text:
    """What the colours mean, and how many tokens have each."""
    named = [source for source in COLOURS if counts.get(source)]
    return Text("  ").join(
        Text.assemble(("■ ", COLOURS[source] or ""), (f"{counts[source]} {source}", "dim")) for source in named
    )
