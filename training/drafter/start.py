"""The model that a distillation starts from: layers and tokens of the target, or a small model that is given.

Must not know how it is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from decoding.errors import ConfigError
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.draft_vocabulary import FILE, save_draft_vocabulary
from engine.loading.gguf import settings_folder
from engine.loading.settings import is_trimmed, load_tokenizer, vocabulary_size
from training.distillation.vocabulary import StudentVocabulary, most_used
from training.files import whole_folder
from training.pruning import block_influence, decoder_layers, keep_layers, most_influential, trim_vocabulary
from training.texts import Chat

_INFLUENCE_CHATS = 16
_LAYERS_OF_TARGET = 8
_TEXT = "start.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """What a drafter starts from."""

    target: str
    model: str | None = None  # None: the target
    layers: int | tuple[int, ...] | None = None  # so many, or these; None: one for 8 of the target, all of another
    vocabulary: int | None = 8192  # tokens to keep, beside the special ones; None: all
    device: str = "auto"


def write_start(options: StartOptions, chats: Sequence[Chat], special_tokens: Sequence[int], folder: Path) -> None:
    """Write the untrained drafter and a line that says what it is into a new folder.

    Raises:
        ConfigError: a model can't be loaded or pruned, or the given model has other tokens than the target.
    """
    path = options.model or options.target
    if path != options.target and load_tokenizer(path).get_vocab() != load_tokenizer(options.target).get_vocab():
        raise ConfigError(f"--from {path} has other tokens than {options.target}: a drafter is trained on its target's")
    model, vocabulary = load_student(ModelSpec(name="start", path=path, dtype="float32", device=options.device))
    text = f"all layers of {path}"
    if options.model is None or options.layers is not None:
        kept = _chosen_layers(model, options.layers, vocabulary, chats)
        model, text = keep_layers(model, kept), f"layers {', '.join(map(str, kept))} of {path}"
    tokens: list[int] | None = None
    if not is_trimmed(model.config) and options.vocabulary is not None:
        size = vocabulary_size(model.config)
        # A tokenizer may have more tokens than its model has rows.
        tokens = most_used(chats, options.vocabulary, [token for token in special_tokens if token < size])
        if len(tokens) < size - 1:
            model = trim_vocabulary(model, tokens)
    rows = model.config.get_text_config(decoder=True).vocab_size
    with whole_folder(folder) as unfinished:
        text = f"{text}, {rows:,} tokens, {model.num_parameters():,} parameters"
        (unfinished / _TEXT).write_text(text, encoding="utf-8")
        model.save_pretrained(unfinished)
        if is_trimmed(model.config):
            if tokens is None:
                copy_vocabulary(Path(path), unfinished)
            else:
                save_draft_vocabulary(tokens, unfinished)


def load_start(folder: Path) -> tuple[PreTrainedModel, StudentVocabulary, str]:
    """Load a model that `write_start` wrote, in float32, with its vocabulary and a line that says what it is."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, StudentVocabulary.of_model(model, str(folder)), (folder / _TEXT).read_text(encoding="utf-8")


def load_student(spec: ModelSpec) -> tuple[PreTrainedModel, StudentVocabulary]:
    """Load a model as `load_model` does, but without the translation of ids that serving adds to a trimmed vocabulary.

    A trimmed model is loaded in float32, to the CPU.

    Raises:
        ConfigError: it can't be loaded.
    """
    options: dict[str, Any] = {"revision": spec.revision, "trust_remote_code": spec.trust_remote_code}
    try:
        trimmed = is_trimmed(AutoConfig.from_pretrained(settings_folder(spec.path), **options))
    except (OSError, ValueError):
        trimmed = False  # `load_model` says what is wrong
    model: PreTrainedModel
    if trimmed:
        model = AutoModelForCausalLM.from_pretrained(spec.path, dtype=torch.float32, **options)
    else:
        model = load_model(spec)
    return model, StudentVocabulary.of_model(model, spec.path, spec.revision)


def copy_vocabulary(source: Path, folder: Path) -> None:
    """Copy the ids of a trimmed vocabulary, if a model has one."""
    if (source / FILE).exists():
        (folder / FILE).write_bytes((source / FILE).read_bytes())


def _chosen_layers(
    model: PreTrainedModel,
    layers: int | tuple[int, ...] | None,
    vocabulary: StudentVocabulary,
    chats: Sequence[Chat],
) -> Sequence[int]:
    """Return the given layers, or so many of the most influential, among them the first and the last."""
    count = len(decoder_layers(model))
    if isinstance(layers, tuple):
        return layers
    if layers is None:
        layers = max(round(count / _LAYERS_OF_TARGET), min(2, count))
    texts = (torch.tensor([[*chat.prompt, *chat.tokens]]) for chat in chats[:_INFLUENCE_CHATS])
    influence = block_influence(model, map(vocabulary.read, texts))
    return most_influential([inf, *influence[1:-1], inf][:count], layers)
