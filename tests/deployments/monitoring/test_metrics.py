"""/metrics: names that vLLM's dashboards know, and numbers that are right. The answers are made up."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from actors.coordinator.request import Delta, Request, Statistics
from actors.wire.messages import Token
from decoding.errors import UnavailableError
from decoding.sampling.params import SamplingParams
from deployments.admission.bounds import Limits
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.live_metrics import exposition, with_coordinator
from deployments.http.routes import make_api
from deployments.monitoring.metrics import Metrics, Outcome
from tests.deployments.fake_coordinator import FakeCoordinator, answer

_USUAL = ("model_name", "engine", "coordinator")
BODY = {"model": "consort", "prompt": "import os", "max_tokens": 12, "seed": 1}


def samples(client: TestClient) -> dict[str, float]:
    """By name, and by labels where there are others than the usual ones."""
    values = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            if not sample.name.startswith("vllm:"):
                continue
            assert sample.labels["model_name"] == "consort"
            others = [value for name, value in sample.labels.items() if name not in _USUAL]
            values[":".join([sample.name, *others])] = sample.value
    return values


def test_an_answer_is_counted(fake: TestClient) -> None:
    answers = [fake.post("/v1/completions", json={**BODY, "seed": seed}).json() for seed in range(3)]
    seen = samples(fake)
    total = {name: sum(answer["speculation"][name] for answer in answers) for name in ("steps", "drafted", "accepted")}
    assert seen["vllm:spec_decode_num_drafts_total"] == total["steps"]
    assert seen["vllm:spec_decode_num_draft_tokens_total"] == total["drafted"]
    assert seen["vllm:spec_decode_num_accepted_tokens_total"] == total["accepted"]
    by_place = [seen.get(f"vllm:spec_decode_num_accepted_tokens_per_pos_total:{position}", 0) for position in range(4)]
    assert sum(by_place) == total["accepted"]
    assert by_place == sorted(by_place, reverse=True)
    assert seen["vllm:generation_tokens_total"] == 36
    assert seen["vllm:prompt_tokens_total"] == sum(answer["usage"]["prompt_tokens"] for answer in answers)
    assert seen["vllm:request_success_total:length"] == 3
    assert seen["vllm:time_to_first_token_seconds_count"] == 3
    assert seen["vllm:request_queue_time_seconds_count"] == 3
    assert seen["vllm:e2e_request_latency_seconds_count"] == 3
    assert seen["vllm:inter_token_latency_seconds_count"] == total["steps"] - 3
    assert (seen["vllm:num_requests_running"], seen["vllm:num_requests_waiting"]) == (0, 0)


def test_nothing_is_counted_before_the_first_request(fake: TestClient) -> None:
    seen = samples(fake)
    idle = {"vllm:num_requests_running": 0, "vllm:num_requests_waiting": 0}
    target = {"vllm:engine_sleep_state:awake": 1, "vllm:cache_config_info:16:True:8": 1}
    target |= dict.fromkeys((f"vllm:engine_sleep_state:{state}" for state in ("weights_offloaded", "discard_all")), 0)
    target |= dict.fromkeys((f"vllm:num_requests_waiting_by_reason:{why}" for why in ("capacity", "deferred")), 0)
    assert seen == {**idle, **target, "vllm:kv_cache_usage_perc": 0.5}  # of other coordinators' requests


def test_what_vllms_dashboards_read_is_there(endpoints: dict[str, ServedEndpoint]) -> None:
    """After one request, as in vLLM's own test of its metrics."""
    coordinator: Any = FakeCoordinator()
    metrics = Metrics(context_length=1024)
    service = Service(endpoints, coordinator, metrics=metrics)
    with TestClient(make_api(service)) as client:
        client.post("/v1/completions", json=BODY).raise_for_status()
        metrics.record_step("consort", 9)  # as the real coordinator does
        lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    wanted = json.loads((Path(__file__).parent / "vllm_series.json").read_text())
    missing = {source: set(names) - {line.partition("{")[0] for line in lines} for source, names in wanted.items()}
    del missing["source"]
    assert not any(missing.values()), missing
    of_one_engine = [line for line in lines if line.startswith("vllm:")]
    assert all('model_name="consort"' in line and 'engine="0"' in line for line in of_one_engine)


def test_choices_are_counted_by_prompt(endpoints: dict[str, ServedEndpoint]) -> None:
    coordinator: Any = FakeCoordinator()
    service = Service(endpoints, coordinator, metrics=Metrics(context_length=1024))
    with TestClient(make_api(service)) as client:
        client.post("/v1/completions", json={**BODY, "prompt": ["a", "a"], "n": 3}).raise_for_status()
        client.post("/v1/completions", json={**BODY, "max_tokens": 30}).raise_for_status()
        seen = samples(client)
    count, total, limits = (
        "vllm:request_params_n",
        "vllm:request_max_num_generation_tokens",
        "vllm:request_params_max_tokens",
    )
    assert (seen[f"{count}_count"], seen[f"{count}_sum"]) == (3, 7)
    assert (seen[f"{total}_count"], seen[f"{total}_sum"]) == (3, 12 + 12 + 30)
    assert (seen[f"{limits}_count"], seen[f"{limits}_sum"]) == (7, 6 * 12 + 30)
    assert [bound for bound in ("10", "20", "1000", "5000") if f"{limits}_bucket:{bound}.0" in seen] == [
        "10",
        "20",
        "1000",
    ]


