"""Layers that carry a state, with random inputs, whose kernels are run step by step over rows of texts."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.kernels.attention import RaggedBatch
from engine.kernels.state import RING, Convolution, Recurrence
from engine.model.ragged_batch import RowInput, pack_inputs
from engine.model.row_states import RowStates

SLOTS, POOL = 3, 100
SHAPES: dict[str, dict[str, Any]] = {  # heads, groups, sizes of keys and values, decays of a head
    "delta rule": {"heads": 4, "groups": 2, "key": 8, "value": 24, "decays": 1, "delta": True},
    "decays of rows": {"heads": 2, "groups": 2, "key": 16, "value": 8, "decays": 16, "delta": True},
    "mamba 2": {"heads": 4, "groups": 1, "key": 16, "value": 72, "decays": 1},
    "mamba 1": {"heads": 1, "groups": 1, "key": 6, "value": 136, "decays": 136, "rates": True},
}


class StateSteps:
    """One layer and its states. A token is the index of its inputs in a pool."""

    def __init__(self, kind: str, function: Callable[..., Tensor], device: str = "cpu") -> None:
        """kind: of SHAPES, or "convolution"."""
        self._kind, self._function, self._device = kind, function, device
        self.rows = RowStates(SLOTS, snapshots=2, page_size=16)
        generator = torch.Generator().manual_seed(3)
        make = _make_convolution if kind == "convolution" else _make_recurrence
        self._pool, self.memory, self._options = make(kind, self.rows.cells, generator, device)

    def run(self, rows: Sequence[RowInput]) -> Tensor:
        """Return the outputs of the rows' tokens, [N, …]."""
        packed = pack_inputs(rows, spare_slot=SLOTS, states=self.rows.plan(rows))
        batch: RaggedBatch = packed.copy_to(torch.device(self._device)).unpack()[2]
        tokens = [token for row in rows for token in row.tokens]
        inputs = {name: part[tokens].contiguous() for name, part in self._pool.items()}
        kind = Convolution if self._kind == "convolution" else Recurrence
        return self._function(kind(**inputs, **self.memory, **self._options, batch=batch)).cpu()

    def run_in_chunks(self, text: Sequence[int], seed: int) -> Tensor:
        """Return the outputs of a text, in slot 1, cut at random into chunks and steps with wrong drafts."""
        rng, position, outputs = random.Random(seed), 0, []
        while position < len(text):
            right = text[position : position + rng.choice([1, 1, 3, 20])]
            wrong = [rng.randrange(POOL) for _ in range(rng.choice([0, 4]) if len(right) < 5 else 0)]
            settled = position + 1 if len(right) + len(wrong) < 10 else None
            others = [RowInput(0, 0, [rng.randrange(POOL) for _ in range(rng.choice([1, 7]))])]
            rows = [*others, RowInput(1, position, [*right, *wrong], settled=settled)]
            outputs.append(self.run(rows)[len(others[0].tokens) :][: len(right)])
            position += len(right)
        return torch.cat(outputs)


def random_text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(POOL) for _ in range(length)]


def _make_recurrence(kind: str, cells: int, generator: torch.Generator, device: str) -> tuple[Any, Any, Any]:
    shape = SHAPES[kind]
    heads, groups, key, value, decays = (shape[name] for name in ("heads", "groups", "key", "value", "decays"))

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device)

    pool = {"query": normal(POOL, groups, key), "key": normal(POOL, groups, key), "value": normal(POOL, heads, value)}
    decay = normal(POOL, heads, decays).abs() / 4
    pool["decay"] = decay if shape.get("rates") else -decay
    if shape.get("delta"):
        pool["beta"] = normal(POOL, heads).sigmoid()
    size = groups * key + heads * (value + decays + 1)
    memory = {
        "states": torch.zeros(cells, heads, key, value, device=device),
        "ring": torch.zeros(cells, RING, size, device=device),
    }
    options = {"rates": -normal(heads, key, value).abs() if shape.get("rates") else None}
    options |= {} if shape.get("delta") else {"beta": None}
    return pool, memory, options | {"normalises": bool(shape.get("delta")), "scale": 0.7}


def _make_convolution(kind: str, cells: int, generator: torch.Generator, device: str) -> tuple[Any, Any, Any]:
    del kind
    channels, width = 72, 4
    weight, bias = torch.randn(channels, width, generator=generator), torch.randn(channels, generator=generator)
    memory = {"ring": torch.zeros(cells, RING, channels, device=device)}
    options = {"weight": weight.to(device), "bias": bias.to(device), "silu": True}
    return {"x": torch.randn(POOL, channels, generator=generator).to(device)}, memory, options
