"""Loads models and tokenizers from a local folder or the Hub, through transformers."""

import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from decoding.errors import ConfigError
from engine.kernels.quantized_weight import Quantization
from engine.layers.quantized_linear import computes_integers
from engine.loading import memory_budget
from engine.loading.draft_vocabulary import DraftVocabulary, load_draft_vocabulary, save_draft_vocabulary
from engine.loading.gguf.files import (
    auto_dtype,
    has_integers,
    is_gguf,
    read_stored_bytes,
    settings_folder,
    weights_folder,
)
from engine.loading.host import PREFILL_CHUNK
from engine.loading.quantization import check_activations, quantization_config, round_activations, weight_bytes
from engine.loading.quantized_checkpoint import open_checkpoint
from engine.loading.quantized_formats import Reader, quantized_reader, stores_integers
from engine.loading.quantizer import METHOD, IntegerConfig, round_layers
from engine.loading.settings import context_length, is_trimmed, vocabulary_size
from engine.loading.supported import check_config, check_modules
from engine.loading.text_model import RENAMED, causal_class, text_config

_LOAD_ERRORS = (OSError, ValueError, RuntimeError, ImportError, SafetensorError, StrictDataclassError)
_SHOWN_WEIGHTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model to load, its memory and its devices."""

    name: str
    path: str  # a local folder, a .gguf file or a Hub id
    revision: str | None = None
    trust_remote_code: bool = False  # run Python code that comes with the checkpoint
    safetensors_only: bool = True  # False: pickled weights too, which can run any code
    adapter: str | None = None  # LoRA weights to merge: a local folder or a Hub id
    adapters: Mapping[str, str] = field(default_factory=dict)  # LoRA weights that requests choose: paths by name
    adapters_at_run_time: int = 0  # the most that may be loaded later, beside these
    max_adapter_rank: int = 16
    dtype: str = "auto"  # "auto": as stored; else a torch dtype's name
    quantization: Quantization | None = None
    activations: Literal["int8"] | None = None  # what layers of integers round their inputs to, on a CPU
    unpacked: bool = False  # unpack weights that are stored quantised, to train, replace or split them
    deterministic: bool = True  # a token gets the same bits whatever runs beside it; see docs/verification.md
    kv_dtype: str = "auto"  # of the KV cache; "auto": the layers' own; else a torch dtype's name
    kv_tokens: int | Literal["auto"] = "auto"  # that the KV cache holds; "auto": as many as fit
    device: str = "auto"  # "auto": a GPU if there is one, else the CPU; "balanced": all GPUs; else a torch device
    tensor_parallel: int = 1  # devices that each layer is split over; see engine/loading/tensor_parallel.py
    memory_bytes: int | None = None  # the most for weights and KV cache, per device; None: a share of what is free
    slots: int | Literal["auto"] = 16  # the most requests that run at once; "auto": as many as the device runs well
    max_length: int | None = None  # tokens of a request, prompt and output; None: as many as the model has positions
    prefill_chunk: int = PREFILL_CHUNK  # prompt tokens processed between two steps of running requests
    threads: int | None = None  # CPU threads; None: torch's own choice
    early_exits: tuple[int, ...] = ()  # layers after which formulas read what it predicts

    @property
    def devices(self) -> list[torch.device]:
        """Devices for the weights; [] if "balanced" finds no GPU."""
        if self.device == "balanced":
            return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        if self.device == "auto":
            return [torch.device("cuda" if torch.cuda.is_available() else "cpu")]
        return [torch.device(self.device)]

    @property
    def keeps_integers(self) -> bool:
        """Whether weights that are stored quantised stay quantised."""
        changes = self.quantization is not None or self.adapter is not None or self.unpacked
        return self.device != "balanced" and not changes and computes_integers(self.devices[0])

    @property
    def adapter_slots(self) -> int:
        """The most adapters at once."""
        return len(self.adapters) + self.adapters_at_run_time

    @property
    def kv_torch_dtype(self) -> torch.dtype | None:
        """dtype of the KV cache; None: the layers' own."""
        return None if self.kv_dtype == "auto" else getattr(torch, self.kv_dtype)


