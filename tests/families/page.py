"""The results of the checks: a file, and the tables of docs/models.md that are made from it."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

from decoding.errors import ConfigError
from tests.families.checks import CHECKS, Family, checks_of

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families: make test-families writes this -->\n", "<!-- families: end -->\n"


@dataclass(frozen=True, slots=True)
class Result:
    """The results of one family."""

    tried: str  # ISO date
    refused: str | None = None  # why; None: it is served
    fails: dict[str, str] = field(default_factory=dict)  # by check, why it does not hold


def try_family(name: str, folder: Path, checks: Iterable[str] | None = None) -> Result:
    """Try a family, and return its results. folder: an empty one, for its checkpoint. checks: None: all of them."""
    today = date.today().isoformat()
    try:
        family = Family(name, folder)
    except ConfigError as error:
        reason = str(error).replace(str(folder), "PATH").split("can't be served: ")[-1].split("can't load 'PATH': ")[-1]
        return Result(today, refused=reason)
    reasons = {}
    for label in checks_of(name) if checks is None else checks:
        try:
            reasons[label] = CHECKS[label](family)
        except Exception as error:  # whatever a family's code raises is a result
            reasons[label] = f"{type(error).__name__}: {error}".replace(str(folder), "PATH").splitlines()[0]
    return Result(today, fails={label: reason for label, reason in reasons.items() if reason})


def read() -> dict[str, Result]:
    return {name: Result(**result) for name, result in json.loads(RESULTS.read_text(encoding="utf-8")).items()}


def write(results: Mapping[str, Result]) -> None:
    """Save the results, and put their tables into the page."""
    ordered = {name: asdict(result) for name, result in sorted(results.items())}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


def with_tables(page: str, results: Mapping[str, Result]) -> str:
    """Return the page with new tables between its markers."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + _tables(results) + "\n" + END + rest.split(END)[1]


def _tables(results: Mapping[str, Result]) -> str:
    names = sorted(results)
    lines = [f"| family | {' | '.join(CHECKS)} | tried |", "|---" * (len(CHECKS) + 2) + "|"]
    for name in names:
        if results[name].refused is None:
            marks = " | ".join(_mark(name, results[name], check) for check in CHECKS)
            lines.append(f"| {name} | {marks} | {results[name].tried} |")
    fails = ((f"{check}: {why}", name) for name in names for check, why in results[name].fails.items())
    refusals = ((str(results[name].refused), name) for name in names if results[name].refused is not None)
    lines += _by_reason("what does not hold", fails) + _by_reason("why they are refused", refusals)
    return "\n".join(lines) + "\n"


def _mark(name: str, result: Result, check: str) -> str:
    if check not in checks_of(name):
        return ""
    return "–" if check in result.fails else "✓"


def _by_reason(title: str, reasons: Iterable[tuple[str, str]]) -> list[str]:
    families = defaultdict(list)
    for reason, name in reasons:
        families[reason].append(name)
    lines = [f"| {reason} | {', '.join(names)} |" for reason, names in sorted(families.items())]
    return ["", f"| {title} | families |", "|---|---|", *lines] if lines else []
