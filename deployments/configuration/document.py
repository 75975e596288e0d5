"""Reads a YAML document, and collects the mistakes of a configuration, so that one answer has all of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from decoding.errors import ConfigError

_REMOVED = {  # keys of earlier versions, by path, and what holds now; *: any name
    "models.*.prefill_chunk": "a step has at most 256 tokens of prompts",
    "models.*.inside": "set colocated_with instead",
    "models.*.scaling.use": "set target_utilization instead",
    "models.*.scaling.least_use": "a target goes if the others would use at most 80 % of target_utilization",
    "models.*.scaling.most_lag": "a drafter is added where targets wait for 15 % of their time",
    "models.*.scaling.least_lag": "a drafter goes where targets wait for less than 3 % of their time",
    "models.*.scaling.look_back_s": "the load is averaged over 20 s",
    "models.*.scaling.probe_period_s": "where no drafter pays, one is tried every ten minutes",
    "models.*.adaptation.texts": "a drafter learns from the newest 256 texts",
    "models.*.adaptation.update_after": "a round of learning begins after 32 new texts",
    "endpoints.*.ngram.shared": "set endpoints.*.corpus: {} instead; it holds prompts, too",
    "endpoints.*.vocabulary_top_k": "each member has 10 candidate tokens",
    "http.stream_interval_s": "a stream holds events back for 0.2 s at most",
    "http.max_logprobs_per_request": "the answers to a request have at most 500,000 log-probabilities together",
}
_HINTS = {  # by a part of the parser's complaint
    "'\\t'": "indent with spaces, not tabs",
    "mapping values are not allowed": "put values with ': ' in quotes",
    "but got": "put values with special characters in quotes",
    "could not determine a constructor": "tags are not supported; remove it",
    "but found another document": "keep one document, without a line of '---' in it",
}


class Mistakes:
    """Mistakes in a configuration, a line each, in the order in which they were found."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def note(self, *lines: str) -> None:
        self._lines += lines

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Remember the block's ConfigError, if it raises one, instead of raising it."""
        try:
            yield
        except ConfigError as error:
            self.note(str(error))

    def check(self, *, of: str = "") -> None:
        """Raise ConfigError if there are mistakes. of: what its text begins with."""
        if self._lines:
            count = [f"{len(self._lines)} mistakes"] if len(self._lines) > 1 else []
            raise ConfigError(of + "\n  ".join([*count, *self._lines]))


def read_document(path: Path) -> object:
    """Return what a YAML file says; raises ConfigError if it can't be read, is empty, is no YAML, or has keys twice."""
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data: object = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"can't read {path}: it is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"can't read {path}: {_in_a_line(error)}") from error
    if root is None or data is None:
        raise ConfigError(f"{path}: the file is empty; it should have `models` and `endpoints`")
    mistakes = Mistakes()
    for key, line in _repeated_keys(root, (), set()):
        mistakes.note(f"{path}: {key}: is there twice, again in line {line}; keep one of them")
    mistakes.check()
    return data


def without_removed_keys(data: object, mistakes: Mistakes) -> object:
    """Return a document without keys that are no more, and note for each what holds now."""
    rest = deepcopy(data)
    for pattern, now in _REMOVED.items():
        for path, part in list(_parts(rest, pattern.split("."))):
            del part[path[-1]]
            mistakes.note(f"{'.'.join(path)}: is gone: {now}")
    return rest


def _parts(data: Any, pattern: list[str], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path of each key that the pattern matches, and the dictionary that has the key."""
    name, *deeper = pattern
    for key in data if isinstance(data, dict) else ():
        if name not in ("*", key):
            continue
        if deeper:
            yield from _parts(data[key], deeper, (*path, str(key)))
        else:
            yield (*path, key), data


def _in_a_line(error: yaml.YAMLError) -> str:
    """Return where the document is wrong, how, and what helps, without line breaks."""
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    mark = getattr(error, "problem_mark", None)
    where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    hint = next((hint for part, hint in _HINTS.items() if part in problem), None)
    return f"{where}{problem}" + (f"; {hint}" if hint else "")


def _repeated_keys(node: yaml.Node, path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[str, int]]:
    """Yield the dotted path and the line of every key that its mapping has already. seen: nodes, for aliases."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated_keys(item, (*path, str(index)), seen)
    elif isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key, value in node.value:
            inner = (*path, str(key.value))
            if key.value in names and key.tag != "tag:yaml.org,2002:merge":
                yield ".".join(inner), key.start_mark.line + 1
            names.add(str(key.value))
            yield from _repeated_keys(value, inner, seen)
