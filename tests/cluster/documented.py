"""The files of the checkout with the changes that the documentation shows as diffs."""

import re

from tests.cluster.cluster_operator import read

_DIFF = re.compile(r"^```diff\n--- (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def with_redis(file: str) -> str:
    """As docs/cluster.md changes it for a head that may die."""
    text = read(file)
    for named, diff in _DIFF.findall(read("docs/cluster.md")):
        if named == file:
            for hunk in diff.split("@@\n"):
                before, after = (_lines(hunk, mark) for mark in "-+")
                assert text.count(before) == 1, f"{file} has {text.count(before)} times\n{before}"
                text = text.replace(before, after)
    return text


def _lines(hunk: str, mark: str) -> str:
    """A hunk's lines of one side: its own, and those of both."""
    return "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in (mark, " "))
