"""A model in this process, with or without a drafter."""

import gc
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, Unpack

from consort.text_model import Body, Route, TextModel
from decoding.errors import ConfigError
from deployments.configuration.config import DEFAULT_CONFIG, ServerConfig, load_config, parse_config
from deployments.fields.strict import nearest
from engine.loading.host import compute_environment

_NAME = "llm"  # of the target and of the endpoint
_DRAFTER = "drafter"


class ModelOptions(TypedDict, total=False):
    """Keys of a model in a configuration file (docs/configuration.md)."""

    revision: str | None
    trust_remote_code: bool
    safetensors_only: bool
    adapter: str | None
    adapters: dict[str, str]
    max_adapter_rank: int
    weights_at_run_time: bool  # for `load_weights`
    chat_template: str | None
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    quantization: Literal["int4", "int8", "nf4"] | None
    activations: Literal["int8"] | None
    deterministic: bool
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3fn"]
    kv_tokens: int | Literal["auto"]
    device: str
    memory_gib: float | None
    slots: int | Literal["auto"]
    max_length: int | None
    threads: int | None


class LocalModel:
    """A model that is loaded into this process."""

    def __init__(
        self,
        model: str | Path,
        *,
        drafter: str | Path | None = None,
        draft_length: int = 4,
        ngram: bool = False,
        drafter_options: ModelOptions | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        """Load a model and, if given, its drafter, which runs on the model's device in turn with it.

        model: a folder, a .gguf file, package:NAME/FILE, or an id on the Hugging Face Hub.
        drafter: the same, for the model that drafts.
        draft_length: most draft tokens that one step verifies; 0: plain decoding.
        ngram: also draft by lookup in the text.
        drafter_options: like the options, for the drafter.

        Raises ConfigError if an option is wrong, or a model can't be loaded or does not fit into memory.
        """
        models = {_NAME: _model(model, options)}
        if drafter is not None:
            models[_DRAFTER] = {**_model(drafter, drafter_options or {}), "colocated_with": _NAME}
        endpoint: dict[str, Any] = {
            "target": _NAME,
            "drafter": None if drafter is None else _DRAFTER,
            "draft_length": draft_length,
            "ngram": {} if ngram else None,
        }
        self._start(parse_config({"models": models, "endpoints": {_NAME: endpoint}}, folder=Path.cwd()), _NAME)

    @classmethod
    def from_config(cls, path: str | Path = DEFAULT_CONFIG, endpoint: str | None = None) -> Self:
        """Load an endpoint of a configuration file: with heads, an ensemble, a drafter with threads of its own.

        path: by default the configuration that `consort serve` has: SmolLM2-135M-Instruct.
        endpoint: its name; None: the first.

        Raises ConfigError if the configuration is wrong, has no such endpoint, or a model can't be loaded.
        """
        config = load_config(Path(path))
        name = next(iter(config.endpoints)) if endpoint is None else endpoint
        if name not in config.endpoints:
            raise ConfigError(f"{path}: there is no endpoint {name!r}; {nearest(name, config.endpoints)}")
        made = cls.__new__(cls)
        made._start(config, name)
        return made

    def _start(self, config: ServerConfig, name: str) -> None:
        for variable, value in compute_environment(None).items():
            os.environ.setdefault(variable, value)  # read when torch is imported
        with _uncollected():
            from consort.in_process import InProcessEndpoint

            self._endpoint = InProcessEndpoint(config, name)
        self._finalizer = weakref.finalize(self, self._endpoint.close)  # at the process's end at the latest

    def load_weights(self, path: str | Path) -> str:
        """Replace the model's weights by those of a checkpoint of the same architecture, and return their version.

        Requests in progress end with the weights that they have. An error leaves the present ones in place.

        path: a folder or a .gguf file.

        Raises InvalidRequestError if the checkpoint does not fit the model, or can't be loaded.
        """
        return self._endpoint.load_weights(str(Path(path).absolute()))

    def close(self) -> None:
        """End the model's threads. Requests in progress fail."""
        self._finalizer()


class LLM(LocalModel, TextModel):
    """A model that answers in this process: many requests in one batch, each with the text it would have alone.

    >>> llm = LLM("Qwen/Qwen3-8B", drafter="Qwen/Qwen3-0.6B", dtype="bfloat16")
    >>> llm.generate(["Once upon a time"], SamplingParams(max_tokens=64, seed=1))[0].text
    >>> llm.chat([{"role": "user", "content": "Why is the sky blue?"}]).text

    Text, parameters and seeds are as on a server. Several threads may call it. Its own threads end with `close`, with a
    `with` block, or with the process.
    """

    def _answer(self, route: Route, bodies: Sequence[Body]) -> Sequence[Mapping[str, Any]]:
        return self._endpoint.answer(route, bodies)

    def _stream(self, route: Route, body: Body) -> Iterator[Mapping[str, Any]]:
        return self._endpoint.stream(route, body)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Import and load in the block without garbage collections, which take a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _model(path: str | Path, options: ModelOptions) -> dict[str, Any]:
    on_gpu = options.get("device", "auto").startswith(("cuda", "balanced"))
    return {"path": str(path), **options, **({"num_gpus": 1} if on_gpu else {})}
