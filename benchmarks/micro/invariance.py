"""The share of texts that depend on drafts, on company or on the target's replica. It should be 0.

python -m benchmarks.micro.invariance --model models/target --prompts 100 --output benchmarks/results/invariance.json

Prompts are taken in parts, in one or more processes. The output is written after each part, so that what a long run has
found is not lost with it.
"""

import argparse
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from actors.coordinator.request import Delta, Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.replica import load_runner
from actors.replica.roles import Role
from actors.wire.messages import ReplicaAddress
from benchmarks.report import table, write
from decoding.drafts.draft import Draft
from decoding.drafts.ngram import NgramOptions
from decoding.drafts.token_tree import TokenTree
from decoding.sampling.params import SamplingParams
from engine.kernels import attention as reference
from engine.kernels.attention import AttentionArgs
from engine.loading.checkpoint import ModelSpec
from engine.loading.settings import load_tokenizer
from engine.model.runner import Runner
from training.heldout import read_prompts

_TASKS = "Explain this:", "Go on:", "Summarise this in a few words:", "What is wrong with this?"
_DRAFT_LENGTH = 4
_RIGHT = 0.75  # the share of draft tokens that are the text's own
_REPLICAS = "first", "second"


def _sdpa(args: AttentionArgs) -> Tensor:
    """Attend by torch's function, row by row: [N, heads, D]."""
    reference.write(args)
    output = torch.empty_like(args.query)
    slots, lengths, offsets = (part.tolist() for part in (args.batch.slots, args.batch.lengths, args.batch.offsets))
    for slot, length, start, end in zip(slots, lengths, offsets, offsets[1:], strict=False):
        pages, tokens = args.tables[slot, : -(-length // args.keys.shape[-1])].long(), slice(start, end)
        row_keys = args.keys[pages].permute(1, 0, 3, 2).flatten(1, 2)[None, :, :length]  # [1, kv_heads, L, D]
        row_values = args.values[pages].transpose(0, 1).flatten(1, 2)[None, :, :length]
        mask, heads = reference.visible(args, tokens, length), args.query[tokens].transpose(0, 1)[None]
        result = scaled_dot_product_attention(heads, row_keys, row_values, mask, scale=args.scale, enable_gqa=True)
        output[tokens] = result[0].transpose(0, 1)
    return output


# What to replace by what was there before, to see what it is worth.
_WITHOUT = {
    "logits": ("engine.layers.faster_layers.replace_output_layer", lambda model: None),  # rounded to the model's type
    "products": ("engine.layers.linear.has_kernel", lambda weight: False),  # computed by oneDNN
    "attention": ("engine.model.attention._implementation", lambda args: _sdpa),
}


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
    seconds: float  # of all parts, whether they ran at the same time or not

    def __add__(self, other: "Finding") -> "Finding":
        """Return what both found, with the same condition and temperature, for other prompts."""
        firsts = [first for first in (self.first, other.first) if first is not None]
        return Finding(
            self.condition,
            self.temperature,
            self.texts + other.texts,
            self.different + other.different,
            min(firsts, default=None),
            self.accepted + other.accepted,
            self.drafted + other.drafted,
            self.seconds + other.seconds,
        )


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

    def __init__(self, options: argparse.Namespace, begin: int, end: int) -> None:
        """begin, end: which prompts."""
        self._options, self._begin = options, begin
        tokenizer: Any = load_tokenizer(options.model)
        texts = read_prompts(Path("models/heldout.jsonl"))
        chats = [f"{task}\n{text}" for task in _TASKS for text in texts][:: len(_TASKS) * len(texts) // options.prompts]
        self._prompts: list[list[int]] = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": chat}], add_generation_prompt=True, return_dict=False
            )
            for chat in chats[begin:end]
        ]
        self._runners = {name: load_runner(self._spec(name)) for name in _REPLICAS}

    def _spec(self, name: str) -> ModelSpec:
        options = self._options
        longest = max(map(len, self._prompts)) + options.new_tokens
        return ModelSpec(
            name=name,
            path=options.model,
            dtype=options.dtype,
            device="cpu",
            slots=max(options.company),
            max_length=longest + 1,
            threads=options.threads,
        )

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
            first = [_first_difference(*pair) for pair in zip(texts, reference, strict=True) if pair[0] != pair[1]]
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
        proposers = mock.Mock(return_value=mock.Mock(make=lambda *given, **options: KnowingProposer(texts)))
        names = _REPLICAS if condition.replaced else _REPLICAS[:1]
        replicas: dict[str, tuple[Role, Runner]] = {name: ("target", self._runners[name]) for name in names}
        ngram = NgramOptions() if condition.drafts else None
        endpoint = Endpoint("e", "target", None, _DRAFT_LENGTH, lambda tokens: "", ngram)
        requests = [
            Request(endpoint, prompt, self._params(temperature, seed))
            for seed, prompt in enumerate(self._prompts, self._begin)
        ]
        groups = [requests[start : start + condition.company] for start in range(0, len(requests), condition.company)]
        with mock.patch("actors.verifier.inbox.NgramProposers", proposers):
            if condition.replaced:
                return [answer for group in groups for answer in _answer_on_two(replicas, group)]
            with _Replicas(replicas, LoopOptions(adaptive=False)) as engine:
                return [answer for group in groups for answer in engine.generate(group)]

    def _params(self, temperature: float, seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=self._options.new_tokens, temperature=temperature, seed=seed)


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


def _first_difference(text: Sequence[int], reference: Sequence[int]) -> int:
    pairs: Iterable[tuple[int, int]] = zip(text, reference, strict=False)
    return next((i for i, (left, right) in enumerate(pairs) if left != right), min(len(text), len(reference)))


def main() -> None:
    """Print and write the findings."""
    options = _options()
    begin, end = options.only or (0, options.prompts)
    end = min(end, options.prompts)
    totals: dict[tuple[str, float], Finding] = {}
    # A process ends with its part, and so its two models do not stay in memory.
    with ProcessPoolExecutor(options.processes, get_context("spawn"), max_tasks_per_child=1) as pool:
        starts = range(begin, end, options.part)
        parts = [pool.submit(_find, options, start, min(start + options.part, end)) for start in starts]
        try:
            for part in as_completed(parts):
                for finding in part.result():
                    key = finding.condition, finding.temperature
                    totals[key] = totals[key] + finding if key in totals else finding
                _report(options, list(totals.values()))
        finally:
            pool.shutdown(cancel_futures=True)  # after a part that failed, nothing else begins


def _find(options: argparse.Namespace, begin: int, end: int) -> list[Finding]:
    """Return the findings of some prompts."""
    with ExitStack() as stack:
        for name in options.without:
            stack.enter_context(mock.patch(*_WITHOUT[name]))
        bench = Bench(options, begin, end)
        return [finding for temperature in options.temperature for finding in bench.findings(temperature)]


def _report(options: argparse.Namespace, findings: Sequence[Finding]) -> None:
    head = "condition", "T", "texts", "different", "first at", "accepted / drafted", "s"
    rows = [
        (
            *(f.condition, f"{f.temperature:g}", str(f.texts), str(f.different)),
            *("" if f.first is None else str(f.first), f"{f.accepted} / {f.drafted}", f"{f.seconds:.0f}"),
        )
        for f in findings
    ]
    print(table(head, rows), flush=True)
    if options.output:
        write(options.output, "benchmarks.micro.invariance", vars(options), findings=[asdict(f) for f in findings])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--only", type=int, nargs=2, metavar=("BEGIN", "END"), help="these of the prompts")
    parser.add_argument("--part", type=int, default=48, help="prompts that are taken together")
    parser.add_argument("--processes", type=int, default=1, help="parts that are taken at the same time")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.7, 0.0])
    parser.add_argument("--company", type=int, nargs="+", default=[1, 4, 16], help="requests at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--without", nargs="+", choices=_WITHOUT, default=[], help="measures to leave out")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if any(options.part % company for company in options.company):
        parser.error("--part must be a multiple of each --company")
    return options


if __name__ == "__main__":
    main()
