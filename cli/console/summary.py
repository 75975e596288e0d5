"""Format the statistics below an answer, and the comparison of two answers."""

from collections.abc import Iterator

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cli.console.generation import Generation
from cli.console.printer import legend

_COMPARED = ("tokens", "tokens/s", "first token", "target steps")
_CONTEXT = 20  # characters shown on each side of a difference


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
