"""Measure a target and its drafter or heads on this hardware: their step times, and how often they agree.

Runs them in this process, a drafter after its target, without Ray.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import mean

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from actors.coordinator.request import Request
from decoding.drafts.choices import RANKS
from decoding.drafts.draft import ProposerName
from decoding.errors import ConfigError
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.sampler import sample
from deployments.apis.completions.request import CompletionRequest
from deployments.configuration.model import ModelConfig
from deployments.configuration.paths import locate
from deployments.endpoints.loading import load_endpoints
from deployments.planning.hub import is_hub_id
from deployments.planning.model_size import ModelSize, size_of
from engine.heads.proposer import DraftStart, HeadProposer, Reading
from engine.loading.runners import load_runner, load_with_heads
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from evaluation.speculation import (
    MeasuredSteps,
    SpeculationLimits,
    Step,
    accepted_lengths,
    agreement,
    time_heads,
    time_steps,
    tokens_per_step,
)
from evaluation.workload import Report, Workload

Answered = tuple[Request, Sequence[int]]  # a prompt's request, and the target's tokens
STREAMS = (1, 4, 16)  # batch sizes
DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True, slots=True)
class Profile:
    """Step times in seconds, each model alone on the machine, and what the target would accept."""

    target: str
    drafter: str
    proposer: ProposerName  # of which kind the drafter is
    temperature: float
    target_step_s: Mapping[Step, float]
    draft_step_s: Mapping[int, float]  # by streams: one draft token for each
    draft_call_s: Mapping[int, float]  # by streams: what a draft takes beside its tokens
    accepted: Sequence[Tensor]  # one per answer, as `accepted_lengths` returns it
    spread: float = 0.0  # between rounds of a measurement, relative to its median
    longest_draft: int = max(DRAFT_LENGTHS)
    sizes: Mapping[str, ModelSize] = field(default_factory=dict)  # of the models whose checkpoints tell, by role

    @property
    def is_in_step(self) -> bool:
        """Whether drafts are made in the target's step, so that they can't be hidden behind it."""
        return self.proposer != "drafter"

    @property
    def acceptance(self) -> float:
        """α: share of positions where the drafter, given the text before, has the target's token."""
        return mean(float(length > 0) for answer in self.accepted for length in answer)

    @property
    def draft_lengths(self) -> list[int]:
        """Draft lengths that the drafter can make, and for which at least one answer is long enough."""
        longest = max(map(len, self.accepted))
        return [length for length in DRAFT_LENGTHS if length < longest and length <= self.longest_draft]

    def limits(self, streams: int, draft_length: int) -> SpeculationLimits:
        """Return the best possible speed-up for a number of streams."""
        draft_step_s = self.draft_step_s[streams]
        in_step_s = self.draft_call_s[streams] + draft_length * draft_step_s if self.is_in_step else 0.0
        return SpeculationLimits(
            draft_length,
            plain_step_s=self.target_step_s[streams, 1],
            verify_step_s=self.target_step_s[streams, draft_length + 1] + in_step_s,
            draft_step_s=0.0 if self.is_in_step else draft_step_s,
            tokens_per_step=tokens_per_step(self.accepted, draft_length),
        )


def measure_profile(workload: Workload, report: Report) -> Profile:
    """Load and measure the endpoint's target, then its drafter, or its heads if it has none.

    Raises ConfigError if a model can't be loaded, or the answers are too short for a measurement; InvalidRequestError
    if a prompt does not fit, or the temperature is out of range.
    """
    disable_progress_bar()
    config, temperature = workload.config, workload.temperature
    settings = config.endpoints[workload.endpoint]
    path = config.models[settings.target].path
    report("tokenizers")
    requests = _requests(workload)
    report("target: loading")
    spec, heads_spec = config.models[settings.target].spec(settings.target), config.heads_of(settings.target)
    if settings.drafter is None:
        assert heads_spec is not None
        target, _, heads = load_with_heads(spec, heads_spec)
        times, answers = _measure_target(target, requests, report)
        report("heads: timing them")
        longest = min(heads.length, max(DRAFT_LENGTHS))
        timed = {streams: time_heads(heads, target, streams, longest) for streams in STREAMS}
        report("heads: comparing them with the answers")
        accepted = _long_enough([_accepted_of_heads(heads, target, *answered) for answered in answers])
        return Profile(
            path,
            heads_spec.path,
            heads.kind,
            temperature,
            times.seconds,
            {streams: token_s for streams, (_, token_s) in timed.items()},
            {streams: call_s for streams, (call_s, _) in timed.items()},
            accepted,
            times.spread,
            longest_draft=longest,
            sizes=_sizes(target=config.models[settings.target]),
        )
    target = load_runner(spec)
    times, answers = _measure_target(target, requests, report)
    del target  # its memory is the drafter's now
    report("drafter: loading")
    drafter = load_runner(config.models[settings.drafter].spec(settings.drafter))
    report("drafter: timing its steps")
    draft_times = time_steps(drafter, [(streams, 1) for streams in STREAMS], requests[0].params)
    report("drafter: comparing it with the answers")
    return Profile(
        path,
        config.models[settings.drafter].path,
        "drafter",
        temperature,
        times.seconds,
        {streams: seconds for (streams, _), seconds in draft_times.seconds.items()},
        dict.fromkeys(STREAMS, 0.0),
        _long_enough([accepted_lengths(_agreement(drafter, *answered)) for answered in answers]),
        max(times.spread, draft_times.spread),
        sizes=_sizes(target=config.models[settings.target], drafter=config.models[settings.drafter]),
    )


