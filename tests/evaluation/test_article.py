"""The article's columns: the engine writes, and `evaluation` measures, what a direct implementation does.

Contrastive decoding: Li et al., arXiv 2210.15097, section 3. All is greedy and in float32, so there is no noise. With
CONSORT_ARTICLE_MODELS, a folder that has gpt2-large and gpt2, the article's own models are compared, too.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from actors.coordinator.request import Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from decoding.blending.params import BlendParams, EnsembleOptions
from decoding.sampling.params import SamplingParams
from engine.model.runner import Runner
from evaluation.metrics import measure
from evaluation.prompts import PROMPTS

MAX_TOKENS = 24  # of each text
ALPHA = 0.1  # tokens need this share of the expert's best probability
ARTICLE = Path(os.environ.get("CONSORT_ARTICLE_MODELS", "none"))
own_models = pytest.mark.skipif(
    not (ARTICLE / "gpt2-large").is_dir(), reason="CONSORT_ARTICLE_MODELS has no gpt2-large"
)


# From a text's tokens, [1, T] int64, to the next token.
Choice = Callable[[Tensor], int]


def naive(model: PreTrainedModel) -> Choice:
    """Return the choice of the most probable token."""
    return lambda text: int(log_probs(model, text).argmax())


def contrastive(expert: PreTrainedModel, amateur: PreTrainedModel) -> Choice:
    """Return the choice of the token with the greatest log expert − log amateur of those plausible to the expert."""

    def choose(text: Tensor) -> int:
        expertlog_probs = log_probs(expert, text)
        plausible = expertlog_probs >= expertlog_probs.max() + math.log(ALPHA)
        difference = expertlog_probs - log_probs(amateur, text)
        return int(difference.masked_fill(~plausible, -math.inf).argmax())

    return choose


@torch.inference_mode()
def write(choose: Choice, prompt: Sequence[int], max_tokens: int, eos_token_id: int | None = None) -> list[int]:
    """Return the tokens that follow a prompt, the end token included."""
    text = list(prompt)
    while len(text) < len(prompt) + max_tokens and (len(text) == len(prompt) or text[-1] != eos_token_id):
        text.append(choose(torch.tensor([text])))
    return text[len(prompt) :]


def log_probs(model: PreTrainedModel, text: Tensor) -> Tensor:
    """Return the log-probabilities of the next token, [V] float32."""
    logits: Tensor = model(text, use_cache=False, logits_to_keep=1).logits[0, -1]
    return logits.float().log_softmax(dim=-1)


def entropy(tokens: list[int], n: int) -> float:
    """Return the entropy of a text's n-grams, in bits, as the article's code does."""
    counts = Counter(zip(*(tokens[start:] for start in range(n)), strict=False))
    shares = [count / sum(counts.values()) for count in counts.values()]
    return -sum(share * math.log(share) / math.log(2) for share in shares)


@pytest.mark.parametrize(
    ("expert", "amateur"),
    [
        (Path("models/target"), Path("models/drafter")),
        pytest.param(ARTICLE / "gpt2-large", ARTICLE / "gpt2", marks=[own_models, pytest.mark.slow]),
    ],
    ids=["bundled", "the article's"],
)
def test_naive_and_contrastive_columns_are_those_of_a_direct_implementation(expert: Path, amateur: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(expert)
    models = {
        name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for name, path in (("expert", expert), ("amateur", amateur))
    }
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    direct = {"naive": naive(models["expert"]), "contrastive": contrastive(models["expert"], models["amateur"])}
    expected = {name: [write(choose, prompt, MAX_TOKENS) for prompt in prompts] for name, choose in direct.items()}
    blend = EnsembleOptions(blend=BlendParams(kind="contrastive"))
    endpoints = {
        "naive": Endpoint("n", "expert", None, 0, decode=str),
        "contrastive": Endpoint("c", "expert", None, 0, decode=str, members=("amateur",), ensemble=blend),
    }
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    runners = {name: Runner(model, slots=6, max_length=128, max_query=32) for name, model in models.items()}
    with Engine({name: ("target", runner) for name, runner in runners.items()}, LoopOptions()) as engine:
        for name, endpoint in endpoints.items():
            answers = engine.generate([Request(endpoint, prompt, params) for prompt in prompts])
            texts = [[token for delta in answer for token in delta.token_ids] for answer in answers]
            assert texts == expected[name]
            for text in texts:
                metrics = measure(text)
                measured = metrics.entropy_1, metrics.entropy_2, metrics.entropy_3
                assert measured == pytest.approx([entropy(text, n) for n in (1, 2, 3)])
                assert metrics.distinct_1 == len(set(text)) / len(text)
    assert expected["naive"] != expected["contrastive"]
