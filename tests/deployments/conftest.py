"""The HTTP routes over tiny random models in this process: no Ray, no server."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fastapi.testclient import TestClient
from transformers import LlamaConfig, LlamaForCausalLM

from deployments.admission.bounds import Limits
from deployments.configuration.config import TINY_CONFIG, load_config
from deployments.configuration.paths import ROOT
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.fake_coordinator import FakeCoordinator
from tests.deployments.scripted import TEMPLATE, Scripted

if TYPE_CHECKING:
    from actors.replica.in_process import Engine
    from actors.replica.roles import Role
    from engine.model.runner import Runner

MAX_REQUESTS = 8
TARGET = str(ROOT / "models" / "target")


def tiny_model(seed: int) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=2048,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=1024,
        )
        return LlamaForCausalLM(config)


def tiny_runner(seed: int) -> "Runner":
    from engine.model.runner import Runner

    return Runner(tiny_model(seed), slots=4, max_length=1024, max_query=256)


@pytest.fixture(scope="session")
def engine() -> "Iterator[Engine]":
    from actors.loops.options import LoopOptions
    from actors.replica.in_process import Engine
    from engine.loading.settings import load_tokenizer
    from engine.loading.tokenizers import structure_tokenizer

    replicas: dict[str, tuple[Role, Runner]] = {
        "target": ("target", tiny_runner(0)),
        "drafter": ("drafter", tiny_runner(1)),
    }
    options = LoopOptions(load_tokenizer=lambda: structure_tokenizer(load_tokenizer(TARGET), (2,)))
    with Engine(replicas, options) as engine:
        yield engine
        engine.check()


@pytest.fixture(scope="session")
def endpoints() -> dict[str, ServedEndpoint]:
    return load_endpoints(load_config(TINY_CONFIG))


@pytest.fixture(scope="session")
def service(engine: "Engine", endpoints: dict[str, ServedEndpoint]) -> Service:
    return Service(endpoints, engine.coordinator, limits=Limits(max_requests=MAX_REQUESTS))


@pytest.fixture(scope="session")
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(make_api(service)) as client:
        yield client


@pytest.fixture
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture
def fake(endpoints: dict[str, ServedEndpoint], coordinator: Any) -> Iterator[TestClient]:
    """A client of a server over the fake coordinator."""
    with TestClient(make_api(Service(endpoints, coordinator, limits=Limits(max_requests=MAX_REQUESTS)))) as client:
        yield client


@pytest.fixture
def with_tools() -> dict[str, ServedEndpoint]:
    endpoints = load_endpoints(load_config(TINY_CONFIG))
    endpoints["consort"].encoder.tokenizer.chat_template = TEMPLATE
    endpoints["consort"].token_decoder.tool_format = "hermes"
    return endpoints


@pytest.fixture
def scripted(with_tools: dict[str, ServedEndpoint]) -> Iterator[tuple[TestClient, Scripted]]:
    coordinator: Any = Scripted()
    with TestClient(make_api(Service(with_tools, coordinator))) as client:
        yield client, coordinator
