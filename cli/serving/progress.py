"""Show the progress of starting deployments, and of a long command's steps, on the terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

Watch = Callable[[list["StartProgress"]], None]
_READY, _UNTOLD = "ready", ("waiting", "loading")  # the latter get no lines of their own
_SHOWN_S = 0.5  # least time of a stage that a finished row shows


@dataclass(frozen=True, slots=True)
class StartProgress:
    """The state of a starting deployment: "waiting", "ready", or what it does meanwhile."""

    deployment: str
    state: str


class ProgressDisplay:
    """A live table on a terminal; elsewhere, a line as each stage begins. A context manager."""

    def __init__(self, console: Console, *, done: str = _READY) -> None:
        """done: the word to show for finished deployments."""
        self._console = console
        self._done = done
        self._began_s = time.monotonic()
        self._stages: dict[str, list[tuple[str, float]]] = {}  # by deployment: each state, and since when
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=10, transient=False)

    def __enter__(self) -> "ProgressDisplay":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Stop drawing; the last table stays."""
        if self._console.is_terminal:
            self._live.stop()

    def watch(self, progress: list[StartProgress]) -> None:
        """Update the deployments' states. Those that are no longer in the list are done."""
        states = dict.fromkeys(self._stages, _READY) | {each.deployment: each.state for each in progress}
        for name, state in states.items():
            stages = self._stages.setdefault(name, [])
            if not stages or stages[-1][0] != state:
                stages.append((state, self.elapsed_s))
                word = self._done if state == _READY else state
                if not self._console.is_terminal and state not in _UNTOLD:
                    self._console.print(f"{name}: {word} after {self.elapsed_s:.1f} s", soft_wrap=True)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for name, stages in self._stages.items():
            table.add_row(*self._row(name, stages))
        return Group(table)

    def _row(self, name: str, stages: list[tuple[str, float]]) -> tuple[RenderableType, ...]:
        state, since_s = stages[-1]
        if state == _READY:
            times = [(stage, until - since) for (stage, since), (_, until) in pairwise(stages) if stage not in _UNTOLD]
            parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in times if seconds >= _SHOWN_S)
            return "[green]✓[/]", name, f"[green]{self._done}[/]", f"[dim]{since_s:.1f} s[/]", f"[dim]{parts}[/]"
        style = "dim" if state == "waiting" else "cyan"
        return self._spinner, name, f"[{style}]{state}[/]", f"[dim]{self.elapsed_s:.1f} s[/]", ""


@contextmanager
def reporting(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with each step's name as it begins. Finished steps are shown with their durations."""
    with ProgressDisplay(console, done="done") as display:
        yield lambda step: display.watch([StartProgress(step, "loading")])
        display.watch([])
