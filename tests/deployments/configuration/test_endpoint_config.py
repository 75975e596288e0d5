"""What an endpoint may say of its members, what a request may change, and how mistakes are named."""

from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from pydantic import BaseModel, ValidationError

from cli import shell
from decoding.blending.params import BlendParams, EnsembleOptions
from decoding.errors import ConfigError, InvalidRequestError
from deployments.configuration.config import load_config, parse_config
from deployments.configuration.endpoint import BlendConfig, EndpointConfig, StrategyConfig
from deployments.configuration.paths import ROOT
from deployments.fields.ensembles import EnsembleFields
from deployments.fields.strict import problem_of
from deployments.strategies.strategy import load_strategy
from tests.deployments.test_docs import config_row

DOCS = (ROOT / "docs" / "ensembles.md").read_text(encoding="utf-8")
PAIR = {"members": ["a", "b"]}
VOTE = {"kind": "majority", "regex": r"(\d+)"}


@pytest.mark.parametrize(
    ("given", "kind", "models"),
    [
        ({"target": "a"}, "plain", ["a"]),
        ({"target": "a", "drafter": "d"}, "speculative", ["a"]),
        ({"target": "a", "ngram": {}}, "speculative", ["a"]),
        (PAIR, "ensemble", ["a", "b"]),
        ({**PAIR, "kind": "ensemble", "drafter": "d", "blend": {"weights": [0.3, 0.7]}}, "ensemble", ["a", "b"]),
        ({"expert": "a", "amateur": "b"}, "contrastive", ["a", "b"]),
        ({"members": ["a"], "strategy": VOTE}, "ensemble", ["a"]),
    ],
)
def test_kinds_and_their_models(given: dict[str, Any], kind: str, models: list[str]) -> None:
    endpoint = EndpointConfig.model_validate(given)
    assert (endpoint.kind, endpoint.models, endpoint.target) == (kind, models, models[0])
    assert endpoint.others == models[1:]
    again = EndpointConfig.model_validate(given)
    assert again == endpoint


