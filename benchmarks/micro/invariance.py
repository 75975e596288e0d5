"""The share of texts that depend on drafts, on company or on the target's replica. It should be 0."""

import argparse
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from actors.coordinator.request import Delta, Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from actors.wire.messages import ReplicaAddress
from benchmarks.findings import first_difference
from benchmarks.models import HELD_OUT
from benchmarks.report import write
from decoding.drafts.draft import Draft, TokenTree
from decoding.drafts.options import NgramOptions
from decoding.sampling.params import SamplingParams
from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_runner
from engine.loading.settings import load_tokenizer
from engine.model.runner import Runner
from evaluation.metrics import table
from evaluation.prompts import read_prompts

_TASKS = "Explain this:", "Go on:", "Summarise this in a few words:", "What is wrong with this?"
_DRAFT_LENGTH = 4
_RIGHT = 0.75  # the share of draft tokens that are the text's own
_REPLICAS = "first", "second"


@dataclass(frozen=True, slots=True)
class Condition:
    """A way to write the texts. company: requests that run at once."""

    drafts: bool
    company: int
    replaced: bool = False  # the target is lost in the middle of the texts

    def __str__(self) -> str:
        parts = "drafts" if self.drafts else "plain", f"among {self.company}" if self.company > 1 else "alone"
        return ", ".join([*parts, *["target lost"] * self.replaced])


@dataclass(frozen=True, slots=True)
class Finding:
    """How many texts differ from those written alone without drafts."""

    condition: str
    temperature: float
    texts: int
    different: int
    first: int | None  # the least position where one differs
    accepted: int  # draft tokens
    drafted: int
    seconds: float

    def row(self) -> list[str]:
        first = "" if self.first is None else str(self.first)
        counts = f"{self.temperature:g}", str(self.texts), str(self.different), first
        return [self.condition, *counts, f"{self.accepted} / {self.drafted}", f"{self.seconds:.0f}"]


class KnowingProposer:
    """Drafts a known text's next tokens, some of them replaced, and sometimes a second branch."""

    name = "ngram"  # which it stands in for

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = texts
        self._text: Sequence[int] | None = None

    def read(self, tokens: Sequence[int], most: int) -> int:
        return 0

    def propose(self, tokens: Sequence[int]) -> Draft:
        if self._text is None:
            self._text = next((text for text in self._texts if text[: len(tokens)] == tokens), [])
        start, rng = len(tokens), random.Random(len(tokens))
        chains = [list(self._text[start : start + _DRAFT_LENGTH])]
        if rng.random() < 1 / 2:
            chains.append([*chains[0][:1], *chains[0][2:]])
        tree = TokenTree()
        for chain in chains:
            tree.add([token if rng.random() < _RIGHT else token ^ 1 for token in chain], [0.9] * len(chain))
        return tree.draft


class _Replicas(Engine):
    """An engine whose replicas all run the target."""

    def _set_replicas(self) -> None:
        self.coordinator.set_replicas(ReplicaAddress(name, "target") for name in self._alive)


class Bench:
    """A model, its prompts, and one engine per condition."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        tokenizer: Any = load_tokenizer(options.model)
        texts = read_prompts(HELD_OUT)
        chats = [f"{task}\n{text}" for task in _TASKS for text in texts][:: len(_TASKS) * len(texts) // options.prompts]
        messages = [[{"role": "user", "content": chat}] for chat in chats[: options.prompts]]
        template = partial(tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)
        self._prompts: list[list[int]] = list(map(template, messages))
        spec = ModelSpec(
            name="target",
            path=options.model,
            dtype=options.dtype,
            device="cpu",
            slots=max(options.company),
            max_length=max(map(len, self._prompts)) + options.new_tokens + 1,
            threads=options.threads,
        )
        self._runners = {name: load_runner(spec) for name in _REPLICAS}

    def findings(self, temperature: float) -> Iterator[Finding]:
        """Yield a finding per condition; the first is the reference."""
        conditions = [
            Condition(drafts, company, replaced)
            for company in self._options.company
            for drafts in (False, True)
            for replaced in ((False, True) if company > 1 else (False,))
        ]
        reference: list[list[int]] = []
        for condition in conditions:
            began_s = time.perf_counter()
            answers = self._answers(condition, temperature, reference)
            seconds = time.perf_counter() - began_s
            texts = [[token for delta in answer for token in delta.token_ids] for answer in answers]
            reference = reference or texts
            first = [index for index in map(first_difference, texts, reference) if index is not None]
            yield Finding(
                str(condition),
                temperature,
                len(texts),
                len(first),
                min(first, default=None),
                sum(answer[-1].statistics.accepted for answer in answers),
                sum(answer[-1].statistics.drafted for answer in answers),
                seconds,
            )

    def _answers(self, condition: Condition, temperature: float, reference: list[list[int]]) -> list[list[Delta]]:
        texts = [[*prompt, *text] for prompt, text in zip(self._prompts, reference, strict=False)]
        names = _REPLICAS if condition.replaced else _REPLICAS[:1]
        replicas: dict[str, tuple[Role, Runner]] = {name: ("target", self._runners[name]) for name in names}
        ngram = NgramOptions() if condition.drafts else None
        endpoint = Endpoint("e", "target", None, _DRAFT_LENGTH, lambda tokens: "", ngram)
        params = SamplingParams(max_tokens=self._options.new_tokens, temperature=temperature)
        requests = [Request(endpoint, prompt, replace(params, seed=seed)) for seed, prompt in enumerate(self._prompts)]
        groups = [requests[start : start + condition.company] for start in range(0, len(requests), condition.company)]
        proposer = mock.Mock(side_effect=lambda *given, **options: KnowingProposer(texts))
        with mock.patch("actors.verifier.proposers.NgramLookup", proposer):
            if condition.replaced:
                return [answer for group in groups for answer in _answer_on_two(replicas, group)]
            with _Replicas(replicas, LoopOptions(adaptive=False)) as engine:
                return [answer for group in groups for answer in engine.generate(group)]


def _answer_on_two(replicas: Mapping[str, tuple[Role, Runner]], requests: Sequence[Request]) -> list[list[Delta]]:
    """Answer requests at the same time; one of two replicas is lost once the first answer is half written."""
    half, written = requests[0].params.max_tokens // 2, 0
    first: list[Delta] = []
    with _Replicas(replicas, LoopOptions(adaptive=False)) as engine, ThreadPoolExecutor() as pool:
        others = pool.submit(engine.generate, requests[1:])
        for delta in engine.stream(requests[0]):
            first.append(delta)
            if written < half <= written + len(delta.tokens):
                engine.lose(_REPLICAS[0])
            written += len(delta.tokens)
        return [first, *others.result()]


def main() -> None:
    """Print and write the findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.7, 0.0])
    parser.add_argument("--company", type=int, nargs="+", default=[1, 4, 16], help="requests at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(".bench/invariance.json"))
    options = parser.parse_args()
    bench, findings = Bench(options), []
    for temperature in options.temperature:
        for finding in bench.findings(temperature):
            print(finding, flush=True)
            findings.append(finding)
    head = "condition", "T", "texts", "different", "first at", "accepted / drafted", "s"
    print(table(head, [finding.row() for finding in findings]))
    write(options.output, "benchmarks.micro.invariance", vars(options), findings=list(map(asdict, findings)))


if __name__ == "__main__":
    main()
