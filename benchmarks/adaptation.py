"""What online adaptation is worth: acceptance on prompts of another kind, before and after a drafter has learned.

python -m benchmarks.adaptation --rounds 8 --output benchmarks/results/adaptation.json

By default the bundled tiny pair, which was trained on Python code, continues the Markdown of `docs/`. With `--target` a
finetuned target has a drafter that was made for its base. Requests that measure have a salt, so they are not learned.
Their texts must be the same before and after.
"""

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from actors.adaptation.adaptation import Adaptation, AdaptationOptions
from actors.adaptation.messages import FromLearner, Texts, ToLearner
from actors.coordinator.request import Endpoint, Request, Statistics
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.replica import load_runner, make_adaptation, publish_weights
from benchmarks.report import table, write
from decoding.sampling.params import SamplingParams
from engine.loading.checkpoint import ModelSpec
from engine.loading.draft_vocabulary import save_draft_vocabulary
from engine.loading.settings import is_trimmed, load_tokenizer
from training.adaptation.learner import AdaptingDrafter
from training.drafter.start import load_student
from training.heldout import read_prompts

_PROMPT_TOKENS = 24
_BURST = 32  # texts of a round
_ROUND_S = 900.0  # the most, until a round is over


@dataclass(frozen=True, slots=True)
class Measurement:
    """Drafting on one kind of prompts."""

    prompts: str
    when: str
    drafted: int
    acceptance: float  # accepted / drafted
    acceptance_length: float  # tokens per step of the target


class Workload:
    """Requests to one pair."""

    def __init__(self, engine: Engine, endpoint: Endpoint, params: SamplingParams) -> None:
        self._engine, self._endpoint, self._params = engine, endpoint, params

    def answer(self, prompts: Sequence[Sequence[int]], *, salt: str = "") -> tuple[list[list[int]], Statistics]:
        """Answer prompts at once; return the answers' tokens and what drafting did."""
        requests = [
            Request(self._endpoint, prompt, replace(self._params, seed=seed), cache_salt=salt)
            for seed, prompt in enumerate(prompts)
        ]
        answers = self._engine.generate(requests)
        texts = [[token for delta in answer for token in delta.tokens] for answer in answers]
        return texts, sum((answer[-1].statistics for answer in answers), Statistics())


