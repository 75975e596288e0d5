"""Endpoints: vocabularies, EOS ids, chat templates."""

import asyncio
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from decoding.drafts.options import NgramOptions
from decoding.errors import ConfigError, InvalidRequestError
from deployments.apis.chat.request import ChatRequest
from deployments.apis.completions.request import CompletionRequest
from deployments.configuration.config import TINY_CONFIG, ServerConfig, load_config
from deployments.configuration.endpoint import EndpointConfig
from deployments.configuration.paths import ROOT
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.loading import load_endpoints

BUNDLED = ROOT / "models" / "drafter"


def with_drafter(folder: Path) -> ServerConfig:
    config = load_config(TINY_CONFIG)
    config.models["drafter"].path = str(folder)
    return config


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy the bundled drafter without its weights."""
    return Path(shutil.copytree(BUNDLED, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors")))


def test_tokens_are_decoded_as_the_tokenizer_does() -> None:
    served = load_endpoints(load_config(TINY_CONFIG))["consort"]
    rng = random.Random(1)
    for _ in range(200):
        tokens = [rng.randrange(2048) for _ in range(rng.randrange(12))] + [2]
        expected = served.encoder.tokenizer.decode(tokens, skip_special_tokens=True)
        assert served.endpoint.decode(tokens) == expected


def test_a_tokenizer_that_tidies_up_is_asked_itself(copy: Path) -> None:
    settings = json.loads((copy / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings |= {
        "clean_up_tokenization_spaces": True,
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
    }
    (copy / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = load_config(TINY_CONFIG)
    config.models["target"].path = str(copy)
    served = load_endpoints(config)["consort"]
    tokenizer = served.encoder.tokenizer
    tokens = tokenizer("so , we are n't").input_ids
    assert served.endpoint.decode(tokens) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_the_bundled_endpoint() -> None:
    endpoint = load_endpoints(load_config(TINY_CONFIG))["consort"]
    assert endpoint.context_length == 1024  # the bundled models' positions
    assert endpoint.token_decoder.size == 2048
    assert endpoint.eos_token_ids == (2,)
    (request,) = endpoint.prepare(CompletionRequest(model="consort", prompt=["x"]), seed=1)
    assert request.prompt == endpoint.encoder.tokenizer("x").input_ids


def test_a_drafter_with_another_vocabulary_drafts_through_text(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[names[0]], vocabulary[names[1]] = vocabulary[names[1]], vocabulary[names[0]]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": 2050}), encoding="utf-8")
    assert load_endpoints(with_drafter(copy))["consort"].token_decoder.size == 2048
    (line,) = caplog.messages
    assert line.startswith("endpoints.consort: drafter drafts for target through text: 2048 of 2048 token strings are")
    assert "2046 with the same id" in line


def test_a_drafter_whose_texts_the_target_cannot_write_is_refused(copy: Path) -> None:
    config = load_config(TINY_CONFIG)
    digits = Tokenizer(WordLevel({"[UNK]": 0} | {str(i): 1 + i for i in range(10)}, unk_token="[UNK]"))
    digits.save(str(copy / "tokenizer.json"))
    config.models["target"].path = str(copy)
    with pytest.raises(
        ConfigError, match=r"endpoints\.consort\.drafter: 'drafter' can't draft for 'target': .* can write only"
    ):
        load_endpoints(config)


def test_a_folder_without_a_tokenizer_is_refused(copy: Path) -> None:
    for file in copy.glob("token*"):
        file.unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        load_endpoints(with_drafter(copy))


def test_every_eos_id_ends_an_answer(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"eos_token_id": [2, 5, 7]}', encoding="utf-8")
    config = with_drafter(copy)
    config.models["target"].path = str(copy)
    assert load_endpoints(config)["consort"].eos_token_ids == (2, 5, 7)
    (copy / "generation_config.json").unlink()
    header = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    for named, expected in ([], (2,)), (7, (2, 7)), ([7, 5], (2, 5, 7)):  # the tokenizer's is 2
        (copy / "config.json").write_text(json.dumps(header | {"eos_token_id": named or None}), encoding="utf-8")
        assert load_endpoints(config)["consort"].eos_token_ids == expected


def test_end_tokens_that_no_model_can_write_are_left_out(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    (copy / "generation_config.json").write_text('{"eos_token_id": [5, 99999, -1]}', encoding="utf-8")
    config = with_drafter(copy)
    config.models["target"].path = str(copy)
    served = load_endpoints(config)["consort"]
    assert served.eos_token_ids == (2, 5)
    assert "can't write: [-1, 99999]" in caplog.text
    structured = completion(structured_outputs={"choice": ["yes"]})
    (request,) = served.prepare(structured, seed=1)
    assert request.params.structure is not None
    asyncio.run(served.structures.check(request.params.structure, field="structured_outputs"))


def test_the_longest_answer_that_a_checkpoint_recommends_is_the_default(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"max_new_tokens": 40}', encoding="utf-8")
    config = with_drafter(copy)
    config.models["target"].path = str(copy)
    served = load_endpoints(config)["consort"]
    (asked,) = served.prepare(chat(), seed=1)
    assert asked.params.max_tokens == 40
    (asked,) = served.prepare(chat().model_copy(update={"max_tokens": 50}), seed=1)
    assert asked.params.max_tokens == 50
    (asked,) = served.prepare(completion(), seed=1)
    assert asked.params.max_tokens == CompletionRequest.default_max_tokens
    config.endpoints["consort"].generation_config = False
    (asked,) = load_endpoints(config)["consort"].prepare(chat(), seed=1)
    assert asked.params.max_tokens == served.context_length - len(asked.prompt)


def chat() -> ChatRequest:
    return ChatRequest.model_validate({"model": "consort", "messages": [{"role": "user", "content": "x"}]})


def test_a_model_without_a_template_can_not_chat(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    config = with_drafter(copy)
    config.models["target"].path = str(copy)
    with pytest.raises(InvalidRequestError, match="has no chat template"):
        load_endpoints(config)["consort"].prepare(chat(), seed=1)


def test_what_a_template_refuses_is_the_clients_to_mend(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{{ raise_exception('no user turns') }}", encoding="utf-8")
    config = with_drafter(copy)
    config.models["target"].path = str(copy)
    with pytest.raises(InvalidRequestError, match="refuses them: no user turns"):
        load_endpoints(config)["consort"].prepare(chat(), seed=1)


def completion(**fields: object) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "consort", "prompt": "x", **fields})


def served(**fields: object) -> ServedEndpoint:
    config = load_config(TINY_CONFIG)
    config.endpoints["consort"] = EndpointConfig.model_validate({"target": "target", "drafter": "drafter", **fields})
    return load_endpoints(config)["consort"]


def ends_here(tokens: Sequence[int], text: str) -> bool:
    return len(tokens) >= 3


def test_what_an_endpoint_sets_is_what_requests_leave_open() -> None:
    endpoint = served(
        defaults={"temperature": 0.2, "bad_words": ["import"]},
        verification="rejection",
        timeout_s=9,
        ngram={"max_tokens": 3},
        stopping=[f"{__name__}:ends_here"],
    )
    (request,) = endpoint.prepare(completion(), seed=1)
    assert (request.params.temperature, request.params.verification, request.timeout_s) == (0.2, "rejection", 9)
    assert request.params.bad_words_ids
    assert request.endpoint.ngram == NgramOptions(longest=3)
    assert [rule([1, 2, 3], "") for rule in request.endpoint.criteria] == [True]
    own = completion(temperature=1, bad_words=[], verification="coupled", timeout_s=3)
    (request,) = endpoint.prepare(own, seed=1)
    assert (request.params.temperature, request.params.verification, request.timeout_s) == (1, "coupled", 3)
    assert request.params.bad_words_ids == ()


@pytest.mark.parametrize("path", ["nowhere:rule", f"{__name__}:nothing", f"{__name__}:BUNDLED"])
def test_a_rule_that_can_not_be_loaded_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match=r"endpoints\.consort\.stopping: .*" + path):
        served(stopping=[path])


def test_a_checkpoints_own_advice_is_followed_unless_switched_off(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"do_sample": true, "top_k": 7, "eos_token_id": 2}', encoding="utf-8")
    config = with_drafter(copy)
    config.models["target"].path = str(copy)
    (request,) = load_endpoints(config)["consort"].prepare(completion(), seed=1)
    assert request.params.top_k == 7
    (request,) = load_endpoints(config)["consort"].prepare(completion(top_k=0), seed=1)
    assert request.params.top_k == 0
    config.endpoints["consort"].generation_config = False
    (request,) = load_endpoints(config)["consort"].prepare(completion(), seed=1)
    assert request.params.top_k == 0


def test_bad_words_are_spelt_at_the_beginning_and_after_a_space() -> None:
    encoder = served().encoder
    spellings = encoder.words(["import", "\n"])
    assert tuple(encoder.text("import", "prompt", add_special_tokens=False)) in spellings
    assert tuple(encoder.text(" import", "prompt", add_special_tokens=False)) in spellings
    assert tuple(encoder.text("\n", "prompt", add_special_tokens=False)) in spellings


def test_a_text_that_can_not_be_encoded_is_refused() -> None:
    """A chat template can make one of a call's arguments, which are JSON in a string."""
    with pytest.raises(InvalidRequestError, match="messages: should be valid Unicode"):
        served().encoder.text("\ud83d", "messages", add_special_tokens=False)
