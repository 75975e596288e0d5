"""The article's table of naive and contrastive decoding, by plain forwards. Knows nothing of engines or servers.

python -m evaluation.article --expert /models/gpt2-large --amateur /models/gpt2   # the article's own two models

Contrastive decoding: Li et al., arXiv 2210.15097, section 3.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from evaluation.metrics import TextMetrics, average, measure, metrics_table
from evaluation.prompts import MAX_TOKENS, PROMPTS

_ALPHA = 0.1  # tokens need this share of the expert's best probability
_ARTICLE = {"naive": (4.99, 5.17, 5.14, 0.895, 0.995), "contrastive": (5.18, 5.35, 5.31, 0.903, 1.0)}

# From a text's tokens, [1, T] int64, to the next token.
Choice = Callable[[Tensor], int]


def naive(model: PreTrainedModel) -> Choice:
    """Return the choice of the most probable token."""
    return lambda text: int(_log_probs(model, text).argmax())


def contrastive(expert: PreTrainedModel, amateur: PreTrainedModel) -> Choice:
    """Return the choice of the token with the greatest log expert − log amateur of those plausible to the expert."""

    def choose(text: Tensor) -> int:
        expert_log_probs = _log_probs(expert, text)
        plausible = expert_log_probs >= expert_log_probs.max() + math.log(_ALPHA)
        difference = expert_log_probs - _log_probs(amateur, text)
        return int(difference.masked_fill(~plausible, -math.inf).argmax())

    return choose


@torch.inference_mode()
def write(choose: Choice, prompt: Sequence[int], max_tokens: int, eos_token_id: int | None = None) -> list[int]:
    """Return the tokens that follow a prompt, the end token included."""
    text = list(prompt)
    while len(text) < len(prompt) + max_tokens and (len(text) == len(prompt) or text[-1] != eos_token_id):
        text.append(choose(torch.tensor([text])))
    return text[len(prompt) :]


def _log_probs(model: PreTrainedModel, text: Tensor) -> Tensor:
    """Return the log-probabilities of the next token, [V] float32."""
    logits: Tensor = model(text, use_cache=False, logits_to_keep=1).logits[0, -1]
    return logits.float().log_softmax(dim=-1)


def main() -> None:
    """Print the table for two models, and the article's figures for its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--expert", default="models/target", help="a folder; the article's: gpt2-large")
    parser.add_argument("--amateur", default="models/drafter", help="a folder; the article's: gpt2")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of each text")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.expert)
    expert, amateur = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (options.expert, options.amateur)
    )
    ways = {"naive": naive(expert), "contrastive": contrastive(expert, amateur)}
    rows: dict[str, TextMetrics] = {}
    for name, choose in ways.items():
        texts = [write(choose, tokenizer(prompt).input_ids, options.max_tokens) for prompt in PROMPTS]
        rows[name] = average([measure(text) for text in texts])
    lines = [f"{name:12}" + " ".join(f"{figure:6.3f}" for figure in figures) for name, figures in _ARTICLE.items()]
    caption = "The article has, for gpt2-large and gpt2, entropies 1 to 3 and distinct-1 and -2:"
    sys.stdout.write("\n".join([metrics_table(rows), "", caption, *lines, ""]))


if __name__ == "__main__":
    main()
