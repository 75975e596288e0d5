"""Acceptance of a drafter's tokens by its target, along the target's own continuations.

An accepted draft equals the target's text. So one teacher-forced pass of the drafter along that text gives every draft
that it would make there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from evaluation.limits import accepted_lengths, tokens_per_step

DRAFT_LENGTHS = range(1, 9)


def gumbel(*shape: int, generator: torch.Generator) -> Tensor:
    """Return standard Gumbel noise, float32: argmax(logits + gumbel) is a draw from softmax(logits)."""
    uniform = torch.rand(shape, generator=generator).clamp_(min=1e-20)
    return -(-uniform.log()).log()


@torch.no_grad()
def continue_prompts(model: LlamaForCausalLM, prompts: Tensor, noise: Tensor, temperatures: Tensor) -> Tensor:
    """Draw N tokens after each prompt; temperature 0 is greedy. After EOS a row holds the padding token.

    Args:
        prompts: int64, (B, P), all of one length
        noise: float32, (B, N, V)
        temperatures: float32, (B,)

    Returns:
        int64, (B, P + N)
    """
    config = model.config
    assert isinstance(config.pad_token_id, int)
    cache = DynamicCache(config=config)
    tokens = prompts
    new = prompts
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    for step in range(noise.shape[1]):
        logits = model(new, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        drawn = (logits + temperatures[:, None] * noise[:, step]).argmax(-1)
        drawn = torch.where(ended, config.pad_token_id, drawn)
        ended |= drawn == config.eos_token_id
        new = drawn[:, None]
        tokens = torch.cat((tokens, new), dim=1)
    return tokens


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Shares of positions at which drafter and target agree; committed tokens per target step, by draft length."""

    temperature: float
    positions: int
    argmax: float
    """the drafter's argmax is the token that the target chooses or draws"""
    coupled: float
    """both draw the same token with the same Gumbel noise; at temperature 0 equal to `argmax`"""
    rejection: float
    """sum of min(p, q): rejection sampling of a drawn draft; at temperature 0 equal to `argmax`"""
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
    """Measure the acceptance along `new_tokens` tokens that the target writes after each prompt."""
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
        argmax_tokens_per_step=_by_length(argmax),
        coupled_tokens_per_step=_by_length(coupled),
    )


def _by_length(agreements: Sequence[Tensor]) -> dict[int, float]:
    """Return the tokens per step by draft length."""
    accepted = [accepted_lengths(agrees) for agrees in agreements]
    return {count: tokens_per_step(accepted, count) for count in DRAFT_LENGTHS}


@torch.no_grad()
def _measure_group(
    target: LlamaForCausalLM,
    drafter: LlamaForCausalLM,
    prompts: Tensor,
    temperature: float,
    new_tokens: int,
    generator: torch.Generator,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return argmax agreement, coupled agreement and sum of min(p, q) at the new positions: float32 (N,), per row.

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
    is_text = tokens.ne(padding)
    columns = zip(argmax.float(), coupled.float(), overlap, is_text, strict=True)
    return [(same[kept], drawn[kept], shared[kept]) for same, drawn, shared, kept in columns]
