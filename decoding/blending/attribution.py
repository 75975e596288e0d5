"""What each member of an ensemble contributed to a token. Knows nothing of how members run or are blended."""

from collections.abc import Sequence

import torch
from torch import Tensor

TokenAttribution = tuple[float, bool, float]  # log-probability, whether it was the most probable token, share


def attribute_tokens(logits: Tensor, tokens: Sequence[int], weights: Sequence[float]) -> list[list[TokenAttribution]]:
    """Compute each member's log-probability, agreement and share of each token.

    A share is weight × probability, divided by the sum over members. In a mixture it is the probability that the token
    came from the member. If all members rule the token out, shares are 0.

    Args:
        logits: [M, N, V] of any float type, before each token.
        tokens: [N]
        weights: [M] at least 0.

    Returns:
        [N][M]
    """
    index = torch.tensor(tokens, device=logits.device)[None, :, None].expand(len(logits), -1, 1)
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(-1, index).squeeze(-1)  # [M, N]
    agreed = logits.argmax(dim=-1) == index.squeeze(-1)
    scores = own + torch.tensor(weights, device=logits.device).log()[:, None]
    shares = scores.softmax(dim=0).nan_to_num(nan=0.0)
    columns = zip(own.T.tolist(), agreed.T.tolist(), shares.T.tolist(), strict=True)
    return [list(zip(*column, strict=True)) for column in columns]
