"""Batched continuation of prompts by one model. The same noise gives the same text.

Must not know about drafters or training.
"""

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM


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
