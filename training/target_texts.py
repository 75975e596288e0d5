"""Texts that a target writes, with its probabilities along them, generated in separate processes.

Must not know about training.
"""

import multiprocessing
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaForCausalLM

from training.checkpoint import load
from training.optimizer import autocast
from training.sampling import continue_prompts, gumbel
from training.stream import Stream

LENGTH = 160
PROMPT_LENGTHS = (16, 96)
BATCH = 128
PROCESSES = 2
KEPT_BATCHES = 32
BEST = 32
GREEDY_SHARE = 0.6
LOWEST_TEMPERATURE = 0.4

Arrays = tuple[NDArray[np.int64], NDArray[np.int16], NDArray[np.float32]]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """B texts with the target's `BEST` most probable next tokens at each position, best first."""

    tokens: Tensor
    """int64, (B, T + 1); padding after EOS"""
    choices: Tensor
    """int64, (B, T, K): the candidates after each of the first T tokens"""
    probabilities: Tensor
    """float32, (B, T, K): of the candidates; zero in the prompt and in the padding"""


class OwnTexts:
    """Keeps the newest batches, while processes generate the next ones in the background."""

    def __init__(self, folder: Path, stream: Stream, *, seed: int) -> None:
        self._folder = folder
        self._stream = stream
        self.written = 0
        """rows taken so far"""
        self._generator = torch.Generator().manual_seed(seed)
        self._executor = ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn"))
        self._batches: deque[Arrays] = deque(maxlen=KEPT_BATCHES)
        self._pending = deque(self._submit() for _ in range(PROCESSES))

    def grow(self, *, wait: bool = False) -> None:
        """Take the oldest pending batch if it is ready, and start another."""
        if wait or self._pending[0].done():
            self._batches.append(self._pending.popleft().result())
            self._pending.append(self._submit())
            self.written += BATCH

    def rows(self, count: int) -> Rows:
        """Return random rows of the kept batches."""
        indices = torch.randint(len(self._batches) * BATCH, (count,), generator=self._generator).tolist()
        parts = [[part[index % BATCH] for part in self._batches[index // BATCH]] for index in indices]
        tokens, choices, probabilities = (torch.from_numpy(np.stack(part)) for part in zip(*parts, strict=True))
        return Rows(tokens, choices.long(), probabilities)

    def close(self) -> None:
        """End the processes."""
        self._executor.shutdown(cancel_futures=True)

    def _submit(self) -> "Future[Arrays]":
        length = int(torch.randint(*PROMPT_LENGTHS, (), generator=self._generator))
        seed = int(torch.randint(2**31, (), generator=self._generator))
        return self._executor.submit(_write, self._folder, self._stream.prompts(BATCH, length).numpy(), seed)


@lru_cache(maxsize=1)
def _target(folder: Path) -> LlamaForCausalLM:
    torch.set_num_threads(1)
    model = load(folder)
    model.eval()
    return model


@torch.no_grad()
def _write(folder: Path, prompts: NDArray[np.int64], seed: int) -> Arrays:
    """Continue the prompts, `GREEDY_SHARE` of them greedily, the others at temperatures up to 1."""
    model = _target(folder)
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(BATCH, generator=generator).sub(GREEDY_SHARE) / (1 - GREEDY_SHARE)
    temperatures = torch.where(share < 0, 0.0, LOWEST_TEMPERATURE + (1 - LOWEST_TEMPERATURE) * share)
    noise = gumbel(BATCH, LENGTH - prompts.shape[1], model.config.vocab_size, generator=generator)
    with autocast():
        tokens = continue_prompts(model, torch.from_numpy(prompts), noise, temperatures)
        logits = torch.cat([model(part, use_cache=False).logits for part in tokens[:, :-1].split(8)])
    best = logits.float().log_softmax(-1).topk(BEST)
    assert isinstance(model.config.pad_token_id, int)
    counted = tokens[:, 1:].ne(model.config.pad_token_id)
    counted[:, : prompts.shape[1] - 1] = False
    probabilities = best.values.exp() * counted[..., None]
    return tokens.numpy(), best.indices.to(torch.int16).numpy(), probabilities.numpy()
