"""Lets targets draft with the MTP layer of their own checkpoint where no drafter and no heads are configured."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from decoding.errors import ConfigError
from deployments.configuration.config import ServerConfig
from deployments.configuration.endpoint import EndpointConfig
from deployments.configuration.heads import HeadsConfig
from deployments.configuration.paths import locate, read_header, tensors_in
from deployments.planning.hub import Snapshot
from engine.heads.mtp_layout import mtp_layout, quantized_name

_INDEX = "model.safetensors.index.json"


def with_own_heads(config: ServerConfig, snapshots: Mapping[str, Snapshot]) -> tuple[ServerConfig, list[str]]:
    """Let endpoints without a drafter or heads draft with the MTP layer of their target's checkpoint, if it has one.

    The layer is not tested at the start, and rests where it does not pay. snapshots: models of the Hub, by name.

    Returns:
        The configuration, and notes on layers that are left out.
    """
    notes: list[str] = []
    endpoints: dict[str, EndpointConfig] = {}
    for name, endpoint in config.endpoints.items():
        endpoints[name] = endpoint
        if endpoint.drafter or endpoint.heads or endpoint.kind != "speculative" or not endpoint.draft_length:
            continue
        model = config.models[endpoint.target]
        folder = snapshots[endpoint.target].folder if endpoint.target in snapshots else Path(locate(model.path))
        problem = _mtp_problem(folder)
        if problem == "" and model.tensor_parallel > 1:
            problem = "the target is split over several devices"
        if problem == "":
            heads = HeadsConfig(kind="mtp", min_acceptance=0)
            endpoints[name] = endpoint.model_copy(update={"heads": heads})
        elif problem is not None:
            notes.append(f"{endpoint.target}: its MTP layer is left out, because {problem}")
    return config.model_copy(update={"endpoints": endpoints}), list(dict.fromkeys(notes))


def _mtp_problem(folder: Path) -> str | None:
    """Return why a folder's MTP layer can't draft; "": it can; None: there is no layer under known names."""
    try:
        layers = read_header(folder).get("num_hidden_layers")
        names = _tensor_names(folder)
    except ConfigError:  # loading the model will say why it can't be read
        return None
    if not isinstance(layers, int) or (layout := mtp_layout(names, layers)) is None:
        return None
    name = quantized_name(layout, names, layers)
    return "" if name is None else f"it is quantised ({name}), and only plain ones and FP8 in blocks are read"


def _tensor_names(folder: Path) -> set[str]:
    """Return the names of a checkpoint's tensors, by its index or by its files."""
    names: set[str] = set()
    try:
        names |= json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].keys()
    except (OSError, ValueError, KeyError):
        names |= _names_in(folder.glob("*.safetensors"))
    return names | _names_in(folder.glob("mtp*.safetensors"))  # some checkpoints have it in a file of its own


def _names_in(files: Iterable[Path]) -> set[str]:
    return {name for file in files for name in tensors_in(file)}
