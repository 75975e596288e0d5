"""How much of a drafter's text its target accepts, along the target's own continuations.

A draft that was accepted equals the target's text, so one teacher-forced pass of the drafter along that text
tells every draft it would make there. Must not know about training.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from training.sampling import continue_prompts, gumbel

DRAFT_LENGTHS = range(1, 9)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Shares of positions, and committed tokens per target step for 1 to 8 draft tokens."""

    temperature: float
    positions: int
    argmax: float
    """the drafter's argmax is the target's token (its choice, or its draw)"""
    coupled: float
    """both draw with the same Gumbel noise and agree (the same as `argmax` at temperature 0)"""
    rejection: float
    """sum of min(p, q): rejection sampling of a drawn draft (the same as `argmax` at temperature 0)"""
    argmax_tokens_per_step: dict[int, float]
    coupled_tokens_per_step: dict[int, float]


def measure(
    target: LlamaForCausalLM,
    drafter: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    new_tokens: int,
    seed: int = 0,
) -> Acceptance:
    """Acceptance along `new_tokens` tokens that the target writes after each prompt."""
    generator = torch.Generator().manual_seed(seed)
    rows = [_measure_row(target, drafter, prompt, temperature, new_tokens, generator) for prompt in prompts]
    argmax, coupled, overlap = ([row[part] for row in rows] for part in range(3))
    return Acceptance(
        temperature=temperature,
        positions=sum(map(len, argmax)),
        argmax=torch.cat(argmax).mean().item(),
        coupled=torch.cat(coupled).mean().item(),
        rejection=torch.cat(overlap).mean().item(),
        argmax_tokens_per_step={count: tokens_per_step(argmax, count) for count in DRAFT_LENGTHS},
        coupled_tokens_per_step={count: tokens_per_step(coupled, count) for count in DRAFT_LENGTHS},
    )


def tokens_per_step(agreements: Sequence[Tensor], draft_tokens: int) -> float:
    """Mean of accepted + 1 when each target step verifies `draft_tokens` drafts.

    Args:
        agreements: float32, (N,) each: 1 where the drafter has the target's token
    """
    tokens = steps = 0
    for agreement in agreements:
        agrees = agreement.bool().tolist()
        place = 0
        while place + draft_tokens < len(agrees):
            accepted = 0
            while accepted < draft_tokens and agrees[place + accepted]:
                accepted += 1
            place += accepted + 1
            tokens += accepted + 1
            steps += 1
    return tokens / steps


@torch.no_grad()
def _measure_row(
    target: LlamaForCausalLM,
    drafter: LlamaForCausalLM,
    prompt: Sequence[int],
    temperature: float,
    new_tokens: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Per new position: argmax agreement, coupled agreement, sum of min(p, q); float32, (N,) each."""
    padding = target.config.pad_token_id
    assert isinstance(padding, int)
    noise = gumbel(1, new_tokens, target.config.vocab_size, generator=generator)
    row = continue_prompts(target, torch.tensor([prompt]), noise, torch.tensor([temperature]))[0]
    row = row[: len(prompt) + int(torch.ne(row[len(prompt) :], padding).sum())]
    tokens = row[len(prompt) :]
    p_logits, q_logits = (model(row[None, :-1]).logits[0, len(prompt) - 1 :].float() for model in (target, drafter))
    argmax = (q_logits.argmax(-1) == tokens).float()
    if temperature == 0.0:
        return argmax, argmax, argmax
    coupled = ((q_logits + temperature * noise[0, : len(tokens)]).argmax(-1) == tokens).float()
    p, q = ((logits / temperature).softmax(-1) for logits in (p_logits, q_logits))
    return argmax, coupled, torch.minimum(p, q).sum(-1)
