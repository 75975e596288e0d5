"""The configuration that serves a model without a file: its names, who drafts, and its endpoint."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoding.errors import ConfigError
from deployments.configuration.config import DEFAULT_CONFIG, ServerConfig, load_config, parse_config
from deployments.configuration.endpoint import EndpointConfig
from deployments.configuration.heads import HeadsConfig
from deployments.configuration.paths import PACKAGE, anchored, locate, read_header, tensors_in
from deployments.configuration.values import RESERVED
from deployments.planning.hub import Snapshot, is_hub_id
from engine.heads.mtp_layout import mtp_layout, quantized_name
from engine.loading.gguf.files import is_gguf

BUNDLED = "smollm2"  # the name of the default configuration's target
_BUNDLED_ID = "huggingfacetb/smollm2-135m-instruct"
_BUNDLED_SHAPE = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelServer:
    """How to serve a model.

    model: a folder, a .gguf file, package:NAME/FILE, an id on the Hub, or a file there, org/name/file.gguf.
    drafter: another, "none", or "auto": the bundled heads for the bundled model, otherwise n-grams alone, until
        `with_own_heads` has looked at the checkpoint.
    served_names: of its endpoints; (): one, named after the model.
    target_keys, drafter_keys: of the configuration of the two models.
    """

    model: str
    drafter: str = "auto"
    served_names: Sequence[str] = ()
    draft_length: int | None = None
    target_keys: Mapping[str, Any] = field(default_factory=dict)
    drafter_keys: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> ServerConfig:
        """Return the configuration, with devices and lengths still open; raises ConfigError if something is wrong."""
        path = resolve(self.model, "MODEL")
        drafter_path = None if self.drafter in ("auto", "none") else resolve(self.drafter, "--drafter")
        name = name_of(path)
        models: dict[str, dict[str, Any]] = {name: {"path": path, **self.target_keys}}
        endpoint: dict[str, Any] = {"target": name}
        if drafter_path is not None:
            drafter = name_of(drafter_path)
            endpoint["drafter"] = drafter if drafter != name else f"{drafter}-drafter"
            models[endpoint["drafter"]] = {"path": drafter_path, **self.drafter_keys}
        if self.drafter != "none":
            endpoint["ngram"] = {}
        if self.drafter == "auto" and _is_bundled(path) and self.target_keys.get("tensor_parallel", 1) == 1:
            heads = None if (default := _default_config()) is None else default.endpoints[BUNDLED].heads
            if heads is not None and heads.path is not None:  # they rest if the model is another
                endpoint["heads"] = heads.model_dump(exclude_unset=True) | {"path": locate(heads.path)}
        if self.draft_length is not None:
            endpoint["draft_length"] = self.draft_length
        served_names = self.served_names or [path if is_hub_id(path) and not is_gguf(path) else name]
        return parse_config({"models": models, "endpoints": dict.fromkeys(served_names, endpoint)}, folder=Path.cwd())


def resolve(value: str, option: str) -> str:
    """Return a model's path as configurations have it; raises ConfigError if there is no such model."""
    kinds = "a model is a folder, a .gguf file, an id on the Hugging Face Hub, or org/name/file.gguf there"
    if not value:
        raise ConfigError(f"{option}: is empty; {kinds}")
    try:
        return anchored(value, Path.cwd(), key=option)
    except ConfigError as error:
        raise ConfigError(f"{error}; {kinds}, and a configuration ends in .yaml or .yml") from None


def name_of(path: str) -> str:
    """Return a name for a model, from its file or folder."""
    if path.startswith(PACKAGE) and (default := _default_config()) and path == default.models[BUNDLED].path:
        return BUNDLED
    stem = Path(path).stem if is_gguf(path) else Path(path).name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-") or "model"
    return f"model-{name}" if name in RESERVED else name


def _default_config() -> ServerConfig | None:
    try:
        return load_config(DEFAULT_CONFIG)
    except ConfigError:  # the bundled model's package is not installed
        return None


def _is_bundled(path: str) -> bool:
    """Whether a model is SmolLM2-135M-Instruct in one of its formats, or its base model, which has the same shape."""
    if is_gguf(path):
        return Path(path).name.lower().startswith("smollm2-135m-instruct")
    folder = Path(locate(path))
    if not (folder / "config.json").is_file():
        return path.lower() == _BUNDLED_ID
    config = read_header(folder)
    return all(config.get(key) == value for key, value in _BUNDLED_SHAPE.items())


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
