"""Every query of the Grafana dashboard and of the alert rules names metrics that there are."""

import json
import re
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from deployments.configuration.paths import ROOT
from deployments.monitoring.replica_metrics import COUNTERS, GAUGES

DASHBOARD = json.loads((ROOT / "dashboards" / "consort.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((ROOT / "dashboards" / "alerts.yaml").read_text(encoding="utf-8"))
_NAME = re.compile(r"\b(?:vllm:|consort:|ray_|process_)\w+")
_LABELS = re.compile(r"(?:by|group_left) \(([^)]*)\)")
BODY = {"model": "consort", "prompt": "import os", "max_tokens": 12, "seed": 1}


def dashboard_queries() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return [
        *panels,
        *(variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"),
    ]


def rules() -> list[dict[str, Any]]:
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("queries", [dashboard_queries(), [rule["expr"] for rule in rules()]])
def test_the_metrics_of_all_queries_exist(fake: TestClient, queries: list[str]) -> None:
    fake.post("/v1/completions", json=BODY)
    families = list(text_string_to_metric_families(fake.get("/metrics").text))
    there = {sample.name for family in families for sample in family.samples}
    there |= {f"{family.name}_total" for family in families if family.type == "counter"}  # also without a sample yet
    there |= {f"ray_{name}" for name in (*GAUGES, *(name for name, _ in COUNTERS.values()))}
    named = [(query, name) for query in queries for name in _NAME.findall(query)]
    assert len(named) > 10
    assert [(query, name) for query, name in named if name not in there] == []


def test_every_metric_is_shown_somewhere() -> None:
    shown = {name.removeprefix("ray_") for query in dashboard_queries() for name in _NAME.findall(query)}
    hidden = {"consort_drafting"}  # /metrics tells the same
    assert {*GAUGES, *(name for name, _ in COUNTERS.values())} - hidden <= shown


def test_there_is_an_alert_for_each_trouble_and_it_says_what_to_do() -> None:
    names = {rule["alert"].removeprefix("Consort") for rule in rules()}
    assert {"RefusesRequests", "LongQueue", "EndpointNotReady", "ReplicasRestart", "MalformedBatches"} <= names
    assert {"OutOfMemory", "AcceptanceCollapsed", "RequestsFail"} <= names
    assert all({"summary", "action"} <= set(rule["annotations"]) for rule in rules())


def test_alerts_show_only_labels_that_their_queries_keep() -> None:
    for rule in rules():
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        kept = {label.strip() for labels in _LABELS.findall(rule["expr"]) for label in labels.split(",")}
        assert shown <= kept, rule["alert"]
