"""Measure a pair of models on this hardware: their step times, and how often they agree.

Runs both models in this process, one after the other, without Ray. Must not know how results are shown.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor

from actors.coordinator.request import Request
from actors.loading.checkpoint import ModelSpec
from actors.model.forward_input import RowInput
from actors.model.runner import Runner
from actors.replica.replica import load_runner
from decoding.errors import ConfigError
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.sampler import sample
from deployments.configuration.config import ServerConfig
from deployments.endpoints.endpoint import load_endpoints
from deployments.requests.schema import CompletionRequest
from evaluation import limits
from evaluation.limits import SpeculationLimits, tokens_per_step
from evaluation.step_times import Step, time_steps

STREAMS = (1, 4, 16)  # batch sizes
DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """The target's answer to a prompt."""

    request: Request
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Profile:
    """Step times in seconds, each model alone on the machine, and where the drafter agrees with the target."""

    target: str
    drafter: str
    temperature: float
    target_step_s: Mapping[Step, float]
    draft_step_s: Mapping[int, float]  # by streams: one draft token for each
    agreements: Sequence[Tensor]  # [N] bool each, one per answer
    spread: float = 0.0  # between rounds of a measurement, relative to its median

    @property
    def acceptance(self) -> float:
        """α: share of positions where the drafter, given the text before, has the target's token."""
        return mean(float(agrees) for answer in self.agreements for agrees in answer)

    @property
    def draft_lengths(self) -> list[int]:
        """Draft lengths for which at least one answer is long enough."""
        longest = max(map(len, self.agreements))
        return [length for length in DRAFT_LENGTHS if length < longest]

    def limits(self, streams: int, draft_length: int) -> SpeculationLimits:
        """Return the best possible speed-up for a number of streams."""
        return SpeculationLimits(
            draft_length,
            plain_step_s=self.target_step_s[streams, 1],
            verify_step_s=self.target_step_s[streams, draft_length + 1],
            draft_step_s=self.draft_step_s[streams],
            tokens_per_step=tokens_per_step(self.agreements, draft_length),
        )


def measure_profile(
    config: ServerConfig,
    endpoint: str,
    prompts: Sequence[str],
    *,
    new_tokens: int,
    temperature: float,
    report: Callable[[str], None],
) -> Profile:
    """Load and measure the endpoint's target, then its drafter.

    report: called with each step that begins.

    Raises:
        ConfigError: a model can't be loaded, or the answers are too short for a measurement.
        InvalidRequestError: a prompt does not fit, or the temperature is out of range.
    """
    names = config.endpoints[endpoint]
    assert names.drafter is not None
    report("tokenizers")
    requests = _requests(config, endpoint, prompts, new_tokens, temperature)
    report("target: loading")
    target = load_runner(_spec(config, names.target))
    report("target: timing its steps")
    steps = [(streams, 1 + draft_length) for streams in STREAMS for draft_length in (0, *DRAFT_LENGTHS)]
    target_times = time_steps(target, steps, requests[0].params)
    report("target: answering the prompts")
    answers = [
        answer
        for start in range(0, len(requests), STREAMS[-1])
        for answer in _answer(target, requests[start:][: STREAMS[-1]])
    ]
    del target  # its memory is the drafter's now
    report("drafter: loading")
    drafter = load_runner(_spec(config, names.drafter))
    report("drafter: timing its steps")
    draft_times = time_steps(drafter, [(streams, 1) for streams in STREAMS], requests[0].params)
    report("drafter: comparing it with the answers")
    agreements = [_agreement(drafter, answer) for answer in answers]
    if max(map(len, agreements)) <= min(DRAFT_LENGTHS):
        raise ConfigError("every answer ends at once, so there is nothing to compare; give other prompts")
    by_streams = {streams: seconds for (streams, _), seconds in draft_times.seconds.items()}
    spread = max(target_times.spread, draft_times.spread)
    paths = config.models[names.target].path, config.models[names.drafter].path
    return Profile(*paths, temperature, target_times.seconds, by_streams, agreements, spread)


def _requests(
    config: ServerConfig, endpoint: str, prompts: Sequence[str], new_tokens: int, temperature: float
) -> list[Request]:
    """Return requests as the server makes them."""
    served = load_endpoints(config)[endpoint]
    bodies = [
        CompletionRequest(model=endpoint, prompt=[prompt], max_tokens=new_tokens, temperature=temperature)
        for prompt in prompts
    ]
    return [request for seed, body in enumerate(bodies) for request in served.prepare(body, seed=seed)]


def _spec(config: ServerConfig, name: str) -> ModelSpec:
    return config.models[name].spec(name)


def _answer(runner: Runner, requests: Sequence[Request]) -> list[TargetAnswer]:
    """Answer at most as many requests as there are slots, in one batch, each up to EOS or its length."""
    texts = [list(request.prompt) for request in requests]
    histories = [History(request.params, text, len(text)) for request, text in zip(requests, texts, strict=True)]
    for slot, text in enumerate(texts):
        _read(runner, slot, text[:-1], 0)
    running = list(range(len(requests)))
    while running:
        rows = [RowInput(slot, len(texts[slot]) - 1, texts[slot][-1:]) for slot in running]
        logits = runner.logits(rows)
        batch = SamplingBatch.build([Position(histories[slot]) for slot in running], logits.shape[-1], logits.device)
        for slot, token in zip(running, sample(logits, batch).tolist(), strict=True):
            texts[slot].append(token)
        running = [slot for slot in running if not _ended(requests[slot], texts[slot])]
    return [TargetAnswer(request, text[len(request.prompt) :]) for request, text in zip(requests, texts, strict=True)]


def _ended(request: Request, text: Sequence[int]) -> bool:
    params = request.params
    return text[-1] in params.eos_token_ids or len(text) - len(request.prompt) >= params.max_tokens


def _agreement(drafter: Runner, answer: TargetAnswer) -> Tensor:
    """Return `evaluation.limits.agreement`, [N] bool, from one pass over prompt and answer."""
    prompt = answer.request.prompt
    logits = _read(drafter, 0, [*prompt, *answer.tokens[:-1]], len(prompt) - 1)
    return limits.agreement(logits, History(answer.request.params, list(prompt), len(prompt)), answer.tokens)


def _read(runner: Runner, slot: int, tokens: Sequence[int], first: int) -> Tensor:
    """Write the tokens into the slot by chunks; returns the logits, [N, V], from index `first` on."""
    parts = [torch.empty(0, runner.vocab_size, device=runner.device)]
    for start in range(0, len(tokens), runner.max_query):
        chunk = tokens[start : start + runner.max_query]
        logits = runner.logits([RowInput(slot, start, chunk)])[: len(chunk)]
        parts.append(logits[max(first - start, 0) :].float())
    return torch.cat(parts)
