"""/metrics: names that vLLM's dashboards know, and numbers that are right. The answers are made up."""

from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

BODY = {"model": "consort", "prompt": "import os", "max_tokens": 12, "seed": 1}


def samples(client: TestClient) -> dict[str, float]:
    """By name, and by labels where there are others than the usual ones."""
    values = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            if not sample.name.startswith("vllm:"):
                continue
            assert sample.labels["model_name"] == "consort"
            others = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
            values[":".join([sample.name, *others])] = sample.value
    return values


def test_an_answer_is_counted(fake: TestClient) -> None:
    answers = [fake.post("/v1/completions", json={**BODY, "seed": seed}).json() for seed in range(3)]
    seen = samples(fake)
    total = {name: sum(answer["speculation"][name] for answer in answers) for name in ("steps", "drafted", "accepted")}
    assert seen["vllm:spec_decode_num_drafts_total"] == total["steps"]
    assert seen["vllm:spec_decode_num_draft_tokens_total"] == total["drafted"]
    assert seen["vllm:spec_decode_num_accepted_tokens_total"] == total["accepted"]
    by_place = [seen.get(f"vllm:spec_decode_num_accepted_tokens_per_pos_total:{place}", 0) for place in range(4)]
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
    assert seen == {**idle, "vllm:kv_cache_usage_perc": 0.5}  # of other coordinators' requests


def test_replicas_and_the_process_are_shown(fake: TestClient) -> None:
    lines = fake.get("/metrics").text.splitlines()
    assert 'consort:replica_rows{model="target",replica="target-0",role="target"} 2.0' in lines
    assert 'consort:replica_slots{model="target",replica="target-0",role="target"} 4.0' in lines
    assert 'consort:replica_drafting{model="target",replica="target-0",role="target"} 1.0' in lines
    assert "consort:malformed_batches_total 3.0" in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)
    assert any(line.startswith("consort:event_loop_tasks ") for line in lines)
