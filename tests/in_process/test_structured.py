"""Structured answers of the bundled pair: valid, the same with drafts and without, the same as masked `generate`."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from actors.coordinator.request import Delta, Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from actors.wire.link import Link
from decoding.errors import ConsortError, InvalidRequestError
from decoding.grammars.grammar import Grammar
from decoding.grammars.structure import StructureState
from decoding.sampling.params import SamplingParams, Structure, StructureKind
from engine.loading.tokenizers import structure_tokenizer
from engine.model.runner import Runner
from tests.support import reference
from tests.support.adversary import AdversarialDrafter
from tests.support.structures import unpacked

pytestmark = pytest.mark.timeout(180)  # requests to a dead loop never end
MODELS = Path("models")
EOS = 2
TOKENIZER = AutoTokenizer.from_pretrained(MODELS / "target")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 10}, "zip": {"pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "tags", "address"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"anyOf": [{"type": "boolean"}, {"type": "number", "minimum": -1, "maximum": 1}]},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
FUNCTION = "def [a-z_]{1,12}\\([a-z]{0,8}\\):\\n    return [a-z0-9 +*]{1,20}\\n"
SUM = 'start: NUMBER (("+" | "*") NUMBER){1,6}\nNUMBER: /[1-9][0-9]{0,2}/'
CHOICES = ["yes", "no", "yes and no", "it depends, as so often, on what is meant"]


def validates(schema: object) -> Callable[[str], bool]:
    return lambda text: jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


CASES: list[tuple[StructureKind, str, Callable[[str], bool]]] = [
    ("json", json.dumps(PERSON), validates(PERSON)),
    ("json", json.dumps(TREE), validates(TREE)),
    ("regex", FUNCTION, lambda text: re.fullmatch(FUNCTION, text) is not None),
    ("choice", json.dumps(CHOICES), lambda text: text in CHOICES),
    ("grammar", SUM, lambda text: isinstance(eval(text), int)),
]


def load(name: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return load("target")


@contextmanager
def running(target: PreTrainedModel, drafter: PreTrainedModel) -> Iterator[Engine]:
    """An engine that always verifies drafts, even if they don't pay."""

    def runner(model: PreTrainedModel) -> Runner:
        return Runner(model, slots=16, max_length=512, max_query=256)

    replicas: dict[str, tuple[Role, Runner]] = {
        "target": ("target", runner(target)),
        "drafter": ("drafter", runner(drafter)),
    }
    options = LoopOptions(adaptive=False, load_tokenizer=lambda: structure_tokenizer(TOKENIZER))
    with Engine(replicas, options) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(target: PreTrainedModel) -> Iterator[Engine]:
    with running(target, load("drafter")) as engine:
        yield engine


def params(case: int, temperature: float = 0.0, **options: object) -> SamplingParams:
    kind, definition, _ = CASES[case % len(CASES)]
    structure = Structure(kind=kind, definition=definition)
    common = SamplingParams(max_tokens=120, temperature=temperature, eos_token_ids=(EOS,), structure=structure)
    return replace(common, seed=100 + case, **options)  # type: ignore[arg-type]


def prompts(count: int) -> list[list[int]]:
    lines = (MODELS / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [TOKENIZER(json.loads(line)["prompt"]).input_ids for line in lines[:count]]


def requests(wanted: Sequence[SamplingParams], *, speculate: bool = True) -> list[Request]:
    endpoint = Endpoint("test", "target", "drafter", 4, lambda ids: str(TOKENIZER.decode(ids)))
    pairs = zip(prompts(len(wanted)), wanted, strict=True)
    return [Request(endpoint, prompt, setting, speculate=speculate) for prompt, setting in pairs]


def answers(engine: Engine, wanted: Sequence[SamplingParams], *, speculate: bool = True) -> list[list[Delta]]:
    return engine.generate(requests(wanted, speculate=speculate))


def tokens(answer: list[Delta]) -> list[int]:
    return [token for delta in answer for token in delta.token_ids]


def is_complete(structure: Structure, answer: list[Delta]) -> bool:
    """Check the answer. Returns whether it is complete; an incomplete one may still become valid."""
    written = tokens(answer)
    if answer[-1].finish == "stop":
        assert written[-1] == EOS
        (is_right,) = [
            right for kind, definition, right in CASES if Structure(kind=kind, definition=definition) == structure
        ]
        assert is_right(str(TOKENIZER.decode(written[:-1])))
        return True
    matcher = Grammar(structure, structure_tokenizer(TOKENIZER)).matcher()
    assert matcher.try_consume_tokens(written) == len(written)
    return False


MIXES = {
    "greedy": [params(case) for case in range(len(CASES))],
    "sampled": [params(case, 1.0) for case in range(len(CASES))],
    "mixed": [
        params(0, 0.7, top_p=0.9),
        params(1, 1.0, repetition_penalty=1.1),
        params(2, 0.0, presence_penalty=0.5),
        replace(params(3, 1.0), structure=None, max_tokens=30),
        params(4, 1.0, top_k=20),
        params(0, 1.0, min_p=0.05),
        replace(params(6), structure=None, max_tokens=30),
        params(2, 0.8, frequency_penalty=0.3, no_repeat_ngram_size=4),
    ],
}


@pytest.mark.parametrize("mix", MIXES)
def test_drafts_change_nothing(engine: Engine, mix: str) -> None:
    wanted = MIXES[mix]
    drafted = answers(engine, wanted)
    plain = answers(engine, wanted, speculate=False)
    assert [tokens(answer) for answer in drafted] == [tokens(answer) for answer in plain]
    assert sum(answer[-1].statistics.accepted for answer in plain) == 0
    assert sum(answer[-1].statistics.accepted for answer in drafted) > 2 * len(wanted)
    complete = [
        is_complete(setting.structure, answer)
        for setting, answer in zip(wanted, drafted, strict=True)
        if setting.structure is not None
    ]
    assert sum(complete) >= len(complete) / 2


class Mask(LogitsProcessor):
    """Allows what a fresh matcher allows after the answer so far."""

    def __init__(self, structure: Structure, prompt_length: int) -> None:
        self._grammar = Grammar(structure, structure_tokenizer(TOKENIZER))
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        matcher = self._grammar.matcher()
        assert matcher.consume_tokens(input_ids[0, self._prompt_length :].tolist())
        allowed = unpacked(torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32))
        return scores.masked_fill(~allowed[: scores.shape[-1]], -torch.inf)


