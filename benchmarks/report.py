"""Text tables, ratios, and JSON results with the command, options, hardware and versions of the run."""

import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as columns, the first flush left, the others flush right; "" without rows."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, rule, *rows)
    )


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratios within repetitions. A long disturbance of the machine slows down both, so ratios keep."""
    return [value / other for value, other in zip(values, others, strict=True)]


def write(path: Path, module: str, options: Mapping[str, object], **findings: object) -> None:
    """Write findings as JSON, with the details of the run. module: the argument of `python -m`."""
    contents = {
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
        "options": options,
        "hardware": _hardware(),
        "versions": _versions(),
        "commit": _commit(),
        **findings,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(contents, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    print(f"written to {path}")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "consort"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _hardware() -> dict[str, object]:
    """Return the CPU, its number of cores, and the operating system."""
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {"cpu": names[0] if names else platform.processor(), "cores": len(names), "system": platform.platform()}


def _commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""
