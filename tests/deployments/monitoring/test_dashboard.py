"""Every query of the Grafana dashboard names metrics that there are."""

import json
import re

from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from deployments.configuration.model import ROOT
from deployments.monitoring.replica_metrics import COUNTERS, GAUGES

DASHBOARD = json.loads((ROOT / "dashboards" / "consort.json").read_text(encoding="utf-8"))
_NAME = re.compile(r"\b(?:vllm:|consort:|ray_|process_)\w+")
BODY = {"model": "consort", "prompt": "import os", "max_tokens": 12, "seed": 1}


def queries() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return [
        *panels,
        *(variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"),
    ]


def test_the_metrics_of_all_queries_exist(fake: TestClient) -> None:
    fake.post("/v1/completions", json=BODY)
    families = list(text_string_to_metric_families(fake.get("/metrics").text))
    there = {sample.name for family in families for sample in family.samples}
    there |= {f"{family.name}_total" for family in families if family.type == "counter"}  # also without a sample yet
    there |= {f"ray_{name}" for name in (*GAUGES, *(name for name, _ in COUNTERS.values()))}
    named = [(query, name) for query in queries() for name in _NAME.findall(query)]
    assert len(named) > 30
    assert [(query, name) for query, name in named if name not in there] == []


def test_every_metric_is_shown_somewhere() -> None:
    shown = {name.removeprefix("ray_") for query in queries() for name in _NAME.findall(query)}
    hidden = {"consort_drafting", "consort_malformed_batches_total"}  # the one is also told of replicas, the other is 0
    assert {*GAUGES, *(name for name, _ in COUNTERS.values())} - hidden <= shown