def test_wrong_drafts_change_nothing(engine: Engine, target: PreTrainedModel) -> None:
    wanted = [params(case, case % 2) for case in range(10)]
    asked = requests(wanted)
    plain = answers(engine, wanted, speculate=False)
    texts = {
        request.request_id: [*request.prompt, *tokens(answer)] for request, answer in zip(asked, plain, strict=True)
    }

    def adversary(runner: Runner, link: Link, options: LoopOptions) -> AdversarialDrafter:
        return AdversarialDrafter(link, texts, vocab_size=runner.vocab_size, seed=1)

    with mock.patch("actors.replica.roles.Drafter", adversary), running(target, target) as adversarial:
        drafted = adversarial.generate(asked)
    assert [tokens(answer) for answer in drafted] == [tokens(answer) for answer in plain]
    assert sum(answer[-1].statistics.drafted for answer in drafted) > len(drafted)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_those_of_masked_generate(engine: Engine, target: PreTrainedModel, temperature: float) -> None:
    wanted = [params(case, temperature) for case in range(len(CASES))]
    results = answers(engine, wanted)
    for prompt, setting, answer in zip(prompts(len(wanted)), wanted, results, strict=True):
        assert setting.structure is not None
        processors = [Mask(setting.structure, len(prompt)), reference.ProcessRows([setting], [0])]
        output = target.generate(  # type: ignore[operator]
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=setting.max_tokens,
            eos_token_id=EOS,
            logits_processor=LogitsProcessorList(processors),
        )
        assert tokens(answer) == output[0, len(prompt) :].tolist()


def test_rejection_sampling_keeps_to_the_structure(engine: Engine) -> None:
    wanted = [params(case, 0.8, verification="rejection") for case in range(len(CASES))]
    results = answers(engine, wanted)
    assert sum(answer[-1].statistics.accepted for answer in results) > len(results)
    complete = [
        is_complete(setting.structure, answer)
        for setting, answer in zip(wanted, results, strict=True)
        if setting.structure
    ]
    assert sum(complete) >= len(complete) / 2


def test_a_structure_that_asks_for_too_much_fails_alone(engine: Engine) -> None:
    """Its lexer hits a limit during generation; the other requests of the batch are served."""
    heavy = Structure(kind="regex", definition="(foo|bar|[a-z]{3,900}){5000}")
    wanted = [params(0), replace(params(1, 1.0), structure=heavy, max_tokens=300), params(2)]
    streams = [engine.stream(request) for request in requests(wanted)]
    begun = [[next(stream)] for stream in streams]
    with pytest.raises(ConsortError, match=r"structured_outputs\.regex: too complex"):
        list(streams[1])
    others = answers(engine, [wanted[0], replace(wanted[1], structure=None), wanted[2]])
    assert [tokens([*begun[index], *streams[index]]) for index in (0, 2)] == [tokens(others[index]) for index in (0, 2)]


@pytest.mark.parametrize("method", ["masks", "prune"])
def test_a_fault_of_the_engine_fails_the_requests_that_it_meets_and_no_others(engine: Engine, method: str) -> None:
    endpoint = Endpoint("e", "target", "drafter", 4, decode=str)
    plain = Request(endpoint, TOKENIZER("def ").input_ids, SamplingParams(max_tokens=30, temperature=0))
    name = {"masks": "_compute", "prune": "_prune"}[method]
    with mock.patch.object(StructureState, name, side_effect=RuntimeError("out of order")):
        other = engine.stream(plain)
        first = next(other)
        with pytest.raises(InvalidRequestError, match="out of order"):
            engine.generate([Request(endpoint, plain.prompt, params(0, max_tokens=30))])
        assert [first, *other][-1].finish == "length"
