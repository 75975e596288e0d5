"""Compare the ways of decoding that a running server has; write Markdown, two pictures and JSON."""

import json
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from decoding.errors import UnavailableError
from deployments.client import Client
from evaluation.metrics import TextMetrics, average, measure, metrics_table

DRAFT_LENGTHS = tuple(range(1, 11))
_BLENDS = ("contrastive", "ensemble")
_TIMES, _ACCEPTANCE = "execution-time.png", "acceptance.png"
_BLUE, _RED = "#3b6fb6", "#c0392b"


@dataclass(frozen=True, slots=True)
class Way:
    """A way of decoding: an endpoint, and what its requests say."""

    name: str
    endpoint: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer and its time."""

    text: str
    tokens: Sequence[int]
    sources: Sequence[str]  # of each token, as in `token_details`
    seconds: float


@dataclass(frozen=True, slots=True)
class WayReport:
    """Means over all prompts."""

    way: Way
    metrics: TextMetrics
    seconds: float  # of all answers together
    tokens_per_s: float
    texts: Sequence[str]

    def document(self) -> dict[str, Any]:
        way = {"name": self.way.name, "endpoint": self.way.endpoint, **self.way.fields}
        figures = {"seconds": round(self.seconds, 4), "tokens_per_s": round(self.tokens_per_s, 2)}
        return {**way, **asdict(self.metrics), **figures, "texts": list(self.texts)}


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a report shows."""

    server: str
    endpoint: str  # that was measured with and without drafts, and whose target judges all texts
    prompts: Sequence[str]
    max_tokens: int
    temperature: float
    ways: Sequence[WayReport]
    seconds: Mapping[int, float]  # by draft length; 0: plain; of all answers together
    acceptance: Sequence[float]  # by position: the share of drafts that were accepted up to there

    def document(self) -> dict[str, Any]:
        return {
            "server": self.server,
            "endpoint": self.endpoint,
            "prompts": list(self.prompts),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "ways": [way.document() for way in self.ways],
            "seconds_by_draft_length": {str(length): round(seconds, 4) for length, seconds in self.seconds.items()},
            "acceptance_by_position": [round(share, 4) for share in self.acceptance],
        }


