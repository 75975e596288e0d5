"""The checks of families. A check returns why it does not hold, or an empty text if it does."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from actors.coordinator.request import Delta, Endpoint, Request, Timeline
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from actors.wire.messages import Adapter
from decoding.beams.options import BeamOptions
from decoding.drafts.options import NgramOptions
from decoding.sampling.params import SamplingParams
from engine.heads.chain_proposer import ChainProposer
from engine.heads.medusa import MedusaHeads, MedusaProposer
from engine.heads.proposer import HeadProposer
from engine.heads.spec import HeadsSpec
from engine.kernels.quantized_weight import Quantization
from engine.loading.checkpoint import ModelSpec, check_model, load_model
from engine.loading.lora import read_lora
from engine.loading.runners import load_runner, load_with_heads
from engine.model.runner import Runner
from tests.families.configurations import VOCAB, make_config, make_model, save_model
from tests.support.adapters import save_adapter
from tests.support.heads import STATES, new_eagle3
from tests.support.mtp import FAMILIES as WITH_MTP
from tests.support.mtp import make_mtp
from tests.support.waiting import wait_until

MTP_NAMES = {family.kind: name for name, family in WITH_MTP.items()}
ROWS, TOKENS, GREEDY_TOKENS = 8, 24, 40
DTYPES = ("float32", "bfloat16")
TIE = 1e-4  # logits as close as this may swap by rounding
PLAIN = Endpoint("plain", "target", None, 0, decode=str)
Texts = list[list[int]]


class Family:
    """A family's tiny checkpoint, and what was loaded from it."""

    def __init__(self, name: str, folder: Path) -> None:
        """Raises ConfigError if it is refused."""
        self.name, self.folder = name, folder
        config = make_config(name)
        config.save_pretrained(folder)
        check_model(self.spec())
        self.whole: PreTrainedModel = make_model(config)
        save_model(name, self.whole, folder)
        self._runners = {"float32": load_runner(self.spec())}
        self._texts: dict[str, Texts] = {}

    def spec(self, **options: Any) -> ModelSpec:
        settings: dict[str, Any] = {
            "dtype": "float32",
            "slots": ROWS,
            "max_length": 96,
            "prefill_chunk": 16,
            "threads": 1,
        }
        return ModelSpec(**{"name": "m", "path": str(self.folder), "device": "cpu"} | settings | options)

    def runner(self, dtype: str) -> Runner:
        if dtype not in self._runners:
            self._runners[dtype] = load_runner(self.spec(dtype=dtype))
        return self._runners[dtype]

    def noisy(self, dtype: str) -> Runner:
        """Return a drafter: the model itself, changed a little so that some of its drafts are wrong."""
        runner = load_runner(self.spec(dtype=dtype))
        with torch.no_grad():
            layer: Any = runner.model.get_input_embeddings()
            layer.weight += 0.03 * torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(1))
        return runner

    def texts(self, dtype: str) -> Texts:
        """Return sampled texts of requests that run together, without drafts."""
        if dtype not in self._texts:
            with serving({"target": self.runner(dtype)}) as engine:
                self._texts[dtype] = texts(engine.generate(requests()))
        return self._texts[dtype]


@contextmanager
def serving(targets: dict[str, Runner], **options: Any) -> Iterator[Engine]:
    replicas: dict[str, tuple[Role, Runner]] = {name: ("target", runner) for name, runner in targets.items()}
    with Engine(replicas, LoopOptions(adaptive=False, prefill_chunk=16, **options)) as engine:
        yield engine
        engine.check()


def requests(endpoint: Endpoint = PLAIN, **params: Any) -> list[Request]:
    """Return requests whose prompts repeat themselves, and begin alike in pairs."""
    options: dict[str, Any] = {"temperature": 0.8, "max_tokens": TOKENS} | params
    stem = _tokens(18, ROWS)
    prompts = [[*stem[: 18 - 4 * (seed % 2)], *_tokens(3 + seed, seed) * 2] for seed in range(ROWS)]
    return [Request(endpoint, prompt, SamplingParams(seed=seed, **options)) for seed, prompt in enumerate(prompts)]


def _tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def texts(answers: Sequence[list[Delta]]) -> Texts:
    return [[token for delta in answer for token in delta.token_ids] for answer in answers]


