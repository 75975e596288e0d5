"""The configuration that serves a model without a file: its names, who drafts, and its endpoint."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoding.errors import ConfigError
from deployments.configuration.config import DEFAULT_CONFIG, ServerConfig, load_config, parse_config
from deployments.configuration.paths import PACKAGE, anchored, locate, read_header
from deployments.configuration.values import RESERVED
from deployments.planning.hub import is_hub_id
from engine.loading.gguf.files import is_gguf

BUNDLED = "smollm2"  # the name of the default configuration's target
_BUNDLED_ID = "huggingfacetb/smollm2-135m-instruct"
_BUNDLED_SHAPE = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}


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
