"""`python -m benchmarks.micro.acceptance`: acceptance rates of the verification rules, for the bundled pair.

The drafter writes γ tokens, the target verifies them, and both continue from the committed tokens. There are no servers
and no clocks, so apart from rounding the results do not depend on the machine.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from actors.replica.replica import load_runner
from benchmarks.report import table
from decoding.drafts.draft import Draft
from decoding.drafts.ngram import NgramProposer
from decoding.drafts.rejection import RejectionRow, Verdict, distributions, draft_key, draw, verify_by_rejection
from decoding.drafts.verify import accepted_path
from decoding.sampling.noise import gumbel, noise_key
from engine.loading.checkpoint import ModelSpec
from engine.loading.settings import load_tokenizer
from engine.model.forward_input import RowInput
from engine.model.runner import Runner
from training.heldout import read_prompts

_MAX_LENGTH, _PREFILL = 320, 160
_TOP_K = 64


class Row:
    """A growing text. Its number is its slot in both models, and its seed."""

    def __init__(self, number: int, prompt: Sequence[int]) -> None:
        self.number, self.tokens, self.prompt_length = number, list(prompt), len(prompt)
        self.known = len(prompt) - 1  # tokens that the drafter has in its cache
        self.lookup = NgramProposer()


@dataclass(frozen=True, slots=True)
class Pair:
    """Both models, at one temperature."""

    target: Runner
    drafter: Runner
    temperature: float

    def prefill(self, rows: list[Row]) -> None:
        """Run all but the last token of each prompt."""
        for runner in (self.target, self.drafter):
            runner.logits([RowInput(row.number, 0, row.tokens[:-1], wanted=0) for row in rows])

    def verify_logits(self, rows: list[Row], drafts: list[Draft]) -> Tensor:
        """Return the target's logits after each text and each of its draft tokens, [N, V]."""
        inputs = [
            RowInput(row.number, len(row.tokens) - 1, [row.tokens[-1], *draft.tokens])
            for row, draft in zip(rows, drafts, strict=True)
        ]
        return self.target.logits(inputs) / self.temperature

    def draft_logits(self, rows: list[Row], drafts: list[Draft]) -> Tensor:
        """Return the drafter's logits after each text and its draft so far, [B, V]."""
        inputs = []
        for row, draft in zip(rows, drafts, strict=True):
            text = row.tokens + draft.tokens
            start = len(text) - 1 if draft.tokens else row.known
            inputs.append(RowInput(row.number, start, text[start:], wanted=1))
        return self.drafter.logits(inputs) / self.temperature


DraftRows = Callable[[Pair, list[Row], int], list[Draft]]
VerifyRows = Callable[[Tensor, list[Row], list[Draft]], list[Verdict]]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one method of drafting and verification at one temperature."""

    way: str
    temperature: float
    draft_length: int
    steps: int
    drafted: int
    accepted: int

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / max(self.drafted, 1)

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.steps


def draft_drawn(pair: Pair, rows: list[Row], count: int, *, top_k: int) -> list[Draft]:
    """Draw chains from the drafter's own distribution."""
    drafts = [Draft([], list(range(-1, count - 1))) for _ in rows]
    for depth in range(count):
        keys = [draft_key(row.number, len(row.tokens) + depth, len(row.tokens)) for row in rows]
        tokens, ids, probs = draw(pair.draft_logits(rows, drafts), torch.tensor(keys, dtype=torch.int32), top_k)
        for draft, token, origin in zip(drafts, tokens.tolist(), distributions(ids, probs), strict=True):
            draft.tokens.append(token)
            draft.distributions.append(origin)
    return drafts


def draft_best(pair: Pair, rows: list[Row], count: int, *, shared_noise: bool) -> list[Draft]:
    """Make chains of the drafter's best tokens, with the target's noise or without noise."""
    drafts = [Draft([], list(range(-1, count - 1)), [], [None] * count) for _ in rows]
    for depth in range(count):
        scores = pair.draft_logits(rows, drafts)
        if shared_noise:
            scores += _noise([(row, len(row.tokens) + depth) for row in rows], scores.shape[-1])
        for draft, token in zip(drafts, scores.argmax(-1).tolist(), strict=True):
            draft.tokens.append(token)
    return drafts


def draft_looked_up(_: Pair, rows: list[Row], count: int) -> list[Draft]:
    """Look up drafts in the text so far."""
    drafts = [row.lookup.propose(row.tokens).first(count) for row in rows]
    return [Draft(draft.tokens, draft.parents, [], [None] * len(draft.tokens)) for draft in drafts]


def verify_coupled(logits: Tensor, rows: list[Row], drafts: list[Draft]) -> list[Verdict]:
    """Verify with shared noise. logits: [N, V], divided by the temperature, in the order of `verify_by_rejection`."""
    positions = [
        (row, len(row.tokens) + depth)
        for row, draft in zip(rows, drafts, strict=True)
        for depth in (0, *draft.depths())
    ]
    sampled = (logits + _noise(positions, logits.shape[-1])).argmax(-1)
    verdicts = []
    for own, draft in zip(sampled.split([len(draft.tokens) + 1 for draft in drafts]), drafts, strict=True):
        path, rejected = accepted_path(own.tolist(), draft)
        verdicts.append(Verdict(path, int(own[path[-1] + 1 if path else 0]), rejected))
    return verdicts


