"""The article's columns: the engine writes, and `evaluation` measures, what a direct implementation does.

All is greedy and in float32, so there is no noise. With CONSORT_ARTICLE_MODELS, a folder that has gpt2-large and gpt2,
the article's own models are compared, too.
"""

import math
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.coordinator.request import Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from decoding.blending.params import BlendParams, EnsembleOptions
from decoding.sampling.params import SamplingParams
from engine.model.runner import Runner
from evaluation.article import contrastive, naive, write
from evaluation.metrics import measure
from evaluation.prompts import PROMPTS

MAX_TOKENS = 24  # of each text
ARTICLE = Path(os.environ.get("CONSORT_ARTICLE_MODELS", "none"))
own_models = pytest.mark.skipif(
    not (ARTICLE / "gpt2-large").is_dir(), reason="CONSORT_ARTICLE_MODELS has no gpt2-large"
)


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