def test_a_prompts_tokens_are_counted_by_where_they_came_from(endpoints: dict[str, ServedEndpoint]) -> None:
    metrics = Metrics()
    request = Request(endpoints["consort"].endpoint, list(range(10)), SamplingParams(max_tokens=3))
    metrics.record_arrival([request])
    metrics.record_start(request)
    for tokens in (1, 2):
        metrics.record_delta(request, Delta("x", [Token(7)], Statistics(committed=tokens, cached=6)))
    samples = [sample for family in metrics.families() for sample in family.samples]
    seen = {(sample.name.removeprefix("vllm:"), sample.labels.get("source")): sample.value for sample in samples}
    assert seen["prompt_tokens_by_source_total", "local_compute"] == 4
    assert seen["prompt_tokens_by_source_total", "local_cache_hit"] == 6
    assert seen["prompt_tokens_cached_by_source_total", "device"] == seen["prompt_tokens_cached_total", None] == 6
    assert seen["request_prefill_kv_computed_tokens_sum", None] == 4
    assert seen["request_prefill_kv_computed_tokens_count", None] == 1


def test_preemptions_are_counted(endpoints: dict[str, ServedEndpoint]) -> None:
    metrics = Metrics()
    request = Request(endpoints["consort"].endpoint, [5, 6], SamplingParams(max_tokens=3))
    metrics.record_arrival([request])
    metrics.record_start(request)
    (family,) = (family for family in metrics.families() if family.name == "vllm:num_preemptions")
    assert [sample.value for sample in family.samples if sample.name.endswith("_total")] == [0]  # so that it can rise
    for count in (0, 2, 2, 3):
        metrics.record_delta(request, Delta("x", [Token(7)], Statistics(committed=1, preemptions=count)))
    (family,) = (family for family in metrics.families() if family.name == "vllm:num_preemptions")
    assert [sample.value for sample in family.samples if sample.name.endswith("_total")] == [3]


def test_replicas_and_the_process_are_shown(fake: TestClient) -> None:
    lines = fake.get("/metrics").text.splitlines()
    assert 'consort:replica_rows{model="target",replica="target-0",role="target"} 2.0' in lines
    assert 'consort:replica_slots{model="target",replica="target-0",role="target"} 4.0' in lines
    assert 'consort:replica_drafting{model="target",replica="target-0",role="target"} 1.0' in lines
    assert 'consort:endpoint_ready{endpoint="consort"} 1.0' in lines
    assert 'consort:malformed_batches_total{coordinator="coordinator"} 3.0' in lines
    assert 'consort:replica_starts_total{coordinator="coordinator",model="target"} 2.0' in lines
    assert any(line.startswith('process_resident_memory_bytes{coordinator="coordinator"} ') for line in lines)
    assert any(line.startswith('consort:event_loop_tasks{coordinator="coordinator"} ') for line in lines)


class Slow(FakeCoordinator):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[Request, Callable[[Delta], None]]] = []
        self.slots = 0  # so that limits hold

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        self.held.append((request, sink))

    def answer(self) -> None:
        if not self.held:
            return
        request, sink = self.held.pop(0)
        for delta in answer(request):
            sink(delta)


