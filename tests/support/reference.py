"""Reference texts: Hugging Face `generate` on the target alone.

Sampled texts use transformers' warpers, then the shared noise as one more logits processor, then transformers' argmax.
Uses nothing of `actors/`, and only the noise of `decoding/`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoding.sampling.noise import gumbel
from decoding.sampling.noise_keys import noise_key
from decoding.sampling.params import SamplingParams

_BATCH = 20
_TIE = 1e-4  # scores as close as this may swap with another batch shape
_PAD = 0


class ProcessRows(LogitsProcessor):
    """Applies each row's own warpers and noise. Greedy rows stay as they are."""

    def __init__(self, params: Sequence[SamplingParams], padding: Sequence[int]) -> None:
        self._params, self._padding = params, padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = zip(scores.split(1), self._params, self._padding, strict=True)
        return torch.cat([process(row, params, input_ids.shape[1] - padding) for row, params, padding in rows])


def process(scores: Tensor, params: SamplingParams, position: int) -> Tensor:
    """Return scores, [1, V], with the sampled token of `position` as their argmax."""
    if params.temperature == 0:
        return scores
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    key = torch.tensor([noise_key(params.seed, position)], dtype=torch.int32)
    return warpers(torch.LongTensor(1, 0), scores) + gumbel(key, scores.shape[-1])


def generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[list[int]]:
    """Return the output tokens of each prompt, EOS included. All params must share max_tokens and EOS."""
    return [
        output
        for start in range(0, len(prompts), _BATCH)
        for output in _generate_batch(model, prompts[start : start + _BATCH], params[start : start + _BATCH])
    ]


def _generate_batch(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[list[int]]:
    width = max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]
    outputs = model.generate(  # type: ignore[operator]
        torch.tensor([[_PAD] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]),
        attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding]),
        do_sample=False,
        max_new_tokens=params[0].max_tokens,
        eos_token_id=list(params[0].eos_token_ids) or None,
        logits_processor=LogitsProcessorList([ProcessRows(params, padding)]),
    )
    return [_until_eos(row[width:].tolist(), params[0].eos_token_ids) for row in outputs]


def _until_eos(tokens: list[int], eos: Sequence[int]) -> list[int]:
    ends = [index for index, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0] + 1] if ends else tokens


@torch.no_grad()
def is_tie(model: PreTrainedModel, tokens: Sequence[int], params: SamplingParams) -> bool:
    """Whether the two best next tokens are so close that rounding decides between them."""
    scores = process(model(torch.tensor([list(tokens)])).logits[:, -1], params, len(tokens))
    best, second = scores[0].topk(2).values.tolist()
    return best - second < _TIE


def assert_same(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    outputs: Sequence[list[int]],
    expected: Sequence[list[int]],
) -> None:
    """Compare token by token. At most one text in a hundred may differ, and only from a proven tie on."""
    ties: list[str] = []
    for i, (prompt, output, reference) in enumerate(zip(prompts, outputs, expected, strict=True)):
        if output == reference:
            continue
        index = next((j for j, (a, b) in enumerate(zip(output, reference, strict=False)) if a != b), None)
        assert index is not None, f"text {i} has {len(output)} tokens instead of {len(reference)}"
        difference = f"text {i}, token {index}: {output[index]} instead of {reference[index]}"
        assert is_tie(model, [*prompt, *reference[:index]], params[i]), difference
        ties.append(difference)
    assert len(ties) <= len(prompts) / 100 + 1, ties
    if ties:
        print("ties:", ties)
