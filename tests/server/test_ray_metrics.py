"""Replicas' metrics through Ray, as Prometheus scrapes them from the node."""

import urllib.request

import pytest

from deployments.monitoring.replica_metrics import COUNTERS, GAUGES
from tests.server.conftest import Server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.cluster
NOTHING_YET = {  # Ray tells nothing of a counter before it counts
    "ray_consort_drafting_seconds_total",
    "ray_consort_kv_evictions_total",
    "ray_consort_malformed_batches_total",
    "ray_consort_out_of_memory_total",
    "ray_consort_preemptions_total",
    "ray_consort_trial_loss_seconds_total",
}


def test_replicas_tell_through_rays_metrics(server: Server) -> None:
    server.client.post("/v1/completions", {"model": "consort", "prompt": "import os\n", "max_tokens": 50})

    def exported() -> set[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        return {line.partition("{")[0] for line in lines if 'model_name="target"' in line}

    wanted = {f"ray_{name}" for name in (*GAUGES, *(name for name, _ in COUNTERS.values()))}
    wanted -= NOTHING_YET
    wait_until(lambda: wanted <= exported(), f"all of {sorted(wanted)} are exported", timeout_s=60)
