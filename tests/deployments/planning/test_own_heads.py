"""Targets with an MTP layer in their checkpoint draft by it, unless something else was named. Loads nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cli.serving.source import plan_lines, read_source
from decoding.errors import ConfigError
from deployments.configuration.config import parse_config
from deployments.planning.devices import Machine
from deployments.planning.hub import Snapshot
from deployments.planning.model_server import with_own_heads
from deployments.planning.plan import GIB

LAPTOP = Machine((), 2, 8 * GIB)
QWEN = ["fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0.mlp.up_proj"]
NAMES = {
    "qwen": [f"mtp.{name}.weight" for name in QWEN],
    "glm": [f"model.layers.2.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "mlp.up_proj")],
    "other layer": [f"model.layers.1.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "mlp.up_proj")],
    "none": ["model.layers.1.mlp.up_proj.weight"],
}


def checkpoint(folder: Path, names: list[str], *, indexed: bool = False) -> Path:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "text_config": shape}), encoding="utf-8")
    if indexed:  # the files may still be on the Hub
        index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    else:
        save_file({name: torch.zeros(2, 2) for name in names}, folder / "model.safetensors")
    return folder


def planned(model: Path, **options: Any) -> tuple[Any, list[str]]:
    """Return the heads that `consort serve` gives a model, and the lines of its plan."""
    config, plan = read_source(str(model), options).planned(LAPTOP, {})
    (endpoint,) = config.endpoints.values()
    return endpoint.heads, plan_lines(plan, config)


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize(("names", "has"), [("qwen", True), ("glm", True), ("other layer", False), ("none", False)])
def test_it_is_known_by_its_names(tmp_path: Path, names: str, has: bool, indexed: bool) -> None:
    heads, lines = planned(checkpoint(tmp_path, NAMES[names], indexed=indexed))
    assert (heads is not None) == has == any(": the MTP layer of its checkpoint" in x for x in lines)
    if has:
        assert (heads.kind, heads.path, heads.min_acceptance) == ("mtp", None, 0)


def test_it_is_left_out_where_something_else_was_said(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, NAMES["qwen"])
    for options in ({"drafter": "none"}, {"drafter": str(folder)}, {"draft_length": 0}):
        assert planned(folder, **options)[0] is None


def test_the_plan_says_why_it_is_left_out(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, [*NAMES["qwen"], "mtp.layers.0.mlp.up_proj.weight_packed"])
    heads, lines = planned(folder)
    assert heads is None
    assert any(
        "its MTP layer is left out, because it is quantised (mtp.layers.0.mlp.up_proj.weight_p" in x for x in lines
    )


def test_models_of_the_hub_are_looked_at_in_the_cache(tmp_path: Path) -> None:
    config = parse_config(
        {"models": {"m": {"path": "org/m"}}, "endpoints": {"e": {"target": "m", "ngram": {}}}}, folder=tmp_path
    )
    assert with_own_heads(config, {})[0].endpoints["e"].heads is None
    snapshot = Snapshot(checkpoint(tmp_path, NAMES["glm"], indexed=True), None)
    changed, notes = with_own_heads(config, {"m": snapshot})
    assert (changed.endpoints["e"].heads is not None, notes) == (True, [])


def heads_config(folder: Path, path: str, heads: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config(
            {"models": {"m": {"path": path}}, "endpoints": {"e": {"target": "m", "heads": json.loads(heads)}}},
            folder=folder,
        )
    return str(error.value)


def test_a_file_names_them_without_a_path(tmp_path: Path) -> None:
    folder = str(checkpoint(tmp_path, NAMES["qwen"]))
    models = {"m": {"path": folder, "revision": "main"}}
    config = parse_config(
        {"models": models, "endpoints": {"e": {"target": "m", "heads": {"kind": "mtp"}}}}, folder=tmp_path
    )
    spec = config.heads_of("m")
    assert spec is not None
    assert (spec.kind, spec.path, spec.revision, spec.min_acceptance) == ("mtp", folder, "main", 0.2)
    assert "comes with the target" in heads_config(tmp_path, folder, '{"kind": "mtp", "path": "org/m"}')
    assert "is missing: medusa heads are files" in heads_config(tmp_path, folder, '{"kind": "medusa"}')
    (tmp_path / "m.gguf").touch()
    assert "of .gguf files are not read" in heads_config(tmp_path, "./m.gguf", '{"kind": "mtp"}')
