"""Strategies over whole answers: what they extract, how they rank, what a writer reads, how they are configured.

Patterns are RE2's: matching time is linear in the text, so no text can block the server.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import re2  # type: ignore[import-untyped]

from decoding.errors import ConfigError, InvalidRequestError
from deployments.configuration.endpoint import StrategyConfig, StrategyKind
from deployments.configuration.templates import PromptTemplate
from deployments.configuration.values import load_callable
from deployments.fields.strict import nearest

Extract = Callable[[str], str | None]  # None: the text has no answer
Utility = Callable[[str, str], float]  # (candidate, reference) -> utility, higher is better
Synthesize = Callable[[str, Sequence["Proposal"]], str]  # (question, proposals) -> what the writer reads

_TEMPLATE = Path(__file__).with_name("synthesize.jinja")
_SHOWN = ("prompt", "answers")  # variables of a template
_MAX_PATTERN = 1000  # characters
_PATTERN_BYTES = 8 * 2**20  # of a compiled pattern
_MAX_ANSWER = 1000  # characters; longer texts have no vote
_MAX_OBJECTS = 100  # opening braces to try


def whole_text(text: str) -> str | None:
    """Return the text with white space normalised; None if nothing is left or it is too long to be an answer."""
    words = " ".join(text.split())
    return words if 0 < len(words) <= _MAX_ANSWER else None


def by_regex(pattern: str, *, key: str) -> Extract:
    """Extract the last match of the pattern, or its first group; raises ConfigError, which names the key."""
    options = re2.Options()
    options.max_mem, options.log_errors = _PATTERN_BYTES, False
    if len(pattern) > _MAX_PATTERN:
        raise ConfigError(f"{key}: has {len(pattern)} characters; at most {_MAX_PATTERN} are allowed")
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        raise ConfigError(f"{key}: {pattern!r} is not a regular expression of RE2: {reason}") from error
    group = min(compiled.groups, 1)

    def extract(text: str) -> str | None:
        last: str | None = None
        for match in compiled.finditer(text):
            last = match.group(group)
        return None if last is None else whole_text(last)

    return extract


def by_json_field(path: str) -> Extract:
    """Extract a field of the last JSON object that has it; `a.b` is the field `b` of the object in `a`."""
    names = path.split(".")

    def extract(text: str) -> str | None:
        starts = [index for index, character in enumerate(text) if character == "{"]
        for start in reversed(starts[-_MAX_OBJECTS:]):
            exists, value = _field(text, start, names)
            if exists:
                return whole_text(value if isinstance(value, str) else json.dumps(value, sort_keys=True))
        return None

    return extract


def _field(text: str, start: int, names: list[str]) -> tuple[bool, object]:
    try:
        value, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return False, None
    for name in names:
        if not isinstance(value, dict) or name not in value:
            return False, None
        value = value[name]
    return True, value


def chrf(candidate: str, reference: str) -> float:
    """Character n-gram F-score, 0 to 1: chrF2 (Popović 2015, "chrF", WMT), by sacrebleu (arXiv 1804.08771)."""
    from sacrebleu import sentence_chrf  # slow to import and seldom needed

    return float(sentence_chrf(candidate, [reference]).score) / 100


@dataclass(frozen=True, slots=True)
class Ranking:
    """N candidates from best to worst, with their scores and votes.

    The weight of a candidate is its member's. Its log-likelihood is by its own member.
    """

    order: Sequence[int]  # [N] indices, best first
    scores: Sequence[float]  # [N] ties go to the more likely candidate
    answers: Sequence[str | None] = ()  # [N] majority: extracted answers, None without one
    votes: Mapping[str, float] | None = None  # majority: the share of each answer, largest first

    @property
    def winner(self) -> int:
        return self.order[0]

    @property
    def agreement(self) -> float | None:
        """Share of all votes for the winner's answer; 0 if nobody voted, None without a vote."""
        return None if self.votes is None else self.votes.get(self.answers[self.winner] or "", 0.0)


def by_score(scores: Sequence[float], likelihoods: Sequence[float]) -> Ranking:
    """Rank by score, then by likelihood."""
    order = sorted(range(len(scores)), key=lambda i: (scores[i], likelihoods[i]), reverse=True)
    return Ranking(order, scores)