@contextmanager
def errors_of(spec: ModelSpec) -> Iterator[None]:
    """Let a ConfigError of the block say which model can't be served."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"models.{spec.name}.path: {spec.path!r} can't be served: {error}") from error


def load_model(spec: ModelSpec) -> PreTrainedModel:
    """Load a model to its devices and merge its adapter. Drafters with a trimmed vocabulary get their target's ids.

    Raises ConfigError if the checkpoint can't be loaded, lacks weights, can't be served, needs more memory than there
    is, or has fewer positions than `max_length`.
    """
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    config, skeleton = check_model(spec)
    options = quantization_options(spec, config, skeleton)
    with errors_of(spec):
        token_ids = load_draft_vocabulary(spec.path, config, spec.revision) if is_trimmed(config) else None
    model = _load_weights(spec, {} if spec.adapter is not None else options)
    if spec.adapter is not None:
        model = _merge_adapter(spec, model)
        if spec.quantization is not None:
            round_layers(model, spec.quantization)
    if spec.activations is not None:
        round_activations(spec.name, model)
    if token_ids is not None:
        DraftVocabulary(token_ids.to(model.device), vocabulary_size(config)).attach(model)
    return model


def quantization_options(spec: ModelSpec, config: PretrainedConfig, skeleton: PreTrainedModel) -> dict[str, Any]:
    """Return arguments of `from_pretrained` for `quantization`. Raises ConfigError if the model can't be quantised."""
    if spec.quantization is None:
        return {}
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"models.{spec.name}.quantization: the checkpoint is quantised already; leave it out")
    try:
        return {"quantization_config": quantization_config(spec.quantization, skeleton)}
    except ConfigError as error:
        raise ConfigError(f"models.{spec.name}.quantization: {error}") from error


def save_rounded(model: PreTrainedModel, path: str, folder: Path) -> None:
    """Save a model that was rounded while loading, by the names of its modules. path: where it was loaded from."""
    generation = cached_file(settings_folder(path), GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    if generation is not None:  # it is copied, because transformers refuses to write what it reads
        model.generation_config = GenerationConfig()
    vocabulary = getattr(model, "draft_vocabulary", None)
    if vocabulary is not None:
        model.config.get_text_config(decoder=True).vocab_size = len(vocabulary.tokens) + 1
    model.save_pretrained(folder, save_original_format=False)
    if generation is not None:
        shutil.copy(generation, folder)
    if vocabulary is not None:
        save_draft_vocabulary(vocabulary.tokens.tolist(), folder)


def check_model(spec: ModelSpec) -> tuple[PretrainedConfig, PreTrainedModel]:
    """Return a model's configuration and the model on the meta device, without reading weights.

    Raises ConfigError if the model can't be served, needs more memory than there is, or has fewer positions than
    `max_length`.
    """
    if not spec.devices:
        raise ConfigError(f"models.{spec.name}.device is 'balanced', but there is no GPU")
    config = load_config(spec)
    skeleton = make_skeleton(spec, config)
    check_memory(spec, config, skeleton, room=memory_budget.room_for_weights(spec.devices, spec.memory_bytes))
    return config, skeleton


def load_config(spec: ModelSpec) -> PretrainedConfig:
    """Return a model's configuration; of a multimodal checkpoint, its text model's.

    Raises ConfigError if it can't be read or served, or has fewer positions than `max_length`.
    """
    try:
        config = _model_config(spec, read_stored_config(spec))
    except (*_LOAD_ERRORS, ConfigError, KeyError) as error:
        raise _cannot_load(spec, error) from error
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if spec.max_length is not None and spec.max_length > (positions or -1) > 0:
        raise ConfigError(
            f"models.{spec.name}.max_length is {spec.max_length}, but the model has {positions} positions; lower it"
        )
    if spec.activations is not None:
        stored = has_integers(spec.path) if is_gguf(spec.path) else stores_integers(config)
        check_activations(spec.name, spec.devices[0], spec.quantization, stored=stored and spec.keeps_integers)
    with errors_of(spec):
        _check_changes(spec, config)
        check_config(config, max_length=context_length(config, spec.max_length))
        if not _runs_own_code(spec, config):
            quantized_reader(config)  # raises an error if its quantisation can't be read
    return config


def _check_changes(spec: ModelSpec, config: PretrainedConfig) -> None:
    """Raise ConfigError if weights that `consort quantize` rounded would be unpacked."""
    changes = spec.adapter is not None or spec.unpacked
    settings = getattr(config, "quantization_config", None)
    if changes and isinstance(settings, dict) and settings.get("quant_method") == METHOD:
        raise ConfigError(
            "its weights were rounded by `consort quantize`, and can't be unpacked, as to be trained, merged with an "
            "adapter or split as transformers does; use the original model"
        )


def read_stored_config(spec: ModelSpec, folder: str | None = None) -> PretrainedConfig:
    """Return the configuration of the whole checkpoint. folder: to read it from; None: where the settings are."""
    config: PretrainedConfig = AutoConfig.from_pretrained(
        folder or settings_folder(spec.path), revision=spec.revision, trust_remote_code=spec.trust_remote_code
    )
    return config


def _model_config(spec: ModelSpec, stored: PretrainedConfig) -> PretrainedConfig:
    return stored if _runs_own_code(spec, stored) else text_config(stored)


def _runs_own_code(spec: ModelSpec, config: PretrainedConfig) -> bool:
    """Whether the model's class comes with the checkpoint."""
    return spec.trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})


