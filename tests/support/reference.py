"""What the texts must be: Hugging Face `generate` on the target alone.

Sampled texts come from `generate` too: transformers' own warpers, then the shared noise as one more logits processor,
then transformers' argmax. Nothing of `actors/` takes part, and of `decoding/` only the noise.
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

from decoding.sampling.noise import gumbel, noise_key
from decoding.sampling.params import SamplingParams

_BATCH = 20
_TIE = 1e-4  # scores as close as this may swap when the shape of the batch changes
_PAD = 0


class ProcessRows(LogitsProcessor):
    """Each row's own warpers and noise; greedy rows as they are."""

    def __init__(self, params: Sequence[SamplingParams], padding: Sequence[int]) -> None:
        self._params, self._padding = params, padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = zip(scores.split(1), self._params, self._padding, strict=True)
        return torch.cat([process(row, params, input_ids.shape[1] - padding) for row, params, padding in rows])


def process(scores: Tensor, params: SamplingParams, position: int) -> Tensor:
    """Whose argmax is the token at `position`. scores: [1, V]; returns [1, V]."""
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
    """The output tokens of each prompt, EOS included; all params have the same max_tokens and EOS."""
    return [
        output
        for at in range(0, len(prompts), _BATCH)
        for output in _generate_batch(model, prompts[at : at + _BATCH], params[at : at + _BATCH])
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
    ends = [at for at, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0] + 1] if ends else tokens


@torch.no_grad()
def is_tie(model: PreTrainedModel, tokens: Sequence[int], params: SamplingParams) -> bool:
    """Whether the two best candidates after these tokens are so close that rounding decides between them."""
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
    """Token by token. A text may leave the reference only at a proven tie, and only one text in a hundred."""
    ties: list[str] = []
    for i, (prompt, output, reference) in enumerate(zip(prompts, outputs, expected, strict=True)):
        if output == reference:
            continue
        at = next((j for j, (a, b) in enumerate(zip(output, reference, strict=False)) if a != b), None)
        assert at is not None, f"text {i} has {len(output)} tokens instead of {len(reference)}"
        found = f"text {i}, token {at}: {output[at]} instead of {reference[at]}"
        assert is_tie(model, [*prompt, *reference[:at]], params[i]), found
        ties.append(found)
    assert len(ties) <= len(prompts) / 100 + 1, ties
    if ties:
        print("ties:", ties)