@pytest.mark.parametrize(
    ("given", "field", "problem"),
    [
        ({}, "target", "is required"),
        ({"kind": "plain", "target": "a", "drafter": "d"}, "kind", "is plain, but the endpoint has drafts"),
        ({"kind": "speculative", "target": "a"}, "kind", "is speculative, but the endpoint has no drafts"),
        ({"kind": "ensemble", "members": ["a"]}, "members", "should name at least 2"),
        ({"members": ["a", "a"]}, "members", "should all differ"),
        ({"target": "a", **PAIR}, "target", "is not for an endpoint of the kind ensemble"),
        ({"target": "a", "expert": "a", "amateur": "b"}, "target", "is not for an endpoint of the kind contr"),
        ({"expert": "a"}, "amateur", "is required"),
        ({"expert": "a", "amateur": "a"}, "amateur", "should differ from the expert"),
        ({"expert": "a", "amateur": "b", "blend": {"kind": "vote"}}, "blend.kind", "should be contrastive here"),
        ({"expert": "a", "amateur": "b", "strategy": VOTE}, "strategy", "is not for an endpoint"),
        ({**PAIR, "blend": {"weights": [1]}}, "blend.weights", "one number for each of 2 members"),
        ({**PAIR, "blend": {"threshold": 2}}, "blend.threshold", "from 0 to 1"),
        ({**PAIR, "blend": {"kind": "mix"}}, "blend.kind", "should be 'single', 'mixture'"),
        ({**PAIR, "min_members": 3}, "min_members", "are more than there are members"),
        ({"target": "a", "vocabulary": "union"}, "vocabulary", "is for members that are blended token by token"),
        ({**PAIR, "strategy": VOTE, "vocabulary": "union"}, "vocabulary", "is for members that are blended"),
        ({**PAIR, "vocabulary": "union", "blend": {"kind": "product"}}, "blend.kind", "rule out each token"),
        ({"expert": "a", "amateur": "b", "vocabulary": "union"}, "blend.kind", "topk_union gives such tokens"),
        ({**PAIR, "vocabulary": "topk_union", "member_top_k": 5}, "member_top_k", "should be 0 with vocabulary"),
        ({"expert": "a", "amateur": "b", "member_top_k": 5}, "member_top_k", "should be 0 with a formula"),
        ({**PAIR, "blend": {"kind": "contrastive"}, "member_top_k": 5}, "member_top_k", "should be 0 with a formula"),
        ({**PAIR, "strategy": {"kind": "rerank", "judge": "c"}}, "strategy.judge", "is not among the members"),
        ({**PAIR, "strategy": {"kind": "mbr", "judge": "a"}}, "strategy.judge", "is for rerank, not for mbr"),
        ({**PAIR, "strategy": {"kind": "mbr", "regex": "a"}}, "strategy.regex", "is for majority, not for mbr"),
        ({**PAIR, "strategy": {**VOTE, "json_field": "a"}}, "strategy.json_field", "can't be combined with regex"),
        ({"members": [*"abc"], "strategy": {"kind": "mbr", "candidates": 64}}, "strategy.candidates", "192 in all"),
        ({**PAIR, "strateqy": {}}, "strateqy", "did you mean 'strategy'?"),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        EndpointConfig.model_validate(given)
    path, reason = problem_of(caught.value)
    assert path == field
    assert problem in reason


def test_options_are_the_decoders() -> None:
    options = EndpointConfig.model_validate({"expert": "a", "amateur": "b", "blend": {"form": "scaled", "beta": 1.5}})
    assert options.ensemble_options().blend == BlendParams(kind="contrastive", form="scaled", beta=1.5)
    assert options.ensemble_options().member_timeout_s == 30
    voting = EndpointConfig.model_validate({**PAIR, "strategy": VOTE, "on_member_failure": "drop"})
    assert voting.ensemble_options().member_timeout_s == 600
    assert voting.strategy is not None
    strategy = load_strategy(voting.strategy, key="k")
    assert (strategy.kind, strategy.extract("1, 22")) == ("majority", "22")


def over(
    fields: dict[str, Any], *, count: int = 2, blends: bool = True, member_top_k: int = 0
) -> EnsembleOptions | None:
    blend = BlendParams(kind="gated", threshold=0.9, weights=(1, 2))
    endpoint = EnsembleOptions(blend=blend, member_top_k=member_top_k)
    return EnsembleFields.model_validate(fields).override_ensemble(endpoint, model="e", count=count, blends=blends)


def test_requests_change_what_they_name() -> None:
    assert over({}) is None
    assert over({"return_members": False}, count=0) is None
    changed = over(
        {
            "weights": [3, 1],
            "blend": {"threshold": 0.2},
            "min_members": 2,
            "member_timeout_ms": 50,
            "on_member_failure": "drop",
        }
    )
    assert changed == EnsembleOptions(
        blend=BlendParams(kind="gated", threshold=0.2, weights=(3, 1)),
        min_members=2,
        member_timeout_s=0.05,
        on_member_failure="drop",
    )


@pytest.mark.parametrize(
    ("fields", "more", "field"),
    [
        ({"weights": [1, 2, 3]}, {}, "weights"),
        ({"weights": [0, 0]}, {}, "weights"),
        ({"blend": {"alpha": 2}}, {}, "blend.alpha"),
        ({"blend": {"kind": "contrastive"}}, {"count": 3}, "blend.kind"),
        ({"weights": [1, 1], "blend": {"kind": "contrastive"}}, {"member_top_k": 5}, "blend.kind"),
        ({"blend": {"kind": "vote"}}, {"blends": False}, "blend"),
        ({"min_members": 3}, {}, "min_members"),
        ({"weights": [1]}, {"count": 0}, "weights"),
    ],
)
def test_requests_that_ask_for_what_is_not_there(fields: dict[str, Any], more: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        over({"weights": [1] * more["count"], **fields} if more.get("count", 0) > 2 else fields, **more)
    assert caught.value.field == field


@pytest.mark.parametrize("model", [BlendConfig, StrategyConfig])
def test_every_key_is_documented(model: type[BaseModel]) -> None:
    rows = [config_row(name, field) for name, field in model.model_fields.items()]
    assert "\n".join(rows) in DOCS, "\n".join(rows)


def test_the_help_of_the_comparison_is_documented() -> None:
    result = CliRunner().invoke(shell.main, ["compare", "--help"], prog_name="consort", terminal_width=100)
    assert f"```text\n{result.output}```" in DOCS, result.output


def test_the_examples_are_valid_configurations() -> None:
    block = DOCS.split("```yaml\n")[1].split("```")[0]
    kinds = {
        name: endpoint.kind for name, endpoint in parse_config(yaml.safe_load(block), folder=ROOT).endpoints.items()
    }
    assert kinds == {"ensemble": "ensemble", "contrastive": "contrastive", "vote": "ensemble", "panel": "ensemble"}
    assert load_config(ROOT / "deployments" / "ensemble.yaml").roles() == {
        "target": "target",
        "member": "target",
        "drafter": "both",
    }


def test_a_member_may_draft() -> None:
    models: dict[str, dict[str, Any]] = {name: {"path": str(ROOT / "models" / "target")} for name in ("a", "b")}
    data = {"models": models, "endpoints": {"e": {"members": ["a", "b"], "drafter": "b"}}}
    assert parse_config(data, folder=ROOT).roles() == {"a": "target", "b": "both"}
    models["b"] |= {"tensor_parallel": 2, "num_cpus": 1}
    with pytest.raises(ConfigError, match=r"models\.b\.tensor_parallel: a tensor-parallel model"):
        parse_config(data, folder=ROOT)
