"""Host time of a request by size of the vocabulary: preparation, admission, target steps, output of tokens.

The tokenizer is padded with unused tokens, and the model is tiny and random. Coordinator and target alternate in this
thread. Times are CPU times of the thread, so the machine need not be idle.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from shutil import copytree, ignore_patterns
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

SIZES = (2_048, 151_936, 262_144)
_EOS = 2
_STEPS = 8
_SCHEMA = {"type": "string", "minLength": 1000}  # long enough that the answer does not end


T = TypeVar("T")


def kinds(vocab_size: int) -> dict[str, dict[str, Any]]:
    """Return the fields of requests, by name of the kind."""
    some = list(range(10, 1010))
    most = list(range(10, vocab_size, 2))
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


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Cost of one request, in milliseconds of a core."""

    prepare_ms: float  # from the body to requests
    admit_ms: float  # in coordinator and target up to the first token, with both ends of the link
    step_ms: float  # per step of the target, with all choices and their drafts
    token_ms: float  # per token, in the writer of the response


class LocalServer:
    """An endpoint, a coordinator and a target with a given size of vocabulary."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """folder: an empty folder for the tokenizer."""
        copytree(ROOT / "models" / "target", folder, dirs_exist_ok=True, ignore=ignore_patterns("*.safetensors"))
        _grow(folder, vocab_size)
        models = {"target": ModelConfig(path=str(folder), max_length=1024)}
        config = ServerConfig(models=models, endpoints={"bench": EndpointConfig(target="target")})
        self.served = load_endpoints(config)["bench"]
        tokenizer = load_tokenizer(str(folder))
        self.structures = structure_tokenizer(tokenizer, (_EOS,))
        exchange = LocalExchange()
        self._link = exchange.join("coordinator")
        self.coordinator = Coordinator(self._link)
        self._end = exchange.join("target")
        self.target = Target(_runner(vocab_size), self._end, LoopOptions(load_tokenizer=lambda: self.structures))
        self.coordinator.set_replicas([ReplicaAddress("target", "target")])
        self._turns()

    @staticmethod
    def _take(deltas: list[tuple[int, Delta]], index: int, delta: Delta) -> None:
        deltas.append((index, delta))

    def _turns(self) -> None:
        self._coordinator_turn()
        self._target_turn()

    def _coordinator_turn(self) -> None:
        self._link.wake()  # the turn must not wait
        self.coordinator.turn()

    def _target_turn(self) -> None:
        self._end.wake()
        self.target.turn()

    def run(self, fields: Mapping[str, Any]) -> RequestCost:
        """Serve a request. fields: of its body, apart from prompt and limits."""
        body = CompletionRequest(
            model="bench",
            prompt=["Once upon a time"],
            seed=0,
            ignore_eos="structured_outputs" not in fields,
            **fields,
            max_tokens=4 * _STEPS,
        )
        requests, prepare_ms = _timed(lambda: self.served.prepare(body, seed=0))
        deltas: list[tuple[int, Delta]] = []
        for index, request in enumerate(requests):
            self.coordinator.submit(request, partial(self._take, deltas, index))
        began_s = time.thread_time()
        while len(deltas) < len(requests):
            self._turns()
        admit_ms = 1e3 * (time.thread_time() - began_s)
        steps = []
        for _ in range(_STEPS):
            steps.append(_timed(self._target_turn)[1])
            self._coordinator_turn()
        writer = CompletionWriter(body, requests, self.served.token_decoder, identity=AnswerIdentity.new(seed=0))
        _, token_ms = _timed(lambda: [writer.add(*pair) for pair in deltas] and writer.whole())
        for request in requests:
            self.coordinator.cancel(request.request_id)
        self._turns()
        if any(delta.error for _, delta in deltas):
            raise RuntimeError(deltas)
        return RequestCost(
            prepare_ms, admit_ms, statistics.median(steps), token_ms / sum(len(delta.tokens) for _, delta in deltas)
        )


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


def measure(server: LocalServer, fields: Mapping[str, Any], *, rounds: int) -> RequestCost:
    """Return medians over the rounds, after a warm-up."""
    server.run(fields)
    costs = [server.run(fields) for _ in range(rounds)]
    return RequestCost(*(statistics.median(column) for column in zip(*map(astuple, costs), strict=True)))


def main() -> None:
    """Print a table; with --profile, also the functions that take most time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="vocabularies, in tokens")
    parser.add_argument("--kinds", nargs="+", help="of requests; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            server = LocalServer(Path(folder), size)
        print(f"V = {size:,}: ms to prepare, to admit, per step, per 1,000 tokens written")
        for name, fields in kinds(size).items():
            if arguments.kinds and name not in arguments.kinds:
                continue
            profile = cProfile.Profile(time.thread_time)
            if arguments.profile:
                profile.enable()
            cost = measure(server, fields, rounds=arguments.rounds)
            profile.disable()
            print(
                f"{name:26}{cost.prepare_ms:10.2f}{cost.admit_ms:10.2f}{cost.step_ms:10.2f}{1e3 * cost.token_ms:10.2f}",
                flush=True,
            )
            if arguments.profile:
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
