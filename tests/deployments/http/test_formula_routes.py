"""Formulas over HTTP: what the fields ask for, and what is refused."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fastapi.testclient import TestClient

from actors.coordinator.request import Term
from decoding.errors import ConfigError
from deployments.configuration.config import parse_config
from deployments.configuration.paths import ROOT
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.conftest import tiny_model
from tests.deployments.fake_coordinator import FakeCoordinator
from tests.deployments.scripted import TEMPLATE

if TYPE_CHECKING:
    from actors.replica.in_process import Engine

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "import"}
FIRST = {"weight": 1.5}


def serve(**endpoint: Any) -> dict[str, ServedEndpoint]:
    names = "target", "drafter", "member"
    data = {
        "models": {name: {"path": str(ROOT / "models" / name)} for name in names},
        "endpoints": {"consort": {"target": "target", **endpoint}, "rest": {"members": ["member", "drafter"]}},
    }
    served = load_endpoints(parse_config(data, folder=ROOT))
    served["consort"].encoder.tokenizer.chat_template = TEMPLATE
    return served


@pytest.fixture(scope="module")
def served() -> dict[str, ServedEndpoint]:
    return serve()


@pytest.fixture
def fake(served: dict[str, ServedEndpoint], coordinator: Any) -> Iterator[TestClient]:
    with TestClient(make_api(Service(served, coordinator))) as client:
        yield client


def complete(client: TestClient, **fields: Any) -> Any:
    body = {"model": "consort", "prompt": "import os", "max_tokens": 8, "temperature": 0, **fields}
    return client.post("/v1/completions", json=body)


def chat(client: TestClient, *messages: Any, **fields: Any) -> Any:
    body = {"model": "consort", "messages": messages, "max_tokens": 8, "temperature": 0, **fields}
    return client.post("/v1/chat/completions", json=body)


def test_a_guided_answer_is_that_of_plain_forwards(engine: "Engine", served: dict[str, ServedEndpoint]) -> None:
    model, prompt, negative = tiny_model(0), [5, 6, 7, 8], [9, 10]
    with TestClient(make_api(Service(served, engine.coordinator))) as client:
        fields = {"prompt": prompt, "negative_prompt": negative, "guidance_scale": 2.0, "return_token_details": True}
        (choice,) = complete(client, **fields).json()["choices"]
    answer: list[int] = []
    for _ in range(8):
        with torch.no_grad():
            texts = [[*prompt, *answer], [*negative, *answer]]
            own, other = (model(torch.tensor([text])).logits[0, -1].log_softmax(-1) for text in texts)
        answer.append(int((2 * own - other).argmax()))
    assert [detail["id"] for detail in choice["token_details"]] == answer
    assert [member["model"] for member in choice["token_details"][0]["members"]] == ["target", "prompt"]
    assert choice["ensemble"]["blend"] == "formula"
    assert [member["weight"] for member in choice["ensemble"]["members"]] == [2.0, -1.0]


def sent(coordinator: FakeCoordinator) -> tuple[Sequence[float], Sequence[Term]]:
    request = coordinator.requests[-1]
    return request.ensemble_options.blend.weights, list(request.members)


def own(name: str, tokens: Sequence[int]) -> Term:
    return Term(name=name, is_own=True, prompt=tuple(tokens))


def test_prompts_of_completions(
    fake: TestClient, coordinator: FakeCoordinator, served: dict[str, ServedEndpoint]
) -> None:
    encode = served["consort"].encoder.prompt
    assert complete(fake, guidance_scale=3).status_code == 200
    assert sent(coordinator) == ((3, -2), [own("without prompt", encode("import os")[-1:])])
    complete(fake, negative_prompt="def f")
    assert sent(coordinator) == ((1.5, -0.5), [own("prompt", encode("def f"))])
    complete(fake, formula={"terms": [FIRST, {"weight": -1, "prompt": [4, 5]}, {"weight": 0.5, "prompt": "x"}]})
    assert sent(coordinator) == ((1.5, -1, 0.5), [own("prompt", [4, 5]), own("prompt", encode("x"))])
    complete(fake, guidance_scale=1)
    assert sent(coordinator)[1] == []


def test_prompts_of_conversations(
    fake: TestClient, coordinator: FakeCoordinator, served: dict[str, ServedEndpoint]
) -> None:
    def encode(*messages: Any) -> list[int]:
        text = served["consort"].encoder.tokenizer.apply_chat_template(list(messages), tokenize=False)
        return served["consort"].encoder.text(str(text), "messages", add_special_tokens=False)

    assert chat(fake, SYSTEM, USER, guidance_scale=2).status_code == 200
    assert sent(coordinator) == ((2, -1), [own("without system", encode(USER))])
    chat(fake, SYSTEM, USER, guidance_scale=2, negative_prompt="Ramble.")
    assert sent(coordinator)[1] == [own("system", encode({**SYSTEM, "content": "Ramble."}, USER))]
    other = {"role": "user", "content": "def"}
    chat(fake, SYSTEM, USER, formula={"terms": [FIRST, {"weight": -0.5, "messages": [other]}]})
    assert sent(coordinator)[1] == [own("messages", encode(other))]
    body = {"model": "consort", "input": "import", "instructions": "Be brief.", "max_output_tokens": 8}
    assert fake.post("/v1/responses", json={**body, "guidance_scale": 2}).status_code == 200
    assert sent(coordinator)[1] == [own("without system", encode(USER))]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guidance_scale": 1000}, "guidance_scale: should be less than or equal to 100"),
        ({"guidance_scale": 2, "formula": {"terms": [FIRST]}}, "guidance_scale: has no place beside formula"),
        ({"formula": {}}, "formula.terms: is required, or else kind"),
        ({"formula": {"kind": "guidance", "amateur": "x"}}, "formula.amateur: is not for guidance; its keys are scale"),
        ({"formula": {"kind": "proxy", "expert": "x"}}, "formula.anti_expert: is required"),
        ({"formula": {"terms": [{"weight": 1, "prompt": "x"}]}}, "formula.terms.0: should be the request's own prompt"),
        ({"formula": {"terms": [FIRST, {"weight": 1}]}}, "formula.terms.1: reads what the first term does; add up"),
        ({"formula": {"terms": [{"weight": 0}]}}, "formula.terms: should have a weight that is not 0"),
        (
            {"formula": {"terms": [FIRST, {"weight": 1, "model": "membr"}]}},
            "formula.terms.1.model: 'membr' is no model",
        ),
        ({"formula": {"terms": [FIRST, {"weight": 1, "system": "x"}]}}, "formula.terms.1.system: is for conversations"),
        (
            {"formula": {"terms": [FIRST, {"weight": 1, "prompt": "x", "without": "prompt"}]}},
            "formula.terms.1.without: has no place beside prompt",
        ),
        ({"formula": {"terms": [FIRST, {"weight": 1, "prompt": [3000]}]}}, "formula.terms.1: 3000 is no token id"),
        ({"negative_prompt": ""}, "negative_prompt: should not be empty"),
        ({"negative_prompt": [3000]}, "negative_prompt: 3000 is no token id"),
        ({"negative_prompt": [1] * 2000}, "negative_prompt: has 2000 tokens, but should have 1 to"),
        (
            {"negative_prompt": [1] * 250, "max_tokens": 2000},
            "negative_prompt and max_tokens: 250 + 2000 tokens don't fit",
        ),
        (
            {"formula": {"terms": [FIRST, {"weight": 1, "prompt": [1] * 250}]}, "max_tokens": 2000},
            "formula.terms.1 and max_tokens: 250 + 2000 tokens don't fit",
        ),
        ({"guidance_scale": 2, "use_beam_search": True}, "guidance_scale: has no place in a beam search"),
        ({"guidance_scale": 2, "model": "rest"}, "guidance_scale: the model 'rest' blends its members"),
    ],
)
def test_what_is_refused(fake: TestClient, fields: Any, message: str) -> None:
    answer = complete(fake, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guidance_scale": 2}, "guidance_scale: leaves nothing out: the conversation has no system message"),
        ({"formula": {"kind": "context_aware"}}, "formula: leaves nothing out: the conversation has no documents"),
        ({"negative_prompt": "much " * 9000}, "negative_prompt: messages: "),
    ],
)
def test_a_conversation_that_a_term_can_t_read(fake: TestClient, fields: Any, message: str) -> None:
    assert chat(fake, USER, **fields).json()["error"]["message"].startswith(message)


def test_the_endpoint_s_own_formula_and_its_models(coordinator: Any) -> None:
    """Proxy tuning (Liu et al., arXiv 2401.08565), of which a request takes another sum or none."""
    served = serve(formula={"kind": "proxy", "expert": "member", "anti_expert": "drafter"})
    with TestClient(make_api(Service(served, coordinator))) as client:
        assert complete(client).status_code == 200
        assert sent(coordinator) == ((1, 1, -1), [Term(name="member"), Term(name="drafter")])
        complete(client, formula={"kind": "contrastive", "amateur": "drafter", "scale": 1})
        assert sent(coordinator) == ((2, -1), [Term(name="drafter")])
        assert coordinator.requests[-1].ensemble_options.blend.alpha == 0.1
        complete(client, formula={"kind": "average", "models": ["member"]})
        assert sent(coordinator) == ((0.5, 0.5), [Term(name="member")])
        twice = [FIRST, {"weight": 1, "model": "member"}, {"weight": 1, "model": "member", "prompt": "x"}]
        error = complete(client, formula={"terms": twice}).json()["error"]
        assert error["message"].startswith("formula.terms.2: 'member' has a term already")
        complete(client, formula={"terms": [FIRST]})
        assert sent(coordinator)[1] == []


def test_layers_are_kept_for_the_formulas_of_endpoints(coordinator: Any) -> None:
    """DoLa (Chuang et al., arXiv 2309.03883)."""
    formula = {"kind": "dola", "layers": [0, 2]}
    data: Any = {
        "models": {"target": {"path": str(ROOT / "models" / "target")}},
        "endpoints": {"consort": {"target": "target", "formula": formula}, "plain": {"target": "target"}},
    }
    config = parse_config(data, folder=ROOT)
    assert config.models["target"].spec("target").early_exits == (0, 2)
    with TestClient(make_api(Service(load_endpoints(config), coordinator))) as client:
        complete(client)
    assert sent(coordinator) == ((1, -1), [Term(name="layers [0, 2]", is_own=True, layers=(0, 2))])
    data["endpoints"]["plain"]["heads"] = {"path": "x", "kind": "eagle3"}
    with pytest.raises(ConfigError, match=r"consort.formula: 'target' has heads, .* remove endpoints.plain.heads"):
        parse_config(data, folder=ROOT)


@pytest.mark.parametrize("source", ["template", "message"])
def test_documents_are_read_and_left_out(coordinator: Any, source: str) -> None:
    """Context-aware decoding: (1 + s) · with documents − s · without (Shi et al., arXiv 2305.14739)."""
    served = serve()
    tokenizer = served["consort"].encoder.tokenizer
    if source == "template":
        tokenizer.chat_template = "{% for d in documents or [] %}<{{ d.title }}>{{ d.text }}{% endfor %}" + TEMPLATE
        expected = f"<sea>It is cold.{tokenizer.apply_chat_template([USER], tokenize=False)}"
    else:
        turn = {**USER, "content": "Document 1: sea\nIt is cold.\n\nimport"}
        expected = str(tokenizer.apply_chat_template([turn], tokenize=False))
    without = str(tokenizer.apply_chat_template([USER], tokenize=False))
    documents = [{"title": "sea", "text": "It is cold."}]
    with TestClient(make_api(Service(served, coordinator))) as client:
        answer = chat(client, USER, documents=documents, formula={"kind": "context_aware", "scale": 1})
    assert answer.status_code == 200
    encoder = served["consort"].encoder
    prompts = [encoder.text(text, "messages", add_special_tokens=False) for text in (expected, without)]
    assert list(coordinator.requests[-1].prompt) == prompts[0]
    assert sent(coordinator) == ((2, -1), [own("without documents", prompts[1])])


def test_documents_are_no_field_of_completions(fake: TestClient) -> None:
    message = complete(fake, documents=[{"text": "x"}]).json()["error"]["message"]
    assert message.startswith("documents: is not supported")


def test_documents_without_a_message_of_the_user_are_refused(fake: TestClient) -> None:
    answer = chat(fake, SYSTEM, documents=[{"text": "x"}])
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("documents: are read before a message of the user")
