"""Tests heads on text that the target writes itself, so that wrong ones are refused instead of being slow."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.drafts.calibration import RANKS
from decoding.errors import ConfigError
from decoding.sampling.params import SamplingParams
from engine.heads.proposer import HeadProposer, Reading
from engine.heads.sampling import DraftStart
from engine.heads.spec import HeadsSpec
from engine.model.forward_input import RowInput
from engine.model.runner import Runner

_ROWS, _TOKENS = 8, 32  # texts, and tokens of each
_UNTESTED = 4  # first tokens of each, before which there is too little text
_CLEARLY = 0.1  # more accepted tokens that make other layers better


def check_acceptance(spec: HeadsSpec, heads: HeadProposer, runner: Runner, layers: Sequence[int]) -> None:
    """Count how often the first draft token is the target's choice. The runner's cache is empty before and after.

    Raises:
        ConfigError: it is less often than `min_acceptance`. The text names other layers if these do better.
    """
    if spec.min_acceptance == 0:
        return
    texts = _write(runner)
    rate = _rate(heads, runner, texts, layers)
    if rate >= spec.min_acceptance:
        return
    count = runner.model.config.get_text_config().num_hidden_layers
    shifted = [tuple(layer + shift for layer in layers) for shift in (-1, 1)] if layers else []
    rates = {other: _rate(heads, runner, texts, other) for other in shifted if min(other) >= 0 and max(other) <= count}
    better = max(rates, key=rates.__getitem__, default=None)
    advice = "they may be for another model, or poorly trained; lower `min_acceptance` to use them"
    if better is not None and rates[better] >= max(spec.min_acceptance, rate + _CLEARLY):
        advice = f"with `layers: {list(better)}` they are {rates[better]:.0%}; set that"
    read = f" read after {list(layers)} layers" if layers else ""
    raise ConfigError(
        f"{spec.name}: {rate:.0%} of the first draft tokens of {spec.path!r}{read} are the target's own, and "
        f"`min_acceptance` is {spec.min_acceptance:.0%}: {advice}"
    )


def _write(runner: Runner) -> list[list[int]]:
    """Let the target write texts, its best token each time, from different first tokens."""
    count = min(_ROWS, runner.cache.slots)
    texts = [[(7 + 131 * index) % runner.vocab_size] for index in range(count)]
    for position in range(min(_TOKENS, runner.max_length) - 1):
        logits = runner.logits([RowInput(slot, position, text[-1:]) for slot, text in enumerate(texts)])
        for text, token in zip(texts, logits.argmax(dim=-1).tolist(), strict=True):
            text.append(token)
    runner.cache.clear_all()
    return texts


def _rate(heads: HeadProposer, runner: Runner, texts: list[list[int]], layers: Sequence[int]) -> float:
    """Return the share of positions whose token the heads expect, given the text up to the token before the last."""
    right: list[Tensor] = []
    params = SamplingParams(max_tokens=1, temperature=0)
    for slot, text in enumerate(texts):
        hidden = runner.hidden_states([RowInput(slot, 0, text[:-1])], layers)
        # Row after row: what heads keep of a text is that of its last token.
        for length in range(_UNTESTED, len(text) - 1):
            first = 0 if length == _UNTESTED else length - 2
            rows = list(range(first, length - 1))
            heads.read([Reading(slot, first, text[first + 1 : length], rows, length - 2)], hidden)
            (choices,) = heads.propose([DraftStart(slot, length, params)], 1, RANKS)
            right.append(torch.tensor(choices[0].tokens[0] == text[length]))
    runner.cache.clear_all()
    return float(torch.stack(right).float().mean()) if right else 0.0
