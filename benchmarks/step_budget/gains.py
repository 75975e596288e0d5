"""`python -m benchmarks.step_budget.gains`: how much faster drafts make decoding at best, as a picture.

A step takes as long as reading its floor or its arithmetic, whichever is longer. See docs/performance.md.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Curve, Panel, draw
from benchmarks.step_budget.metered_runner import MeteredRunner, skipped_kernels
from benchmarks.step_budget.stage import fake_results

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_ACCEPTANCES = (0.5, 0.7, 0.9)
_LONGEST = 6  # γ
_DRAFT_COST = 0.05  # of a draft token for each row, in plain steps: about that of an EAGLE-3 head
_CONTEXT = 1024  # tokens of a row


class Machine(NamedTuple):
    """What a machine reads and computes at best."""

    bytes_per_s: float
    flops_per_s: float


class Setup(NamedTuple):
    """A model on a machine."""

    name: str
    machine: Machine
    shape: str  # in `SHAPES`
    vocab_size: int
    bits: int | None = None  # of weights; None: 16


_H100 = Machine(3.35e12, 989e12)  # dense bfloat16
_TWO_CORES = Machine(25e9, 119e9)  # with AVX2, as measured with float32: docs/experiments.md
_SETUPS = (
    Setup("8 B, 16 bits, an H100", _H100, "8b", 128000),
    Setup("8 B, 4 bits, an H100", _H100, "8b", 128000, 4),
    Setup("135 M, 4 bits, two AVX2 cores", _TWO_CORES, "135m", 49152, 4),
)


class Roofline:
    """The least time of a setup's steps."""

    def __init__(self, setup: Setup) -> None:
        with fake_results(), skipped_kernels():
            metered, unpacked = (
                MeteredRunner(
                    setup.shape,
                    vocab_size=setup.vocab_size,
                    columns=1,
                    slots=1,
                    max_length=64,
                    max_query=16,
                    bits=bits,
                )
                for bits in (setup.bits, None)
            )
        config = metered.runner.model.config
        attention: int = 2 * config.num_hidden_layers * config.hidden_size * _CONTEXT
        self._machine, self._vocab_size = setup.machine, setup.vocab_size
        self._weight_bytes, self._column_bytes = metered.weight_bytes(), metered.column_bytes()
        self._token_flops = 2 * (unpacked.weight_bytes() / 2 + attention)

    def step_s(self, rows: int, width: int) -> float:
        """Return the seconds of a step. width: tokens of a row."""
        moved = self._weight_bytes + rows * (_CONTEXT * self._column_bytes + width * self._vocab_size * 4)
        computed = rows * width * self._token_flops
        return max(moved / self._machine.bytes_per_s, computed / self._machine.flops_per_s)

    def gain(self, rows: int, draft_length: int, acceptance: float) -> float:
        """Return the speed-up over plain decoding with drafts in the step, Leviathan et al. 2023, eq. 1."""
        plain_s = self.step_s(rows, 1)
        tokens: float = sum(acceptance**index for index in range(draft_length + 1))
        return tokens * plain_s / (self.step_s(rows, draft_length + 1) + draft_length * _DRAFT_COST * plain_s)


def main() -> None:
    """Draw a row of panels for each setup."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_budget.gains")
    parser.add_argument("--output", type=Path, default=Path("docs/images/gains.png"))
    output: Path = parser.parse_args().output
    draw([_panels(Roofline(setup), setup.name) for setup in _SETUPS], output)


def _panels(roofline: Roofline, name: str) -> list[Panel]:
    panels = []
    for acceptance in _ACCEPTANCES:
        curves = [
            Curve(f"γ = {length}", _ROWS, [roofline.gain(rows, length, acceptance) for rows in _ROWS])
            for length in range(1, _LONGEST + 1)
        ]
        plain = Curve("plain", [], [1.0], colour="black", style="--")
        panels.append(Panel(f"{name}, acceptance {acceptance:g}", "rows", [*curves, plain], log=True))
    return panels


if __name__ == "__main__":
    main()