def difference(actual: Texts, expected: Texts) -> str:
    """Say which texts differ, and from where on."""
    pairs = zip(actual, expected, strict=True)
    wrong = [
        next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))
        for pair in pairs
        if pair[0] != pair[1]
    ]
    return f"{len(wrong)} of {len(actual)} texts differ, from token {min(wrong)} on" if wrong else ""


def for_each_dtype(check: Callable[[Family, str], str]) -> Callable[[Family], str]:
    """Return a check of all types, given that of one."""

    def run(family: Family) -> str:
        reasons = {dtype: check(family, dtype) for dtype in DTYPES}
        return "; ".join(f"{dtype}: {reason}" for dtype, reason in reasons.items() if reason)

    return run


def compare_with_generate(model: Any, asked: Sequence[Request], answers: Texts) -> str:
    """Compare greedy texts up to a near-tie."""
    for row, (request, answer) in enumerate(zip(asked, answers, strict=True)):
        options = {"max_new_tokens": len(answer), "do_sample": False, "eos_token_id": None, "output_logits": True}
        expected = model.generate(torch.tensor([request.prompt]), return_dict_in_generate=True, **options)
        for step, (token, logits) in enumerate(zip(answer, expected.logits, strict=True)):
            gap = float(logits.max() - logits[0, token])
            if gap >= TIE:
                return f"text {row} differs at token {step}, by {gap:.2g} in its logit"
            if gap > 0:
                break
    return ""


def greedy(family: Family) -> str:
    asked = requests(temperature=0.0, max_tokens=GREEDY_TOKENS)
    with serving({"target": family.runner("float32")}) as engine:
        return compare_with_generate(family.whole, asked, texts(engine.generate(asked)))


def alone(family: Family, dtype: str) -> str:
    asked = requests()[:3]
    with serving({"target": family.runner(dtype)}) as engine:
        single = [texts(engine.generate([request]))[0] for request in asked]
    return difference(single, family.texts(dtype)[: len(asked)])


def drafts(family: Family, dtype: str) -> str:
    drafted = Endpoint("drafted", "target", "drafter", 4, decode=str, colocated=True)
    looked_up = Endpoint("ngram", "target", None, 4, decode=str, ngram=NgramOptions())
    reasons = []
    with serving({"target": family.runner(dtype)}, colocated=family.noisy(dtype)) as engine:
        for endpoint, acceptance in ((drafted, 1), (looked_up, 0)):
            answers = engine.generate(requests(endpoint))
            reasons.append(difference(texts(answers), family.texts(dtype)) or _drafted(answers, accepted=acceptance))
    return "; ".join(reason for reason in reasons if reason)


def _drafted(answers: Sequence[list[Delta]], *, accepted: int) -> str:
    statistics = [answer[-1].statistics for answer in answers]
    if not sum(each.drafted for each in statistics):
        return "nothing was drafted"
    if sum(each.accepted for each in statistics) < accepted:
        return "no draft was accepted"
    return ""


def heads(family: Family, dtype: str) -> str:
    """Heads with random weights, of another kind for each type."""
    runner = load_runner(family.spec(dtype=dtype), hidden_layers=STATES)
    proposer = _heads(dtype, runner)
    with serving({"target": runner}, heads=proposer) as engine:
        answers = engine.generate(requests(Endpoint("heads", "target", None, 4, decode=str, heads=proposer.kind)))
    return difference(texts(answers), family.texts(dtype)) or _drafted(answers, accepted=0)


def _heads(dtype: str, runner: Runner) -> HeadProposer:
    if dtype == "bfloat16":
        eagle3 = new_eagle3(runner.model).to(runner.model.dtype).eval().requires_grad_(False)
        return ChainProposer(eagle3, runner)
    config = runner.model.config
    medusa = MedusaHeads(3, 1, config.hidden_size, outputs=config.vocab_size).requires_grad_(False)
    assert medusa.output is not None
    medusa.output.normal_(std=0.15, generator=torch.Generator().manual_seed(0))
    return MedusaProposer(medusa, runner)


def mtp(family: Family, dtype: str) -> str:
    """An MTP layer with random weights, on a checkpoint of its own."""
    folder = family.folder / f"mtp-{dtype}"
    make_mtp(MTP_NAMES[family.name], folder)
    spec = family.spec(path=str(folder), dtype=dtype)
    runner, _, proposer = load_with_heads(spec, HeadsSpec(name="h", path=str(folder), kind="mtp", min_acceptance=0))
    with serving({"target": runner}, heads=proposer) as engine:
        plain = engine.generate(requests())
        answers = engine.generate(requests(Endpoint("mtp", "target", None, 4, decode=str, heads="mtp")))
    return difference(texts(answers), texts(plain)) or _drafted(answers, accepted=0)


