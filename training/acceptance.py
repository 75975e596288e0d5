"""How much of a drafter's text its target accepts, along the target's own continuations.

A draft that was accepted equals the target's text, so one teacher-forced pass of the drafter along that text
tells every draft it would make there. Must not know about training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from evaluation.limits import tokens_per_step
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
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    for _, group in groupby(sorted(prompts, key=len), key=len):
        rows += _measure_group(target, drafter, torch.tensor(list(group)), temperature, new_tokens, generator)
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


@torch.no_grad()
def _measure_group(
    target: LlamaForCausalLM,
    drafter: LlamaForCausalLM,
    prompts: Tensor,
    temperature: float,
    new_tokens: int,
    generator: torch.Generator,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Argmax agreement, coupled agreement and sum of min(p, q) at the new positions; float32, (N,) each, per row.

    Args:
        prompts: int64, (B, P)
    """
    padding = target.config.pad_token_id
    assert isinstance(padding, int)
    count, length = prompts.shape
    noise = gumbel(count, new_tokens, target.config.vocab_size, generator=generator)
    rows = continue_prompts(target, prompts, noise, torch.full((count,), temperature))
    tokens = rows[:, length:]
    p_logits, q_logits = (model(rows[:, :-1]).logits[:, length - 1 :].float() for model in (target, drafter))
    argmax = q_logits.argmax(-1) == tokens
    coupled = (q_logits + temperature * noise).argmax(-1) == tokens
    overlap = argmax.float()
    if temperature > 0.0:
        p, q = ((logits / temperature).softmax(-1) for logits in (p_logits, q_logits))
        overlap = torch.minimum(p, q).sum(-1)
    wanted = tokens.ne(padding)
    rows_of = zip(argmax.float(), coupled.float(), overlap, wanted, strict=True)
    return [(same[kept], drawn[kept], shared[kept]) for same, drawn, shared, kept in rows_of]