class InlineLearner:
    """A learner in the drafter's own thread: a step whenever it is asked what it has learned."""

    def __init__(self, options: AdaptationOptions, spec: ModelSpec) -> None:
        model, self._vocabulary = load_student(replace(spec, dtype="float32"))
        self._folder = Path(tempfile.mkdtemp())
        self._drafter = AdaptingDrafter(
            model,
            self._vocabulary,
            texts=options.texts,
            update_after=options.update_after,
            learning_rate=options.learning_rate,
            save=self._save,
        )

    def send(self, message: ToLearner) -> None:
        """Take texts."""
        if isinstance(message, Texts):
            self._drafter.add(message.texts)

    def receive(self) -> list[FromLearner]:
        """Finish a round, if there are texts for one."""
        while self._drafter.due:
            if (result := self._drafter.step()) is not None:
                return [result]
        return []

    def close(self) -> None:
        """Remove what is left."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _save(self, model: PreTrainedModel) -> str:
        model.save_pretrained(self._folder / "update")
        if is_trimmed(model.config):
            save_draft_vocabulary(self._vocabulary.tokens.tolist(), self._folder / "update")
        return str(self._folder / "update")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/target")
    parser.add_argument("--drafter", default="models/drafter")
    parser.add_argument("--prompts", type=Path, help='lines of {"prompt": …}, of the other kind; default: docs/*.md')
    parser.add_argument("--usual", type=Path, default=Path("models/heldout.jsonl"), help="prompts of the usual kind")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=AdaptationOptions(module="").learning_rate)
    parser.add_argument("--measured", type=int, default=32, help="prompts of each kind that are measured")
    parser.add_argument("--inline", action="store_true", help="learn in this process, where others use all processors")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    tokenizer = load_tokenizer(args.target)
    other = [tokenizer(text).input_ids for text in (read_prompts(args.prompts) if args.prompts else _markdown())]
    other = [prompt[:_PROMPT_TOKENS] if args.prompts is None else prompt for prompt in other]
    usual = [tokenizer(text).input_ids for text in read_prompts(args.usual)[: args.measured]]
    measured, learned = other[: args.measured], other[args.measured :]
    size = {"slots": 16, "max_length": 512, "threads": args.threads, "device": "cpu"}
    specs = [ModelSpec(name=name, path=getattr(args, name), **size) for name in ("target", "drafter")]
    target, drafter = map(load_runner, specs)
    options = AdaptationOptions(module="training.adaptation", update_after=_BURST, learning_rate=args.learning_rate)
    if args.inline:
        learner = partial(InlineLearner, options, specs[1])
        adaptation = Adaptation(options, learner, partial(publish_weights, drafter, specs[1]))
    else:
        adaptation = make_adaptation(options, drafter, specs[1])
    params = SamplingParams(max_tokens=args.new_tokens, temperature=args.temperature)
    endpoint = Endpoint("e", "target", "drafter", 4, lambda tokens: str(tokenizer.decode(tokens)))
    measurements: list[Measurement] = []
    texts: dict[str, list[list[list[int]]]] = {"other": [], "usual": []}
    rounds: list[dict[str, object]] = []
    loops = {"drafter": LoopOptions(adaptation=adaptation)}
    replicas = {"target": ("target", target), "drafter": ("drafter", drafter)}
    try:
        with Engine(replicas, LoopOptions(adaptive=False), own_options=loops) as engine:  # type: ignore[arg-type]
            workload = Workload(engine, endpoint, params)
            for when in ("before", "after"):
                for kind, prompts in (("other", measured), ("usual", usual)):
                    written, done = workload.answer(prompts, salt="measured")
                    texts[kind].append(written)
                    rate, length = done.accepted / max(done.drafted, 1), done.committed / max(done.steps, 1)
                    measurements.append(Measurement(kind, when, done.drafted, rate, length))
                    print(measurements[-1], flush=True)
                for number in range(args.rounds if when == "before" else 0):
                    start = number * _BURST % max(len(learned) - _BURST, 1)
                    workload.answer(learned[start : start + _BURST])
                    rounds.append(_learn(adaptation))
                    print(f"round {number + 1}: {rounds[-1]}", flush=True)
    finally:
        adaptation.close()
    same = all(first == second for first, second in texts.values())
    rows = [
        [f"{m.prompts} prompts, {m.when}", f"{m.acceptance:.3f}", f"{m.acceptance_length:.2f}"] for m in measurements
    ]
    print(table(["", "accepted / drafted", "tokens per step"], rows))
    print(f"texts are {'the same' if same else 'DIFFERENT'}")
    if args.output is not None:
        results = [asdict(measurement) for measurement in measurements]
        write(
            args.output,
            "benchmarks.adaptation",
            {name: str(value) for name, value in vars(args).items()},
            measurements=results,
            rounds=rounds,
            same_texts=same,
        )


def _markdown() -> list[str]:
    """Return passages of the documentation, in random order."""
    files = sorted(Path("docs").glob("*.md"))
    passages = [part for file in files for part in file.read_text(encoding="utf-8").split("\n\n") if len(part) > 200]
    random.Random(0).shuffle(passages)
    return passages


def _learn(adaptation: Adaptation) -> dict[str, object]:
    """Wait until a round of learning is over, while the server is idle; return what it reported."""
    before, deadline_s = adaptation.state, time.monotonic() + _ROUND_S
    while adaptation.state is before:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no round ended within {_ROUND_S:.0f} s")
        time.sleep(0.1)
    state = adaptation.state
    return {name: getattr(state, name) for name in state.__struct_fields__}


if __name__ == "__main__":
    main()
