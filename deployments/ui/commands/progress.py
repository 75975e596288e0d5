"""Shows on the terminal how far each deployment is while models load. Knows nothing of Ray."""

import time
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from deployments.cluster import Progress


class ProgressDisplay:
    """A live table on a terminal; one line per deployment that became ready elsewhere. Use as `with` block."""

    def __init__(self, console: Console, *, done: str = "ready") -> None:
        """done: what to call those that are."""
        self._console = console
        self._done = done
        self._began_s = time.monotonic()
        self._progress: dict[str, Progress] = {}
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
        """Stop drawing; what was drawn last stays."""
        if self._console.is_terminal:
            self._live.stop()

    def watch(self, progress: list[Progress]) -> None:
        """Take note of how far the deployments are. Those that are no longer named are done."""
        named = {one.deployment: one for one in progress}
        done = [name for name in self._progress if name not in named]
        for name in [*done, *(one.deployment for one in progress if one.state == "ready")]:
            if name not in self._ready_after_s:
                self._note_ready(name)
        self._progress |= named | {name: Progress(name, "ready") for name in done}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _note_ready(self, name: str) -> None:
        self._ready_after_s[name] = self.elapsed_s
        if not self._console.is_terminal:
            self._console.print(f"{name}: {self._done} after {self.elapsed_s:.1f} s")

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for name, one in self._progress.items():
            table.add_row(*self._row(name, one))
        return Group(table)

    def _row(self, name: str, one: Progress) -> tuple[RenderableType, str, str, str]:
        if one.state == "ready":
            return "[green]✓[/]", name, f"[green]{self._done}[/]", f"[dim]{self._ready_after_s[name]:.1f} s[/]"
        style = "cyan" if one.state == "loading" else "dim"
        return self._spinner, name, f"[{style}]{one.state}[/]", f"[dim]{self.elapsed_s:.1f} s[/]"