def _sizes(**models: ModelConfig) -> dict[str, ModelSize]:
    sizes = {}
    for role, model in models.items():
        cached = try_to_load_from_cache(model.path, "config.json") if is_hub_id(model.path) else None
        path = str(Path(cached).parent) if isinstance(cached, str) else locate(model.path)
        if (size := size_of(model, path)) is not None:
            sizes[role] = size
    return sizes


def _measure_target(
    target: Runner, requests: Sequence[Request], report: Report
) -> tuple[MeasuredSteps, list[Answered]]:
    """Time the target's steps, and let it answer."""
    report("target: timing its steps")
    steps = [(streams, 1 + draft_length) for streams in STREAMS for draft_length in (0, *DRAFT_LENGTHS)]
    times = time_steps(target, steps, requests[0].params)
    report("target: answering the prompts")
    groups = (requests[start : start + STREAMS[-1]] for start in range(0, len(requests), STREAMS[-1]))
    return times, [answered for group in groups for answered in _answer(target, group)]


def _long_enough(accepted: list[Tensor]) -> list[Tensor]:
    if max(map(len, accepted)) <= min(DRAFT_LENGTHS):
        raise ConfigError("every answer ends at once, so there is nothing to compare; give other prompts")
    return accepted


def _requests(workload: Workload) -> list[Request]:
    served = load_endpoints(workload.config)[workload.endpoint]
    if served.through_text:
        raise ConfigError(
            f"endpoints.{served.name}: {', '.join(served.through_text)} has another tokenizer, and only equal tokens "
            "can be compared; `consort report` can measure it"
        )
    bodies = [
        CompletionRequest(
            model=served.name, prompt=[prompt], max_tokens=workload.new_tokens, temperature=workload.temperature
        )
        for prompt in workload.prompts
    ]
    return [request for seed, body in enumerate(bodies) for request in served.prepare(body, seed=seed)]


def _answer(runner: Runner, requests: Sequence[Request]) -> list[Answered]:
    """Answer at most as many requests as there are slots, in one batch, each up to EOS or its length."""
    texts = [list(request.prompt) for request in requests]
    histories = [History(request.params, text, len(text)) for request, text in zip(requests, texts, strict=True)]
    for slot, text in enumerate(texts):
        _read(runner, slot, text[:-1], len(text) - 1)
    running = list(range(len(requests)))
    while running:
        rows = [RowInput(slot, len(texts[slot]) - 1, texts[slot][-1:]) for slot in running]
        logits = runner.logits(rows)
        batch = SamplingBatch.build([Position(histories[slot]) for slot in running], logits.shape[-1], logits.device)
        for slot, token in zip(running, sample(logits, batch).tolist(), strict=True):
            texts[slot].append(token)
        running = [
            slot
            for slot in running
            if texts[slot][-1] not in requests[slot].params.eos_token_ids
            and len(texts[slot]) - len(requests[slot].prompt) < requests[slot].params.max_tokens
        ]
    return [(request, text[len(request.prompt) :]) for request, text in zip(requests, texts, strict=True)]


def _agreement(drafter: Runner, request: Request, answer: Sequence[int]) -> Tensor:
    """Return for each token of an answer whether the drafter samples the same, [N] bool. It reads the text once."""
    prompt = request.prompt
    logits = _read(drafter, 0, [*prompt, *answer[:-1]], len(prompt) - 1)
    return agreement(logits, History(request.params, list(prompt), len(prompt)), answer)


def _accepted_of_heads(heads: HeadProposer, target: Runner, request: Request, answer: Sequence[int]) -> Tensor:
    """Return how many tokens of a draft are the target's, from the answer's second token on, [N − 1] int64.

    Heads begin there: they read the target's states after tokens whose next token is known.
    """
    text, first = [*request.prompt, *answer], len(request.prompt) + 1
    read, accepted = 0, []
    for start in range(0, len(text) - 1, target.max_query):
        end = min(start + target.max_query, len(text) - 1)
        target.logits([RowInput(0, start, text[start:end])])
        assert target.hidden is not None
        # Lengths of the text, of which one token was not run.
        for length in range(max(first, start + 2), end + 2) or [end + 1]:
            rows = list(range(read - start, length - 1 - start))
            heads.read([Reading(0, read, text[read + 1 : length], rows, rows[-1], text[read])], target.hidden)
            read = length - 1
            if first <= length < len(text):
                (choices,) = heads.propose([DraftStart(0, length, request.params)], heads.length, RANKS)
                pairs = zip([choice.tokens[0] for choice in choices], text[length:], strict=False)
                accepted.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return torch.tensor(accepted)


def _read(runner: Runner, slot: int, tokens: Sequence[int], first: int) -> Tensor:
    """Write the tokens into the slot by chunks; returns the logits, [N, V], from index `first` on."""
    parts = [torch.empty(0, runner.vocab_size, device=runner.device)]
    for start in range(0, len(tokens), runner.max_query):
        chunk = tokens[start : start + runner.max_query]
        logits = runner.logits([RowInput(slot, start, chunk)])[: len(chunk)]
        parts.append(logits[max(first - start, 0) :].clone())
    return torch.cat(parts)
