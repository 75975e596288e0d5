"""Steps of a Llama of usual size with random weights, by replays of graphs.

Prints the time of steps of some shapes, with and without the choice of tokens, chains of draft tokens of the model and
of an EAGLE-3 head, and whether a token's logits have the same bits alone, among drafts, in company and in a chunk.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from actors.drafter.chain import ChainStart, DraftChain
from benchmarks.step_budget.metered_runner import llama_config
from decoding.drafts.choices import RANKS
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams
from decoding.sampling.sampler import sample
from engine.heads.chain_proposer import ChainProposer
from engine.heads.eagle3 import Eagle3Head
from engine.heads.proposer import DraftStart, Reading
from engine.layers.faster_layers import use_faster_layers, use_faster_parts
from engine.model.hidden_states import HiddenStates
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner

_ROUNDS = 15
_CHUNK = 512
_STEPS = ((1, 1), (1, 5), (8, 1), (8, 5), (64, 1), (64, 6))  # rows, tokens of each
_COMPANY = ((1, 16), (5, 1), (5, 16), (8, 64), (20, 1), (40, 3))  # tokens of a row at once, rows
_COMPARED = 40  # tokens
_CHAIN = 3
_HEAD_OUTPUTS, _HEAD_LENGTH = 32000, 4


def report_steps(options: argparse.Namespace) -> int:
    """Print the measurements. Returns 1 if a token's logits depend on what else is in the step."""
    runner = _runner(options.shape, options.vocabulary, options.rows, options.context + 128)
    text = random.Random(0).choices(range(options.vocabulary), k=options.context + 128)
    _report_prompts(runner, text, options.context)
    for rows, width in _STEPS:
        if rows <= options.rows:
            _report_step(runner, [RowInput(row, options.context, text[-width:]) for row in range(rows)])
    same = _bits_are_the_same(runner, text, options.context)
    row_counts = sorted({1, min(8, options.rows), options.rows})
    for rows in row_counts:
        _report_chain(runner, rows)
    _report_head(runner, llama_config(options.shape, options.vocabulary), row_counts)
    return 0 if same else 1


def _runner(shape: str, vocab_size: int, slots: int, max_length: int) -> Runner:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = llama_config(shape, vocab_size)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, dtype=torch.bfloat16)
    torch.nn.Module.to_empty(model, device=device)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data = parameter.data.fill_(1.0) if parameter.ndim == 1 else parameter.data.normal_(std=0.02)
    use_faster_layers(model)
    runner = Runner(model, slots=slots, max_length=max_length, max_query=_CHUNK)
    runner.logits([RowInput(0, 0, [0])])
    runner.cache.clear_all()
    _report_memory("graphs", device, runner.warm_up)
    return runner


def _report_memory(name: str, device: torch.device, record: Callable[[], None]) -> None:
    before = _free(device)
    record()
    print(f"{name}: {(before - _free(device)) / 2**20:,.0f} MiB")


