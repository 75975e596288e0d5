"""Random logits, texts and settings, and the processors that transformers' `generate` builds for them."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams

VOCAB = 24

tokens = st.integers(0, VOCAB - 1)
# Few different tokens, so that texts repeat themselves.
texts = st.one_of(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(tokens, min_size=1, max_size=12))
paths = st.lists(st.integers(0, 3), max_size=5)


@st.composite
def logits_of(draw: st.DrawFn, rows: int, vocab_size: int = VOCAB) -> Tensor:
    """Draw logits, [rows, V]: normal, coarse with ties, all equal, or with excluded tokens."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(rows, vocab_size, generator=generator) * draw(st.sampled_from([0.1, 1.0, 8.0]))
    match draw(st.sampled_from(["normal", "coarse", "equal", "excluded"])):
        case "coarse":
            logits = logits.round()
        case "equal":
            logits = torch.full_like(logits, 1.5)
        case "excluded":
            logits[:, 1:].masked_fill_(torch.rand(rows, vocab_size - 1, generator=generator) < 0.3, float("-inf"))
    return logits


def tuples(elements: st.SearchStrategy[Any], most: int) -> st.SearchStrategy[tuple[Any, ...]]:
    """Draw a non-empty tuple of different elements."""
    return st.lists(elements, min_size=1, max_size=most, unique=True).map(tuple)


# Values of each parameter that differ from its default.
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.3, 100.0]), min_size=1, max_size=4).map(
        lambda biases: tuple(biases.items())
    ),
    "repetition_penalty": st.sampled_from([0.5, 1.1, 2.0]),
    "no_repeat_ngram_size": st.integers(1, 4),
    "bad_words_ids": tuples(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), 4),
    "min_tokens": st.integers(1, 5),
    "allowed_token_ids": tuples(tokens, 20),
    "forced_bos_token_id": tokens,
    "forced_eos_token_id": tokens,
    "suppress_tokens": tuples(tokens, 6),
    "begin_suppress_tokens": tuples(tokens, 6),
    "temperature": st.sampled_from([0.001, 0.7, 1.3, 100.0]),
    "top_k": st.sampled_from([1, 2, 5, VOCAB - 1, 2 * VOCAB]),
    "top_p": st.sampled_from([1e-9, 0.301, 0.501, 0.901, 0.951]),  # no sum of a few equal probabilities
    "min_p": st.sampled_from([0.01, 0.2, 0.5, 1.0]),
    "typical_p": st.sampled_from([0.01, 0.2, 0.5, 0.95]),
    "epsilon_cutoff": st.sampled_from([3e-4, 0.03, 0.2, 0.9]),
    "eta_cutoff": st.sampled_from([3e-4, 0.03, 0.2, 0.9]),
}
OUR_SETTINGS = SETTINGS | {
    "presence_penalty": st.sampled_from([-2.0, 0.3, 1.0]),
    "frequency_penalty": st.sampled_from([-0.7, 0.3, 2.0]),
    "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.3]),
}


@st.composite
def params_of(draw: st.DrawFn, settings: dict[str, st.SearchStrategy[Any]] = OUR_SETTINGS) -> SamplingParams:
    """Draw parameters with some of the settings."""
    share = draw(st.sampled_from([0.05, 0.2, 0.5]))
    chosen = [field for field in settings if draw(st.floats(0, 1, exclude_max=True)) < share]
    values = {field: draw(settings[field]) for field in chosen}
    ends = draw(st.sampled_from([(), (1,), (1, 7)]))
    most = draw(st.integers(values.get("min_tokens", 1), 8))
    return SamplingParams(max_tokens=most, eos_token_ids=ends, seed=draw(st.integers(0, 2**40)), **values)


@st.composite
def positions_of(draw: st.DrawFn, params: SamplingParams) -> Position:
    """Draw a position in a request's answer, maybe after draft tokens, maybe with a grammar."""
    prompt = draw(texts)
    answer = draw(st.lists(st.integers(0, 3), max_size=params.max_tokens - 1))
    path = draw(st.lists(st.integers(0, 3), max_size=params.max_tokens - 1 - len(answer)))
    words = draw(st.one_of(st.none(), st.none(), st.integers(0, 2**VOCAB - 1)))
    allowed = None if words is None else torch.tensor([words], dtype=torch.int32)
    return Position(History(params, [*prompt, *answer], len(prompt)), path, allowed)


@cache
def _model() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )


def processors(params: SamplingParams, prompt_length: int) -> LogitsProcessorList:
    """Build logits processors as `generate` does."""
    config = GenerationConfig(
        max_length=prompt_length + params.max_tokens,
        do_sample=not params.greedy,
        num_beams=1,
        eos_token_id=list(params.eos_token_ids) or None,
        pad_token_id=0,
        sequence_bias={(token,): bias for token, bias in params.logit_bias} or None,
        bad_words_ids=[list(word) for word in params.bad_words_ids] or None,
        min_new_tokens=params.min_tokens or None,
        suppress_tokens=list(params.suppress_tokens) or None,
        begin_suppress_tokens=list(params.begin_suppress_tokens) or None,
        **{
            field: getattr(params, field)
            for field in (
                *("repetition_penalty", "no_repeat_ngram_size", "forced_bos_token_id", "forced_eos_token_id"),
                *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
            )
        },
    )
    model = _model()
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device="cpu")
    allowed = list(params.allowed_token_ids)
    return model._get_logits_processor(
        config,
        input_ids_seq_length=prompt_length,
        encoder_input_ids=torch.zeros(1, prompt_length, dtype=torch.int64),
        prefix_allowed_tokens_fn=(lambda _, __: allowed) if allowed else None,
        device="cpu",
        model_kwargs={},
    )


def processed(logits: Tensor, text: Sequence[int], prompt_length: int, params: SamplingParams) -> Tensor | None:
    """Apply the processors to logits, [V]. Return None if they exclude every token: transformers defines no result."""
    if {params.forced_bos_token_id, params.forced_eos_token_id} & set(params.suppress_tokens):
        return None
    scores, ids = logits[None], torch.tensor([list(text)], dtype=torch.int64)
    for processor in processors(params, prompt_length):
        scores = processor(ids, scores)
        if scores.amax() == -torch.inf:
            return None
    return scores[0]
