"""A target's loop over beam rows and plain rows, without messages."""

from collections.abc import Sequence
from itertools import chain

from actors.verifier.beams import BeamRow
from actors.wire.messages import Admit, Beams, Failed
from decoding.beams.hypothesis import Hypothesis
from decoding.beams.options import BeamOptions
from decoding.sampling.params import SamplingParams
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner

Asked = tuple[Sequence[int], SamplingParams, BeamOptions]  # prompt, params, options


def beam_row(runner: Runner, request_id: int, request: Asked) -> BeamRow:
    prompt, params, options = request
    admit = Admit(request_id, list(prompt), len(prompt), params, 0, drafter=False)
    return BeamRow("coordinator", admit, options, runner.cache)


def begin(runner: Runner, row: BeamRow, *, chunk: int = 256) -> Beams | Failed | None:
    """Give the row its slots, prefill, and choose its first tokens. Returns the result if that ends the search."""
    row.slot, *row.more_slots = [runner.cache.take()[0] for _ in range(row.slots_needed)]
    result = None
    while row.prefilling:
        result = step(runner, row, chunk=chunk)
    return result


def step(runner: Runner, row: BeamRow, *, chunk: int = 256) -> Beams | Failed | None:
    logits = runner.logits(row.inputs(chunk))
    return row.take(logits, range(len(logits)))


def end(runner: Runner, row: BeamRow) -> None:
    for slot in row.slots:
        runner.cache.give_back(slot)


class PlainRow:
    """A greedy request in the same batches as the beams."""

    def __init__(self, runner: Runner, prompt: Sequence[int]) -> None:
        self._runner = runner
        self.tokens = list(prompt)
        self.slot, _ = runner.cache.take()
        logits = runner.logits([RowInput(self.slot, 0, prompt, wanted=1)])
        self.tokens.append(int(logits.argmax()))

    def input(self) -> RowInput:
        return RowInput(self.slot, len(self.tokens) - 1, self.tokens[-1:])


def search_all(
    runner: Runner, requests: Sequence[Asked], *, beside: Sequence[PlainRow] = (), chunk: int = 256
) -> list[list[Hypothesis]]:
    """Return the answers of all searches. Those that have slots run in one batch; others follow as slots get free."""
    rows = [beam_row(runner, request_id, request) for request_id, request in enumerate(requests)]
    waiting, active = list(rows), list[BeamRow]()
    while waiting or active:
        while waiting and runner.cache.free >= waiting[0].slots_needed:
            active.append(waiting.pop(0))
            begin(runner, active[-1], chunk=chunk)
        active = _without_done(runner, active)
        if not active:
            continue
        inputs = [row.inputs(chunk) for row in active]
        logits = runner.logits([*chain.from_iterable(inputs), *(plain.input() for plain in beside)])
        parts = logits.split([*map(len, inputs), *(1 for _ in beside)])
        for row, part in zip(active, parts, strict=False):
            row.take(part, range(len(part)))
        for plain, part in zip(beside, parts[len(active) :], strict=True):
            plain.tokens.append(int(part.argmax()))
        active = _without_done(runner, active)
    return [row.search.best() for row in rows]


def _without_done(runner: Runner, rows: list[BeamRow]) -> list[BeamRow]:
    for row in rows:
        if row.search.done:
            end(runner, row)
    return [row for row in rows if not row.search.done]
