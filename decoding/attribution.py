"""Whose doing a token of a blend is. Knows nothing of where members run, or of how they are blended."""

from collections.abc import Sequence

import torch
from torch import Tensor

TokenAttribution = tuple[float, bool, float]  # log-probability, whether it was the most probable one, share


def attribute_tokens(logits: Tensor, tokens: Sequence[int], weights: Sequence[float]) -> list[list[TokenAttribution]]:
    """What each member thought of each token. Shares are weight × probability, of 1 in all: of a mixture, how probable
    it is that the token is the member's. Where all rule the token out, they are 0.

    Args:
        logits: [M, N, V] of any float type, before each token.
        tokens: [N]
        weights: [M] at least 0.

    Returns:
        [N][M]
    """
    at = torch.tensor(tokens, device=logits.device)[None, :, None].expand(len(logits), -1, 1)
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(-1, at).squeeze(-1)  # [M, N]
    agreed = logits.argmax(dim=-1) == at.squeeze(-1)
    scores = own + torch.tensor(weights, device=logits.device).log()[:, None]
    shares = scores.softmax(dim=0).nan_to_num(nan=0.0)
    columns = zip(own.T.tolist(), agreed.T.tolist(), shares.T.tolist(), strict=True)
    return [list(zip(*column, strict=True)) for column in columns]