class Clients:
    """Clients of a server with one slot, each in a thread."""

    def __init__(self, endpoints: dict[str, ServedEndpoint], **limits: Any) -> None:
        self.coordinator = Slow()
        coordinator: Any = self.coordinator
        self.service = Service(endpoints, coordinator, limits=Limits(**{"running": {"target": 1}, **limits}))
        self.client = TestClient(make_api(self.service))
        self.threads: list[threading.Thread] = []

    def __enter__(self) -> "Clients":
        self.client.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Answer what is in progress."""
        while any(thread.is_alive() for thread in self.threads):
            self.coordinator.answer()
            time.sleep(0.01)
        self.client.__exit__(None, None, None)

    def ask(self, **fields: Any) -> None:
        """In the background, until it runs or waits."""
        before = len(self.service.admission._tickets)
        body = {"json": {**BODY, **fields}}
        self.threads.append(threading.Thread(target=self.client.post, args=("/v1/completions",), kwargs=body))
        self.threads[-1].start()
        self.wait_for(lambda: len(self.service.admission._tickets) > before)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < ends_s
            time.sleep(0.01)

    def counted(self, name: str) -> dict[tuple[str, str], float]:
        """By endpoint and reason. The name of the key is always the same."""
        return {
            (sample.labels["endpoint"], sample.labels["reason"]): sample.value
            for family in text_string_to_metric_families(self.client.get("/metrics").text)
            for sample in family.samples
            if sample.name == f"consort:requests_{name}_total" and sample.labels["key"] == "anybody"
        }


def test_refusals_are_counted_by_endpoint_and_bound(endpoints: dict[str, ServedEndpoint]) -> None:
    with Clients(endpoints, max_requests=2) as clients:
        clients.ask()
        assert clients.client.post("/v1/completions", json={**BODY, "n": 2}).status_code == 429  # it was read
        clients.ask()
        assert clients.client.post("/v1/completions", json=BODY).status_code == 429  # it was not
        assert clients.client.post("/consort/v1/completions", json=BODY).status_code == 429
        assert clients.counted("refused") == {("consort", "max_requests"): 3}
        assert clients.counted("failed") == {}


def test_a_wait_that_is_too_long_is_told(endpoints: dict[str, ServedEndpoint]) -> None:
    with Clients(endpoints, max_queue_wait_s=None) as clients:
        clients.ask()
        clients.ask()
        assert clients.client.post("/v1/completions", json=BODY).headers["Retry-After"] == "1"
        assert clients.counted("refused") == {("consort", "max_queue_wait_s"): 1}


def test_what_ends_without_an_answer_is_counted_by_reason(endpoints: dict[str, ServedEndpoint]) -> None:
    with Clients(endpoints) as clients:
        clients.ask()
        reply = clients.client.post("/v1/completions", json={**BODY, "timeout_s": 0.2})
        assert reply.status_code == 408
        assert clients.counted("failed") == {("consort", "timeout"): 1}
        clients.coordinator.held.pop(0)[1](answer_of_error())
        clients.wait_for(lambda: clients.counted("failed").get(("consort", "unavailable")) == 1)
        clients.coordinator.ready = {"drafter"}
        clients.service._loaded.clear()
        assert clients.client.post("/v1/completions", json=BODY).status_code == 503
        assert clients.counted("failed") == {("consort", "timeout"): 1, ("consort", "unavailable"): 2}


def answer_of_error() -> Delta:
    return Delta("", (), Statistics(), error=UnavailableError("gone"))


def test_latencies_begin_at_arrival(endpoints: dict[str, ServedEndpoint]) -> None:
    with Clients(endpoints) as clients:
        began_s = time.monotonic()
        clients.ask()
        clients.ask()
        waits_s = time.monotonic()
        time.sleep(0.5)
        waited_s = time.monotonic() - waits_s
        clients.coordinator.answer()
        clients.wait_for(lambda: bool(clients.coordinator.held))
        at_most_s = time.monotonic() - began_s
        clients.coordinator.answer()
        for thread in clients.threads:
            thread.join()
        seen = samples(clients.client)
    assert waited_s < seen["vllm:request_queue_time_seconds_sum"] < 2 * at_most_s  # of the second, then of both
    assert seen["vllm:time_to_first_token_seconds_sum"] > 1.0  # of both
    assert seen["vllm:e2e_request_latency_seconds_sum"] > 1.0


def test_the_wait_of_what_expires_is_timed(endpoints: dict[str, ServedEndpoint]) -> None:
    with Clients(endpoints) as clients:
        began_s = time.monotonic()
        clients.ask()
        clients.client.post("/v1/completions", json={**BODY, "timeout_s": 0.3})
        at_most_s = time.monotonic() - began_s
        seen = samples(clients.client)
    assert seen["vllm:request_queue_time_seconds_count"] == 2
    assert 0.3 <= seen["vllm:request_queue_time_seconds_sum"] < 2 * at_most_s  # the first one's wait, too


def test_names_of_vllm_are_those_of_vllm(fake: TestClient) -> None:
    """As in vLLM's vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py, so that its dashboards work."""
    fake.post("/v1/completions", json=BODY)
    names = {family.name for family in text_string_to_metric_families(fake.get("/metrics").text)}
    assert {name.removeprefix("vllm:") for name in names if name.startswith("vllm:") and "_created" not in name} == {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "cache_config_info",
        "engine_sleep_state",
        "num_preemptions",
        "iteration_tokens_total",
        "request_max_num_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
        "request_prefill_kv_computed_tokens",
        "prompt_tokens_cached",
        "prompt_tokens_by_source",
        "prompt_tokens_cached_by_source",
        "num_requests_waiting_by_reason",
        "prompt_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "generation_tokens",
        "request_success",
        "request_prompt_tokens",
        "request_generation_tokens",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
    }


def test_series_of_several_coordinators_add_up() -> None:
    parts = []
    for name, answered in (("first", 2), ("second", 3)):
        metrics = Metrics(name)
        for _ in range(answered):
            metrics.record_outcome("consort", "alice", Outcome())
        parts.append(with_coordinator(metrics.families(), name))
    families = {family.name: family for family in text_string_to_metric_families(exposition(parts).decode())}
    totals = [sample for sample in families["consort:requests"].samples if sample.name.endswith("_total")]
    assert {sample.labels["coordinator"]: sample.value for sample in totals} == {"first": 2, "second": 3}
    assert all(sample.labels["key"] == "alice" for sample in totals)