def majority(answers: Sequence[str | None], weights: Sequence[float], likelihoods: Sequence[float]) -> Ranking:
    """Rank by the total weight of each answer, then by likelihood.

    Self-consistency: Wang et al., arXiv 2203.11171. A candidate without an answer has no vote. If nobody votes, the
    most likely candidate wins.
    """
    voted: dict[str, float] = {}
    best: dict[str, float] = {}
    for answer, weight, likelihood in zip(answers, weights, likelihoods, strict=True):
        if answer is not None:
            voted[answer] = voted.get(answer, 0.0) + weight
            best[answer] = max(best.get(answer, likelihood), likelihood)
    total = sum(voted.values()) or 1.0
    # rounded, so that ties do not depend on the order of addition
    shares = {answer: round(voted[answer] / total, 12) for answer in voted}
    scores = [shares[answer] if answer is not None else 0.0 for answer in answers]
    among_equals = [best[answer] if answer is not None else float("-inf") for answer in answers]
    order = sorted(range(len(answers)), key=lambda i: (scores[i], among_equals[i], likelihoods[i]), reverse=True)
    return Ranking(order, scores, answers, dict(sorted(shares.items(), key=lambda item: -item[1])))


def minimum_risk(
    texts: Sequence[str], weights: Sequence[float], likelihoods: Sequence[float], utility: Utility
) -> Ranking:
    """Rank by expected utility, with the other candidates as references.

    Minimum Bayes risk by sampling: Eikema and Aziz, arXiv 2108.04718, section 4. Calls the utility at most N² times.
    """
    value = cache(utility)

    def expected_utility(i: int) -> float:
        others = [(weights[j], value(texts[i], texts[j])) for j in range(len(texts)) if j != i]
        total = sum(weight for weight, _ in others)
        return sum(weight * score for weight, score in others) / total if total else 0.0

    return by_score([expected_utility(i) for i in range(len(texts))], likelihoods)


@dataclass(frozen=True, slots=True)
class Proposal:
    """An answer that a writer is shown."""

    model: str  # the member's
    text: str


def by_template(source: str, *, key: str) -> Synthesize:
    """Fill a template with the question, `prompt`, and the proposals, `answers`; raises ConfigError, naming the key."""
    template = PromptTemplate(key, source)
    unknown = [name for name in template.variables if name not in _SHOWN]
    if unknown:
        raise ConfigError(f"{key}: {unknown[0]!r} is no variable of it; {nearest(unknown[0], _SHOWN)}")
    if "answers" not in template.variables:
        raise ConfigError(f"{key}: does not show `answers`; loop over them to show each one's `text`")

    def synthesize(question: str, proposals: Sequence[Proposal]) -> str:
        variables = {"prompt": question, "answers": list(proposals)}
        return template.render({name: variables[name] for name in template.variables})

    try:
        synthesize("", [Proposal("", "")])
    except InvalidRequestError as error:
        raise ConfigError(f"{key}: {error.__cause__}") from error
    return synthesize


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyOptions:
    """The strategy of one endpoint.

    rerank: the answer that the members, or the judge, find most likely per token. majority: the most frequent extracted
    answer; with one member, self-consistency (Wang et al., arXiv 2203.11171). mbr: the answer closest to all others.
    best_of: the answer that its own member finds most likely per token. synthesize: one that a writer makes of all.
    """

    kind: StrategyKind
    candidates: int = 4  # per member
    judge: str | None = None  # rerank: the member that scores all; None: every member does
    extract: Extract = whole_text  # majority
    utility: Utility = chrf  # mbr
    synthesize: Synthesize | None = None


def load_strategy(config: StrategyConfig, *, key: str) -> StrategyOptions:
    """Build the options of a configured strategy; raises ConfigError, which names what is below the key."""
    if config.kind == "mbr" and config.utility is None and find_spec("sacrebleu") is None:
        raise ConfigError(f"{key}.utility: chrF needs sacrebleu: pip install 'consort[mbr]'; or name another function")
    extract: Extract = whole_text if config.json_field is None else by_json_field(config.json_field)
    if config.regex is not None:
        extract = by_regex(config.regex, key=f"{key}.regex")
    return StrategyOptions(
        kind=config.kind,
        candidates=config.candidates,
        judge=config.judge,
        extract=extract,
        utility=chrf if config.utility is None else load_callable(config.utility, key=f"{key}.utility"),
        synthesize=_load_template(config, key=f"{key}.template") if config.kind == "synthesize" else None,
    )


def _load_template(config: StrategyConfig, *, key: str) -> Synthesize:
    source = _TEMPLATE.read_text(encoding="utf-8") if config.template is None else config.template
    return by_template(source, key=key)
