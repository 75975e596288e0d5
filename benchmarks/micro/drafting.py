"""Speed of a drafter alone, token by token and in chains. All drafts are accepted at once, so it never runs ahead.

python -m benchmarks.micro.drafting --output benchmarks/results/drafting.json
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from actors.drafter.loop import Drafter
from actors.replica.replica import load_runner
from actors.wire.addresses import ReplicaAddress
from actors.wire.link import LocalExchange, LocalLink
from actors.wire.messages import Admit, Advance, Cancel, Offer
from benchmarks.report import hardware
from decoding.drafts.trie import DraftTrie
from decoding.sampling.params import SamplingParams
from engine.loading.checkpoint import ModelSpec
from engine.loading.settings import load_tokenizer
from engine.model.runner import Runner
from training.heldout import read_prompts

_WARM_UP = 3  # rounds that are not counted


def main() -> None:
    """Measure draft tokens per second, alternating both ways; print them and write JSON."""
    options = _options()
    spec = ModelSpec(
        name="drafter", path=options.model, device=options.device, slots=max(options.streams), threads=options.threads
    )
    runner = load_runner(spec)
    prompts = [load_tokenizer(spec.path).encode(text)[:64] for text in read_prompts(Path("models/heldout.jsonl"))]
    findings = []
    for streams, temperature in itertools.product(options.streams, options.temperature):
        rates: dict[bool, list[float]] = {False: [], True: []}  # by whether there are chains
        for _ in range(options.repetitions):
            for runner.single_device, samples in rates.items():
                samples.append(_tokens_per_s(runner, prompts[:streams], temperature, options))
        ratio = statistics.median(chain / single for single, chain in zip(*rates.values(), strict=True))
        single, chain = (statistics.median(samples) for samples in rates.values())
        findings.append(
            {
                "streams": streams,
                "temperature": temperature,
                "single_tokens_per_s": rates[False],
                "chain_tokens_per_s": rates[True],
                "ratio": ratio,
            }
        )
        print(
            f"{streams} stream(s), T = {temperature:g}: one by one {single:.0f} tokens/s, in chains {chain:.0f}, "
            f"{ratio:.2f} times as many; {streams / single * 1e3:.3f} ms a step, {streams / chain * 1e3:.3f} ms"
        )
    if options.output:
        command = " ".join(["python -m benchmarks.micro.drafting", *sys.argv[1:]])
        report = {"command": command, "options": vars(options), "hardware": hardware(), "found": findings}
        options.output.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")


def _tokens_per_s(
    runner: Runner, prompts: Sequence[list[int]], temperature: float, options: argparse.Namespace
) -> float:
    """Return draft tokens of all rows per second of the drafter's turns."""
    draft_length, rounds = int(options.draft_length), int(options.rounds)
    exchange = LocalExchange()
    link = exchange.join("coordinator")
    drafter = Drafter(runner, exchange.join("drafter"))
    params = SamplingParams(max_tokens=(rounds + _WARM_UP + 1) * (draft_length + 1), temperature=temperature, seed=1)
    tries = [DraftTrie(list(prompt)) for prompt in prompts]
    target = ReplicaAddress(link.name, "target")
    admits = [
        Admit(i, prompt, len(prompt), params, draft_length, True, target=target) for i, prompt in enumerate(prompts)
    ]
    link.send("drafter", admits)
    lengths = list(map(len, prompts))
    seconds: float = 0.0
    for number in range(rounds + _WARM_UP):
        began_s = time.perf_counter()
        drafts = _drafts(drafter, link, tries, draft_length + 1)
        seconds += time.perf_counter() - began_s if number >= _WARM_UP else 0.0
        for i, draft in enumerate(drafts):
            link.send("drafter", [Advance(i, link.name, 0, lengths[i], draft, draft_length, rejected_at=0)])
            tries[i].commit(draft)
            lengths[i] += len(draft)
    link.send("drafter", [Cancel(i) for i in range(len(prompts))])
    drafter.turn()
    tokens: int = rounds * len(prompts) * (draft_length + 1)
    return tokens / seconds


def _drafts(drafter: Drafter, link: LocalLink, tries: Sequence[DraftTrie], length: int) -> list[list[int]]:
    """Run the drafter until it has drafted `length` tokens for each text, and return them."""
    while True:
        drafts = [trie.best_path(length) for trie in tries]
        if all(len(draft) == length for draft in drafts):
            return drafts
        drafter.turn()
        for _, message in link.receive(0.0):
            if isinstance(message, Offer):
                tries[message.request_id].offer(message.base, message.tokens, message.parents, message.probabilities)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/drafter")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40, help="of a repetition: drafts of each stream")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
