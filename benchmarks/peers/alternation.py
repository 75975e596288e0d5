"""Classical alternating speculative decoding: Leviathan et al., arXiv 2211.17192, algorithm 1, over a batch.

It uses the runner, the sampler and the acceptance rule of Consort. So a difference in speed shows the effect of
overlapping drafting and verification.
"""

import time
from dataclasses import dataclass
from itertools import islice

from actors.coordinator.request import Statistics
from actors.loops.thread import LoopTimes
from benchmarks.peers.contestant import Activity, Contestant
from benchmarks.peers.hosts import Host
from benchmarks.peers.workload import Workload
from decoding.drafts.draft import Draft
from decoding.drafts.verify import accepted_path
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.sampler import sample
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner


@dataclass(slots=True)
class _Row:
    slot: int
    tokens: list[int]  # prompt and answer
    end: int  # final number of tokens
    history: History
    in_target: int = 0  # tokens in the target's cache
    in_drafter: int = 0

    @property
    def remaining(self) -> int:
        return self.end - len(self.tokens)


class Alternation:
    """A target and a drafter in one process, which alternate."""

    def __init__(self, target: Runner, drafter: Runner) -> None:
        self._target, self._drafter = target, drafter
        self._activity = Activity()

    def generate(self, workload: Workload, *, draft_length: int) -> list[list[int]]:
        """Return answers of exactly `max_tokens` tokens. draft_length: γ."""
        answers: list[list[int]] = []
        for prompts, params in workload.batches():
            rows = [
                _Row(slot, text, len(text) + row_params.max_tokens, History(row_params, text, len(text)))
                for slot, (text, row_params) in enumerate(zip(map(list, prompts), params, strict=True))
            ]
            self._prefill(rows)
            while running := [row for row in rows if row.remaining]:
                drafts = self._draft(running, draft_length)
                self._verify(running, drafts)
            answers += [row.tokens[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
        return answers

    def take_activity(self) -> Activity:
        """Return the activity since the last call."""
        activity, self._activity = self._activity, Activity()
        return activity

    def _prefill(self, rows: list[_Row]) -> None:
        """Run the prompts, and append each answer's first token."""
        began_s = time.perf_counter()
        prompts = [RowInput(row.slot, 0, row.tokens, wanted=1) for row in rows]
        tokens = self._next_tokens(self._target, prompts, [Position(row.history) for row in rows])
        for row, token in zip(rows, tokens, strict=True):
            row.in_target = len(row.tokens)
            row.tokens.append(token)
        spent = LoopTimes(prefill_s=time.perf_counter() - began_s)
        self._activity += Activity(Statistics(steps=len(rows), committed=len(rows)), spent)

    def _draft(self, rows: list[_Row], draft_length: int) -> list[list[int]]:
        """Draft γ tokens for each row, a token of all rows at a time; none for the answer's last token."""
        began_s = time.perf_counter()
        drafts: list[list[int]] = [[] for _ in rows]
        limits = [min(draft_length, row.remaining - 1) for row in rows]
        for length in range(max(limits)):
            drafting = [i for i, limit in enumerate(limits) if limit > length]
            inputs = []
            for i in drafting:
                text = [*rows[i].tokens, *drafts[i]]
                inputs.append(RowInput(rows[i].slot, rows[i].in_drafter, text[rows[i].in_drafter :], wanted=1))
                rows[i].in_drafter = len(text)
            ends = [Position(rows[i].history, tuple(drafts[i])) for i in drafting]
            tokens = self._next_tokens(self._drafter, inputs, ends)
            for i, token in zip(drafting, tokens, strict=True):
                drafts[i].append(token)
        spent = LoopTimes(steps=max(limits), step_s=time.perf_counter() - began_s)
        self._activity += Activity(drafter=spent)
        return drafts

    def _verify(self, rows: list[_Row], drafts: list[list[int]]) -> None:
        """Run one target step over all drafts, and append the accepted tokens and the target's next one."""
        began_s = time.perf_counter()
        inputs = [
            RowInput(row.slot, row.in_target, [row.tokens[-1], *draft]) for row, draft in zip(rows, drafts, strict=True)
        ]
        positions = [
            Position(row.history, draft[:j])
            for row, draft in zip(rows, drafts, strict=True)
            for j in range(len(draft) + 1)
        ]
        logits = self._target.logits(inputs)  # [N, V]
        sampled = iter(sample(logits, SamplingBatch.build(positions, logits.shape[-1], logits.device)).tolist())
        accepted = 0
        for row, draft in zip(rows, drafts, strict=True):
            tokens = list(islice(sampled, len(draft) + 1))
            path, _ = accepted_path(tokens, Draft(draft, list(range(-1, len(draft) - 1))))
            row.in_target = len(row.tokens) + len(path)
            row.in_drafter = min(row.in_drafter, row.in_target)
            row.tokens += tokens[: len(path) + 1]
            accepted += len(path)
        self._activity += Activity(
            Statistics(
                steps=len(rows),
                drafted=sum(map(len, drafts)),
                accepted=accepted,
                committed=accepted + len(rows),
            ),
            LoopTimes(steps=1, step_s=time.perf_counter() - began_s),
        )

    @staticmethod
    def _next_tokens(runner: Runner, inputs: list[RowInput], ends: list[Position]) -> list[int]:
        """Sample the token that follows each row's inputs. ends: the positions of these tokens."""
        logits = runner.logits(inputs)  # [B, V]
        tokens: list[int] = sample(logits, SamplingBatch.build(ends, logits.shape[-1], logits.device)).tolist()
        return tokens


class AlternationContestant(Contestant):
    """Alternation at one draft length."""

    def __init__(self, models: Host[Alternation], *, draft_length: int) -> None:
        super().__init__("alternation", f"γ = {draft_length}", "alternation", [models], draft_length=draft_length)
        self._models, self._draft_length = models, draft_length

    def run(self, workload: Workload) -> list[list[int]]:
        return self._models.call(Alternation.generate, workload, draft_length=self._draft_length)

    def activity(self) -> Activity:
        return self._models.call(Alternation.take_activity)
