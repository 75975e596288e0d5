"""Options of drafts that are copied from texts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """Options of n-gram look-up. longest: the longest n-gram to look for."""

    longest: int = 4


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """Options of a corpus. tokens: the most that it holds; the oldest are forgotten."""

    tokens: int
    path: str | None = None  # a folder, in which replicas keep their texts
