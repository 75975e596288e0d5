"""Host time of a request by size of the vocabulary: preparation, admission, target steps, output of tokens.

The tokenizer is padded with unused tokens, and the model is tiny and random. Coordinator and target alternate in this
thread. Times are CPU times of the thread, so the machine need not be idle.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from shutil import copytree, ignore_patterns
from statistics import median
from typing import Any, TypeVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Delta
from actors.loops.options import LoopOptions
from actors.verifier.loop import Target
from actors.wire.link import LocalExchange
from actors.wire.messages import ReplicaAddress
from deployments.apis.completions.request import CompletionRequest
from deployments.apis.completions.writer import CompletionWriter
from deployments.apis.writer import AnswerIdentity
from deployments.configuration.config import ServerConfig
from deployments.configuration.endpoint import EndpointConfig
from deployments.configuration.model import ModelConfig
from deployments.configuration.paths import ROOT
from deployments.endpoints.loading import load_endpoints
from engine.loading.settings import load_tokenizer
from engine.loading.tokenizers import structure_tokenizer
from engine.model.runner import Runner
from evaluation.metrics import table

_SIZES = (2_048, 151_936, 262_144)
_EOS = 2
_STEPS = 8
_SCHEMA = {"type": "string", "minLength": 1000}  # long enough that the answer does not end
_HEAD = ("request", "prepare, ms", "admit, ms", "a step, ms", "1,000 tokens written, ms")

T = TypeVar("T")


def _kinds(vocab_size: int) -> dict[str, dict[str, Any]]:
    """Return the fields of requests, by name of the kind."""
    some, most = list(range(10, 1010)), list(range(10, vocab_size, 2))
    return {
        "greedy": {"temperature": 0},
        "sampled": {"temperature": 1, "top_p": 0.95},
        "logit_bias, 300": {"temperature": 0, "logit_bias": {str(token): 1 for token in some[:300]}},
        "bad_words, 500": {"temperature": 0, "bad_words": [f"w{index}" for index in range(500)]},
        "allowed_token_ids, 1,000": {"temperature": 0, "allowed_token_ids": some},
        "allowed_token_ids, V / 2": {"temperature": 0, "allowed_token_ids": most},
        "suppress_tokens, V / 2": {"temperature": 0, "suppress_tokens": most},
        "min_tokens": {"temperature": 0, "min_tokens": 10},
        "penalties": {"temperature": 0, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
        "logprobs, 20": {"temperature": 0, "logprobs": 20},
        "JSON schema": {"temperature": 0, "structured_outputs": {"json": _SCHEMA}},
        "stop strings": {"temperature": 0, "stop": ["###", "\n\nUser:"]},
        "n = 8": {"temperature": 1, "n": 8},
    }


class LocalServer:
    """An endpoint, a coordinator and a target with a given size of vocabulary."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """folder: an empty folder for the tokenizer."""
        copytree(ROOT / "models" / "target", folder, dirs_exist_ok=True, ignore=ignore_patterns("*.safetensors"))
        _grow(folder, vocab_size)
        models = {"target": ModelConfig(path=str(folder), max_length=1024)}
        config = ServerConfig(models=models, endpoints={"bench": EndpointConfig(target="target")})
        self._served = load_endpoints(config)["bench"]
        structures = structure_tokenizer(load_tokenizer(str(folder)), (_EOS,))
        exchange = LocalExchange()
        self._link, self._end = exchange.join("coordinator"), exchange.join("target")
        self._coordinator = Coordinator(self._link)
        self._target = Target(_runner(vocab_size), self._end, LoopOptions(load_tokenizer=lambda: structures))
        self._coordinator.set_replicas([ReplicaAddress("target", "target")])
        self._turns()

    def _turns(self) -> float:
        """Run both loops. Returns the milliseconds of the target's turn."""
        self._link.wake()  # the turn must not wait
        self._coordinator.turn()
        self._end.wake()
        return _timed(self._target.turn)[1]

    def run(self, fields: Mapping[str, Any]) -> tuple[float, float, float, float]:
        """Serve a request; return the numbers of a row of the table.

        fields: of its body, apart from prompt and limits.
        """
        common: dict[str, Any] = {"model": "bench", "prompt": ["Once upon a time"], "seed": 0, "max_tokens": 4 * _STEPS}
        body = CompletionRequest(ignore_eos="structured_outputs" not in fields, **common, **fields)
        requests, prepare_ms = _timed(lambda: self._served.prepare(body, seed=0))
        deltas: list[tuple[int, Delta]] = []
        for index, request in enumerate(requests):
            self._coordinator.submit(request, partial(_take, deltas, index))
        began_s = time.thread_time()
        while len(deltas) < len(requests):
            self._turns()
        admit_ms = 1e3 * (time.thread_time() - began_s)
        step_ms = median(self._turns() for _ in range(_STEPS))
        writer = CompletionWriter(body, requests, self._served.token_decoder, identity=AnswerIdentity.new(seed=0))
        _, write_ms = _timed(lambda: [writer.add(*pair) for pair in deltas] and writer.whole())
        for request in requests:
            self._coordinator.cancel(request.request_id)
        self._turns()
        if any(delta.error for _, delta in deltas):
            raise RuntimeError(deltas)
        return prepare_ms, admit_ms, step_ms, 1e3 * write_ms / sum(len(delta.tokens) for _, delta in deltas)


def _take(deltas: list[tuple[int, Delta]], index: int, delta: Delta) -> None:
    deltas.append((index, delta))


def _grow(folder: Path, vocab_size: int) -> None:
    """Add tokens to a tokenizer that no merge produces."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    known.update({f"\u0120w{index:06d}": index for index in range(len(known), vocab_size)})
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": vocab_size}), encoding="utf-8")


def _runner(vocab_size: int) -> Runner:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=vocab_size, max_position_embeddings=1024, **sizes)
    return Runner(LlamaForCausalLM(config), slots=8, max_length=1024, max_query=256)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result, and the CPU time of this thread in milliseconds."""
    began_s = time.thread_time()
    result = work()
    return result, 1e3 * (time.thread_time() - began_s)


def main() -> None:
    """Print a table of medians for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=_SIZES, help="vocabularies, in tokens")
    parser.add_argument("--kinds", nargs="+", help="of requests; all by default")
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            server = LocalServer(Path(folder), size)
        rows = []
        for name, fields in _kinds(size).items():
            if not options.kinds or name in options.kinds:
                costs = [server.run(fields) for _ in range(1 + options.rounds)][1:]
                rows.append([name, *(f"{median(column):.2f}" for column in zip(*costs, strict=True))])
        print(f"V = {size:,}\n{table(_HEAD, rows)}\n", flush=True)


if __name__ == "__main__":
    main()