def verify_rejecting(logits: Tensor, rows: list[Row], drafts: list[Draft], *, block: bool) -> list[Verdict]:
    """Verify by rejection sampling. logits: as for `verify_coupled`."""
    judged = [RejectionRow(draft, row.number, len(row.tokens)) for row, draft in zip(rows, drafts, strict=True)]
    return verify_by_rejection(logits.softmax(-1), judged, block=block)


def ways(vocab_size: int) -> dict[str, tuple[DraftRows, VerifyRows]]:
    """Return functions that draft and verify, by name of the method."""
    tokenwise, block = partial(verify_rejecting, block=False), partial(verify_rejecting, block=True)
    full, sparse = partial(draft_drawn, top_k=vocab_size), partial(draft_drawn, top_k=_TOP_K)
    return {
        "coupled": (partial(draft_best, shared_noise=True), verify_coupled),
        "rejection, whole distribution": (full, tokenwise),
        f"rejection, top {_TOP_K}": (sparse, tokenwise),
        "block, whole distribution": (full, block),
        f"block, top {_TOP_K}": (sparse, block),
        "block, the drafter's best tokens": (partial(draft_best, shared_noise=False), block),
        "block, looked up": (draft_looked_up, block),
        "coupled, looked up": (draft_looked_up, verify_coupled),
    }


def roll_out(pair: Pair, name: str, rows: list[Row], *, draft_length: int, new_tokens: int) -> Finding:
    """Write at least `new_tokens` tokens after each prompt, with the method of that name."""
    draft_rows, verify_rows = ways(pair.target.vocab_size)[name]
    pair.prefill(rows)
    steps = drafted = accepted = 0
    while rows := [row for row in rows if len(row.tokens) < row.prompt_length + new_tokens]:
        drafts = draft_rows(pair, rows, draft_length)
        verdicts = verify_rows(pair.verify_logits(rows, drafts), rows, drafts)
        for row, draft, verdict in zip(rows, drafts, verdicts, strict=True):
            row.known = len(row.tokens) + min(len(verdict.path), draft_length - 1)
            row.tokens += [*(draft.tokens[index] for index in verdict.path), verdict.own]
            drafted += len(draft.tokens)
            accepted += len(verdict.path)
        steps += len(rows)
    return Finding(name, pair.temperature, draft_length, steps, drafted, accepted)


def as_text(findings: Sequence[Finding]) -> str:
    """Format a row for each method: tokens per step and share of accepted draft tokens at each temperature."""
    temperatures = list(dict.fromkeys(finding.temperature for finding in findings))
    head = ["way", *(title for t in temperatures for title in (f"T = {t:g}: tokens/step", "α"))]
    lines = {finding.way: [finding.way] for finding in findings}
    for finding in findings:
        lines[finding.way] += [f"{finding.acceptance_length:.2f}", f"{finding.acceptance_rate:.3f}"]
    return table(head, list(lines.values()))


def _noise(positions: Sequence[tuple[Row, int]], vocab_size: int) -> Tensor:
    """Return the target's noise at positions of rows, [N, V]."""
    keys = [noise_key(row.number, position) for row, position in positions]
    return gumbel(torch.tensor(keys, dtype=torch.int32), vocab_size)


def main() -> None:
    """Print a table and write JSON."""
    options = _options()
    torch.set_num_threads(options.threads)
    target, drafter = (_load(name, options.prompts) for name in ("target", "drafter"))
    tokenizer = load_tokenizer("models/target")
    prompts = [tokenizer(text)["input_ids"] for text in read_prompts(Path("models/heldout.jsonl"))[: options.prompts]]
    findings: list[Finding] = []
    for temperature in options.temperatures:
        for name in ways(target.vocab_size):
            rows = [Row(number, prompt) for number, prompt in enumerate(prompts)]
            pair = Pair(target, drafter, temperature)
            findings.append(
                roll_out(pair, name, rows, draft_length=options.draft_length, new_tokens=options.new_tokens)
            )
            print(findings[-1], file=sys.stderr, flush=True)
    print(as_text(findings))
    options.output.write_text(json.dumps(_as_json(findings), indent=2) + "\n", encoding="utf-8")


def _load(name: str, slots: int) -> Runner:
    spec = ModelSpec(
        name=name,
        path=f"models/{name}",
        dtype="float32",
        device="cpu",
        slots=slots,
        max_length=_MAX_LENGTH,
        prefill_chunk=_PREFILL,
    )
    return load_runner(spec)


def _as_json(findings: Sequence[Finding]) -> dict[str, object]:
    scores = [
        {**asdict(finding), "acceptance_length": finding.acceptance_length, "acceptance_rate": finding.acceptance_rate}
        for finding in findings
    ]
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {
        "command": ["python", "-m", "benchmarks.micro.acceptance", *sys.argv[1:]],
        "versions": versions,
        "scores": scores,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro.acceptance", description=__doc__)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.7, 1.0])
    parser.add_argument("--prompts", type=int, default=96, help="how many held-out prompts")
    parser.add_argument("--new-tokens", type=int, default=96, help="after each prompt")
    parser.add_argument("--draft-length", type=int, default=4, help="γ")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/acceptance.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