def make_skeleton(spec: ModelSpec, config: PretrainedConfig) -> PreTrainedModel:
    """Return the model on the meta device, to check it before any memory is used.

    Raises ConfigError if it can't be made or served.
    """
    try:
        skeleton: PreTrainedModel
        with torch.device("meta"):
            if _runs_own_code(spec, config):
                skeleton = AutoModelForCausalLM.from_config(deepcopy(config), trust_remote_code=True)
            else:
                skeleton = causal_class(config)(deepcopy(config))
    except Exception as error:  # what a class raises for settings that it does not expect is not documented
        raise _cannot_load(spec, error) from error
    with errors_of(spec):
        check_modules(skeleton, max_length=context_length(config, spec.max_length))
    return skeleton


def check_memory(spec: ModelSpec, config: PretrainedConfig, skeleton: PreTrainedModel, *, room: int) -> None:
    """Raise ConfigError if the weights, or each device's part of them, won't fit.

    Checkpoints that are already quantised are not checked. room: bytes for weights.
    """
    if getattr(config, "quantization_config", None) is not None:
        return
    dtype = _dtype(spec, config)
    if is_gguf(spec.path) and spec.keeps_integers:
        needed = read_stored_bytes(spec.path, str(dtype).removeprefix("torch."))
        memory_budget.check_weights(spec.name, needed // spec.tensor_parallel, {}, room=room)
        return
    needed = weight_bytes(skeleton, dtype, spec.quantization)
    smaller = {"dtype: bfloat16": weight_bytes(skeleton, torch.bfloat16, None)} if dtype.itemsize > 2 else {}
    kinds: tuple[Quantization, ...] = () if spec.unpacked else ("int8", "int4")
    smaller |= {f"quantization: {kind}": weight_bytes(skeleton, dtype, kind) for kind in kinds}
    parts = {change: needed // spec.tensor_parallel for change, needed in smaller.items()}
    memory_budget.check_weights(spec.name, needed // spec.tensor_parallel, parts, room=room)


def _dtype(spec: ModelSpec, config: PretrainedConfig) -> torch.dtype:
    if spec.dtype == "auto" and not is_gguf(spec.path):
        return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    dtype: torch.dtype = getattr(torch, auto_dtype(spec.path, config) if spec.dtype == "auto" else spec.dtype)
    return dtype


def _load_weights(spec: ModelSpec, options: dict[str, Any]) -> PreTrainedModel:
    device_map = "balanced" if spec.device == "balanced" else {"": spec.devices[0]}
    model = read_weights(spec, device_map=device_map, **options)
    placed = set(getattr(model, "hf_device_map", {}).values())
    if spec.device == "balanced" and placed & {"cpu", "disk"}:
        raise ConfigError(f"models.{spec.name}.device: the weights don't fit on the {len(spec.devices)} GPUs")
    return model


def read_weights(spec: ModelSpec, **options: Any) -> PreTrainedModel:
    """Return a checkpoint's model. options: for `from_pretrained`.

    Raises ConfigError if it can't be loaded, or lacks weights.
    """
    try:
        folder = weights_folder(spec.path, spec.dtype, unpacked=not spec.keeps_integers)
        stored = read_stored_config(spec, folder)
        own_code, config = _runs_own_code(spec, stored), _model_config(spec, stored)
        with nullcontext() if config is stored else _without_reports_of_other_parts():
            chosen: Any = AutoModelForCausalLM if own_code else causal_class(config)
            reader = None if own_code else quantized_reader(config)
            source: dict[str, Any] = {
                "pretrained_model_name_or_path": folder,
                "revision": spec.revision,
                "trust_remote_code": spec.trust_remote_code,
                "use_safetensors": True if spec.safetensors_only else None,
            }
            if reader is not None:
                source = _quantized_source(spec, config, reader)
            loaded = chosen.from_pretrained(
                **source,
                config=config,
                key_mapping=None if own_code else RENAMED,
                dtype=spec.dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
                **options,
            )
    except (*_LOAD_ERRORS, ConfigError) as error:
        raise _cannot_load(spec, error) from error
    model: PreTrainedModel = loaded[0]
    for name, stored_shape, shape in sorted(loaded[1]["mismatched_keys"]):
        reason = f"{name} is {list(stored_shape)}, not {list(shape)}"
        raise ConfigError(f"models.{spec.name}.path: {spec.path!r} does not fit its config.json: {reason}")
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        shown = ", ".join(missing[:_SHOWN_WEIGHTS]) + (", …" if len(missing) > _SHOWN_WEIGHTS else "")
        raise ConfigError(f"models.{spec.name}.path: {spec.path!r} lacks {len(missing)} weights: {shown}")
    return model


def _quantized_source(spec: ModelSpec, config: PretrainedConfig, reader: Reader) -> dict[str, Any]:
    """Return arguments of `from_pretrained` for a quantised checkpoint. Removes its settings from `config`."""
    config.quantization_config = None
    skeleton = make_skeleton(spec, config)
    keeps, dtype = spec.keeps_integers, _dtype(spec, config)
    ranks = spec.tensor_parallel
    stored = open_checkpoint(spec.path, spec.revision, reader, skeleton, dtype, keeps_integers=keeps, ranks=ranks)
    quantizer = IntegerConfig(layers=stored.layers) if stored.layers else None
    return {"pretrained_model_name_or_path": None, "state_dict": stored.tensors, "quantization_config": quantizer}


@contextmanager
def _without_reports_of_other_parts() -> Iterator[None]:
    """Let transformers not list the weights that are left out. It logs other findings in the same report."""

    def is_worth_it(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "UNEXPECTED" not in text or "MISMATCH" in text or "CONVERSION" in text

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_worth_it)
    try:
        yield
    finally:
        logger.removeFilter(is_worth_it)


def _merge_adapter(spec: ModelSpec, model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with LoRA weights merged into its own: Hu et al., arXiv 2106.09685, section 4.1."""
    assert spec.adapter is not None
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ConfigError(f"models.{spec.name}.adapter needs peft: pip install 'consort[lora]'") from error
    try:
        adapted = PeftModel.from_pretrained(model, spec.adapter, use_safetensors=spec.safetensors_only)
        _check_untied(adapted)
        merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    except (*_LOAD_ERRORS, KeyError, TypeError) as error:
        raise ConfigError(f"models.{spec.name}.adapter: can't merge {spec.adapter!r}: {error}") from error
    return merged


def _check_untied(adapted: nn.Module) -> None:
    """Raise ValueError if a layer with LoRA weights shares its own weights: merged, they would act on both layers."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    users = Counter(id(weights) for module in adapted.modules() for weights in module.parameters(recurse=False))
    layers = ((name, module) for name, module in adapted.named_modules() if isinstance(module, BaseTunerLayer))
    tied = [name for name, module in layers if users[id(module.get_base_layer().weight)] > 1]
    if tied:
        raise ValueError(f"{' and '.join(tied)} shares its weights with another layer (tie_word_embeddings)")


def _cannot_load(spec: ModelSpec, error: Exception) -> ConfigError:
    reason = repr(error) if isinstance(error, KeyError) else error  # its text is the key alone
    return ConfigError(f"models.{spec.name}.path: can't load {spec.path!r}: {reason}")