def moved(family: Family, dtype: str) -> str:
    """A target is lost. The other has too few pages for all requests, so it preempts some."""
    targets = {"target": family.runner(dtype), "target#1": load_runner(family.spec(dtype=dtype, kv_tokens=192))}
    asked = [replace(request, timeline=Timeline()) for request in requests()]
    answers: list[list[Delta]] = [[] for _ in asked]
    with serving(targets) as engine:

        def take(answer: list[Delta], delta: Delta) -> None:
            if not any(answers):
                engine.lose("target")
            answer.append(delta)

        for request, answer in zip(asked, answers, strict=True):
            engine.coordinator.submit(request, partial(take, answer))
        wait_until(lambda: all(answer and answer[-1].finish for answer in answers), "all answers", timeout_s=300)
        if not engine.loops["target#1"].times.preemptions:
            return "no request was preempted"
    if not any(request.timeline and len(request.timeline.stays) > 1 for request in asked):
        return "no request moved"
    return difference(texts(answers), family.texts(dtype))


def beams(family: Family) -> str:
    asked = requests(temperature=0.0, max_tokens=12)[:1]
    with serving({"target": family.runner("float32")}) as engine:
        answers = texts(engine.generate([replace(request, beams=BeamOptions(num_beams=3)) for request in asked]))
    options = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    model: Any = family.whole
    expected = [model.generate(torch.tensor([request.prompt]), **options)[0] for request in asked]
    return difference(
        answers, [text[len(request.prompt) :].tolist() for request, text in zip(asked, expected, strict=True)]
    )


def quantised(family: Family, kind: Quantization) -> str:
    asked = requests(temperature=0.0)[:4]
    spec = family.spec(quantization=kind)
    with serving({"target": load_runner(spec)}) as engine:
        return compare_with_generate(load_model(spec), asked, texts(engine.generate(asked)))


def adapters(family: Family) -> str:
    folder = family.folder / "adapter"
    model = load_model(family.spec())
    adapted = save_adapter(folder, model, seed=1, target_modules=_adaptable(model))
    own = Adapter("own", str(folder), read_lora(str(folder)).version)
    plain, asked = (requests(replace(PLAIN, adapter=adapter), temperature=0.0)[:4] for adapter in (None, own))
    with serving({"target": load_runner(family.spec(adapters={"own": str(folder)}))}) as engine:
        answers = texts(engine.generate([*plain, *asked]))
    if answers[:4] == answers[4:]:
        return "it changes no text"
    return compare_with_generate(adapted, asked, answers[4:])


def _adaptable(model: PreTrainedModel) -> list[str]:
    """Return the names of linear layers that peft adapts by themselves, but those for logits."""
    inner = set(model.base_model.modules()) - {model.get_output_embeddings()}
    layers = (name for name, layer in model.named_modules() if layer in inner and isinstance(layer, nn.Linear | Conv1D))
    skipped = {"experts", "router", "dt_proj", "embed_tokens_extend", "kv_b_proj"}  # of own classes, or not called
    if any("experts" in name.split(".") for name, _ in model.named_modules()):
        skipped |= {"gate", "gate_proj", "up_proj", "down_proj"}  # peft takes those for the experts'
    if model.config.model_type in ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"):
        skipped |= {"out_proj"}  # peft refuses
    return [name for name in layers if not skipped & {*name.split(".")}]


CHECKS: dict[str, Callable[[Family], str]] = {
    "greedy": greedy,
    "alone": for_each_dtype(alone),
    "drafts": for_each_dtype(drafts),
    "heads": for_each_dtype(heads),
    "MTP": for_each_dtype(mtp),
    "moved": for_each_dtype(moved),
    "beams": beams,
    "int8": partial(quantised, kind="int8"),
    "nf4": partial(quantised, kind="nf4"),
    "adapters": adapters,
}


def checks_of(name: str) -> list[str]:
    """Return the names of the checks for a family."""
    return [label for label in CHECKS if label != "MTP" or name in MTP_NAMES]