def _free(device: torch.device) -> int:
    """Return the free bytes of a GPU; 0 on a CPU."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _report_prompts(runner: Runner, text: Sequence[int], context: int) -> None:
    """Read a text of `context` tokens into each slot, and print the speed."""
    began_s = time.perf_counter()
    for slot in range(runner.cache.slots):
        _read(runner, slot, text[:context])
    _wait(runner)
    print(f"prompts: {runner.cache.slots * context / (time.perf_counter() - began_s):,.0f} tokens/s")


def _read(runner: Runner, slot: int, text: Sequence[int]) -> None:
    for start in range(0, len(text), _CHUNK):
        runner.logits([RowInput(slot, start, text[start : start + _CHUNK], wanted=1)])


def _report_step(runner: Runner, rows: Sequence[RowInput]) -> None:
    params = SamplingParams(max_tokens=400, temperature=0.8, seed=3, top_p=0.95)
    histories = [History(params, [1] * 16, 4) for _ in rows]
    positions = [Position(history, [2] * len(row.tokens)) for history, row in zip(histories, rows, strict=True)]

    def choose() -> object:
        logits = runner.logits(rows)
        everywhere = [position for position, row in zip(positions, rows, strict=True) for _ in row.tokens]
        return sample(logits, SamplingBatch.build(everywhere, logits.shape[-1], logits.device)).tolist()

    logits_s, all_s = _seconds(runner, lambda: runner.logits(rows)), _seconds(runner, choose)
    print(f"{len(rows)} × {len(rows[0].tokens)}: logits {logits_s * 1e3:.2f} ms, with tokens {all_s * 1e3:.2f} ms")


def _bits_are_the_same(runner: Runner, text: Sequence[int], context: int) -> bool:
    reference = _logits(runner, text, context, 1, 1)
    same = True
    for width, rows in _COMPANY:
        if rows <= runner.cache.slots:
            differing = (_logits(runner, text, context, width, rows) != reference).any(dim=1).sum().item()
            print(f"{width} tokens at once among {rows} rows: {differing} of {_COMPARED} tokens have other logits")
            same = same and not differing
    return same


def _logits(runner: Runner, text: Sequence[int], context: int, width: int, rows: int) -> Tensor:
    """Return the logits of some tokens after `context`, [n, V], so many at once, beside rows of other lengths."""
    runner.cache.clear_all()
    for row in range(rows):
        _read(runner, row, text[: 30 + row if row else context])
    results = []
    for start in range(context, context + _COMPARED, width):
        others = [RowInput(row, 30 + row, text[: 1 + row % 4]) for row in range(1, rows)]
        results.append(runner.logits([RowInput(0, start, text[start : start + width]), *others])[:width].clone())
    return torch.cat(results)


def _report_chain(runner: Runner, rows: int) -> None:
    """Print the time of a draft token, as if the model were a drafter."""
    chain = DraftChain(runner)
    runner.cache.clear_all()
    for temperature in (0.0, 0.8):
        params = [SamplingParams(max_tokens=40, temperature=temperature, seed=row) for row in range(rows)]
        starts = [ChainStart(RowInput(row, 0, [5]), each, 1) for row, each in enumerate(params)]
        seconds = _seconds(runner, partial(chain.run, starts, _CHAIN))
        print(f"a draft token of {rows} rows, temperature {temperature:g}: {seconds / _CHAIN * 1e3:.2f} ms")


def _report_head(runner: Runner, config: LlamaConfig, row_counts: Sequence[int]) -> None:
    """Print what an EAGLE-3 head with random weights takes for its drafts, and to read what a step has committed."""
    head = Eagle3Head(config, target_hidden_size=config.hidden_size, outputs=min(_HEAD_OUTPUTS, config.vocab_size))
    torch.nn.Module.to(head, runner.device).requires_grad_(False)
    for parameter in head.parameters():
        parameter.data = parameter.data.bfloat16()
    use_faster_parts(head)
    runner.cache.clear_all()
    proposer = ChainProposer(head, runner)
    _report_memory("a head's graphs", runner.device, proposer.warm_up)
    for rows in row_counts:
        params = SamplingParams(max_tokens=400, temperature=0.8, seed=3, top_p=0.95)
        starts = [DraftStart(row, 10, params) for row in range(rows)]
        readings = [Reading(row, 8, [5, 6], [2 * row, 2 * row + 1], 2 * row + 1, 4) for row in range(rows)]
        last = torch.randn(2 * rows, config.hidden_size, device=runner.device, dtype=torch.bfloat16)
        hidden = HiddenStates(last, last.repeat(1, 3))
        runner.cache.prepare_writes((row, 0, 20) for row in range(rows))
        read_s = _seconds(runner, partial(proposer.read, readings, hidden))
        draft_s = _seconds(runner, partial(proposer.propose, starts, _HEAD_LENGTH, RANKS))
        print(f"a head, {rows} rows: draft of {_HEAD_LENGTH} {draft_s * 1e3:.2f} ms, reading {read_s * 1e3:.2f} ms")


def _seconds(runner: Runner, run: Callable[[], object]) -> float:
    """Return the median time, after two calls that do not count."""
    times = []
    for _ in range(2 + _ROUNDS):
        _wait(runner)
        began_s = time.perf_counter()
        run()
        _wait(runner)
        times.append(time.perf_counter() - began_s)
    return median(times[2:])


def _wait(runner: Runner) -> None:
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
