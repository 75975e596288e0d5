"""Show the progress of starting deployments, and of a long command's steps, on the terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

Watch = Callable[[list["StartProgress"]], None]


@dataclass(frozen=True, slots=True)
class StartProgress:
    """The state of a starting deployment."""

    deployment: str
    state: Literal["waiting", "loading", "converting", "ready"]


class ProgressDisplay:
    """A live table on a terminal; elsewhere, one line for each deployment once it is ready. A context manager."""

    def __init__(self, console: Console, *, done: str = "ready") -> None:
        """done: the word to show for finished deployments."""
        self._console = console
        self._done = done
        self._began_s = time.monotonic()
        self._progress: dict[str, StartProgress] = {}
        self._ready_after_s: dict[str, float] = {}
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=10, transient=False)

    def __enter__(self) -> "ProgressDisplay":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def finish(self) -> None:
        """Stop drawing; the last table stays."""
        if self._console.is_terminal:
            self._live.stop()

    def watch(self, progress: list[StartProgress]) -> None:
        """Update the deployments' states. Those that are no longer in the list are done."""
        current = {state.deployment: state for state in progress}
        done = [name for name in self._progress if name not in current]
        for name in [*done, *(state.deployment for state in progress if state.state == "ready")]:
            if name not in self._ready_after_s:
                self._note_ready(name)
        self._progress |= current | {name: StartProgress(name, "ready") for name in done}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _note_ready(self, name: str) -> None:
        self._ready_after_s[name] = self.elapsed_s
        if not self._console.is_terminal:
            self._console.print(f"{name}: {self._done} after {self.elapsed_s:.1f} s")

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for name, progress in self._progress.items():
            table.add_row(*self._row(name, progress))
        return Group(table)

    def _row(self, name: str, progress: StartProgress) -> tuple[RenderableType, str, str, str]:
        if progress.state == "ready":
            return "[green]✓[/]", name, f"[green]{self._done}[/]", f"[dim]{self._ready_after_s[name]:.1f} s[/]"
        style = "dim" if progress.state == "waiting" else "cyan"
        text = "converting, once" if progress.state == "converting" else progress.state
        return self._spinner, name, f"[{style}]{text}[/]", f"[dim]{self.elapsed_s:.1f} s[/]"


@contextmanager
def reporting(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with each step's name as it begins. Finished steps are shown with their durations."""
    with ProgressDisplay(console, done="done") as display:
        yield lambda step: display.watch([StartProgress(step, "loading")])
        display.watch([])
