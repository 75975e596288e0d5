"""Chats with made-up candidates, and a tiny model to train on them."""

from collections.abc import Callable
from itertools import count

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from training.texts import Chat

TOKENS = 40
CANDIDATES = 4


class KilledError(Exception):
    """A test ends the run here."""


def killing(after: int | None) -> Callable[[str], None]:
    """Return a function for reports that raises `KilledError` at the given call."""
    calls = count(1)

    def report(line: str) -> None:
        if next(calls) == after:
            raise KilledError

    return report


def make_chats(count: int) -> list[Chat]:
    """Return chats of different lengths, in which each token's number follows from the one before."""
    generator = torch.Generator().manual_seed(0)
    return [
        _make_chat(2 + number % 3, 9 + number % 7, (0.0, 0.7, 1.0)[number % 3], generator) for number in range(count)
    ]


def make_model(tokens: int = TOKENS) -> PreTrainedModel:
    """Return a Llama with two layers and made-up weights."""
    config = LlamaConfig(
        vocab_size=tokens,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return model


def _make_chat(prompt: int, answer: int, temperature: float, generator: torch.Generator) -> Chat:
    first = int(torch.randint(TOKENS, (), generator=generator))
    tokens = [(first + 3 * index) % TOKENS for index in range(prompt + answer)]
    candidates = (torch.tensor(tokens[prompt:])[:, None] + torch.arange(CANDIDATES)) % TOKENS
    logprobs = torch.tensor([0.7, 0.1, 0.1, 0.05]).log().expand(answer, CANDIDATES)
    return Chat(tokens[:prompt], tokens[prompt:], temperature, candidates.int(), logprobs.half())