class Reporter:
    """Asks a server, one request after the other, so that times don't disturb each other."""

    def __init__(self, client: Client, *, max_tokens: int, temperature: float, seed: int = 0) -> None:
        self._client, self._max_tokens, self._temperature, self._seed = client, max_tokens, temperature, seed

    def run(self, endpoint: str | None, prompts: Sequence[str], lengths: Sequence[int] = DRAFT_LENGTHS) -> Report:
        """Measure every way of decoding, and every draft length. endpoint: None: the first, that drafts if one does."""
        cards = self._client.document("/v1/models")["data"]
        card = _main_card(cards, endpoint)
        drafts = bool(card["proposers"])
        ways = [Way("plain", card["id"], {"speculate": False})]
        if drafts:
            ways.append(Way("speculative", card["id"], {}))
        for kind in _BLENDS:
            judged = [other for other in cards if other["kind"] == kind and other["target"] == card["target"]]
            ways += [Way(kind, other["id"], {}) for other in judged[:1]]
        self._answers(ways[0], prompts[:1])  # so that nothing is measured for the first time
        answers = [self._answers(way, prompts) for way in ways]
        seconds, accepted = {0: _seconds(answers[0])}, Counter[int]()
        for length in lengths if drafts else ():
            at_length = self._answers(Way("speculative", card["id"], {"draft_length": length}), prompts)
            seconds[length] = _seconds(at_length)
            if length == max(lengths):
                accepted = sum((count_accepted(answer.sources) for answer in at_length), Counter())
        return Report(
            self._client.url,
            card["id"],
            prompts,
            self._max_tokens,
            self._temperature,
            [self._report(card["id"], way, prompts, given) for way, given in zip(ways, answers, strict=True)],
            seconds,
            acceptance_by_position(accepted),
        )

    def _answers(self, way: Way, prompts: Sequence[str]) -> list[Answer]:
        return [self._answer(way, prompt) for prompt in prompts]

    def _answer(self, way: Way, prompt: str) -> Answer:
        body = {
            "model": way.endpoint,
            "prompt": prompt,
            "max_tokens": self._max_tokens,
            "temperature": self._temperature,
            "seed": self._seed,
            "return_token_details": True,
            "cache_salt": secrets.token_hex(),  # so that all ways read their prompts
            **way.fields,
        }
        began_s = time.perf_counter()
        document = self._ask("/v1/completions", body)
        seconds = time.perf_counter() - began_s
        choice = document["choices"][0]
        tokens, sources = ([detail[name] for detail in choice["token_details"]] for name in ("id", "source"))
        return Answer(choice["text"], tokens, sources, seconds)

    def _ask(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        document: dict[str, Any] = self._client.checked(path, self._client.post(path, body))
        return document

    def _report(self, judge: str, way: Way, prompts: Sequence[str], answers: Sequence[Answer]) -> WayReport:
        pairs = zip(prompts, answers, strict=True)
        texts = [measure(answer.tokens, self._log_probs(judge, prompt, answer)) for prompt, answer in pairs]
        tokens, seconds = sum(len(answer.tokens) for answer in answers), _seconds(answers)
        return WayReport(way, average(texts), seconds, tokens / seconds, [answer.text for answer in answers])

    def _log_probs(self, judge: str, prompt: str, answer: Answer) -> list[float]:
        """Return the log-probability of each token of an answer, by the judge's target alone, in nats."""
        before = self._ask("/tokenize", {"model": judge, "prompt": prompt})["tokens"]
        body = {"model": judge, "prompt": [*before, *answer.tokens], "max_tokens": 0, "echo": True, "logprobs": 0}
        document = self._ask("/v1/completions", body)
        log_probs: list[float] = document["choices"][0]["logprobs"]["token_logprobs"]
        return log_probs[len(before) :]


def count_accepted(sources: Sequence[str]) -> Counter[int]:
    """Count the drafts of one answer by how many of their tokens were accepted."""
    counts, accepted = Counter[int](), 0
    for source in sources:
        if source == "accepted":
            accepted += 1
        elif source != "plain":
            counts[accepted] += 1
            accepted = 0
    return counts


def acceptance_by_position(counts: Mapping[int, int]) -> list[float]:
    """Return the share of drafts that were accepted up to their first, second, … token. counts: of `count_accepted`."""
    total = sum(counts.values())
    return [
        sum(count for accepted, count in counts.items() if accepted >= position) / total
        for position in range(1, max(counts, default=0) + 1)
    ]


def _seconds(answers: Sequence[Answer]) -> float:
    return sum(answer.seconds for answer in answers)


def _main_card(cards: Sequence[Mapping[str, Any]], endpoint: str | None) -> Mapping[str, Any]:
    alone = [card for card in cards if card["kind"] in ("plain", "speculative")]
    chosen = [card for card in alone if endpoint in (None, card["id"])]
    if not chosen:
        names = ", ".join(card["id"] for card in alone) or "none"
        raise UnavailableError(f"the server has no endpoint {endpoint or 'with one target'!r}; it has {names}")
    return max(chosen, key=lambda card: bool(card["proposers"]))


def write_page(report: Report, folder: Path) -> list[Path]:
    """Write the report into a folder, which is made if it is missing. Returns the files.

    Without matplotlib it has no pictures.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page, data = folder / "report.md", folder / "report.json"
    pictures = [folder / _TIMES, folder / _ACCEPTANCE] if len(report.seconds) > 1 and has_pictures() else []
    page.write_text(_page(report, pictured=bool(pictures)), encoding="utf-8")
    data.write_text(json.dumps(report.document(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if pictures:
        times = {length: report.seconds[length] for length in sorted(report.seconds) if length}
        _draw(times, pictures[0], labels=("draft length", "seconds"), plain=report.seconds[0])
        shares = dict(enumerate(report.acceptance, start=1))
        _draw(shares, pictures[1], labels=("position in the draft", "share of drafts accepted up to there"))
    return [page, data, *pictures]


def has_pictures() -> bool:
    """Whether matplotlib is here, which draws them."""
    return find_spec("matplotlib") is not None


def _page(report: Report, *, pictured: bool) -> str:
    more = {way.way.name: (f"{way.tokens_per_s:.1f}",) for way in report.ways}
    table = metrics_table({way.way.name: way.metrics for way in report.ways}, more, ("tokens/s",))
    parts = [
        f"# Report on {report.endpoint}",
        f"{len(report.prompts)} prompts, up to {report.max_tokens} tokens each, temperature {report.temperature:g}, "
        f"one request at a time, at {report.server}.",
        "## Texts and speed",
        f"```text\n{table}\n```",
        "Entropies in bits, likelihood in nats per token by the target alone; means over the prompts.",
    ]
    if len(report.seconds) > 1:
        plain = report.seconds[0]
        best = min((length for length in report.seconds if length), key=lambda length: report.seconds[length])
        parts += [
            "## Execution time by draft length",
            *([f"![Seconds by draft length, and plain]({_TIMES})"] if pictured else []),
            f"Plain decoding took {plain:.2f} s. The fastest draft length was {best}, with {report.seconds[best]:.2f} "
            f"s: {plain / report.seconds[best]:.2f} times as fast.",
        ]
        if pictured:
            parts += ["## Acceptance by position", f"![Share of drafts accepted up to each position]({_ACCEPTANCE})"]
    parts.append("## Texts")
    for index, prompt in enumerate(report.prompts):
        parts.append(f"### {prompt}")
        parts += [f"**{way.way.name}**:\n\n```text\n{way.texts[index].strip()}\n```" for way in report.ways]
    return "\n\n".join(parts) + "\n"


def _draw(bars: Mapping[int, float], path: Path, *, labels: tuple[str, str], plain: float | None = None) -> None:
    """Draw bars over 1, 2, … tokens. labels: of the axes. plain: where a line stands for plain decoding."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.bar(list(bars), list(bars.values()), color=_BLUE, label="speculative")
    axes.set(xlabel=labels[0], ylabel=labels[1], xticks=list(bars))
    if plain is None:
        axes.set_ylim(0, 1)
    else:
        axes.axhline(plain, color=_RED, linestyle="--", label="plain")
        axes.legend()
    figure.savefig(path, dpi=150)
