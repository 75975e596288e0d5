"""The model that a distillation starts from: layers and tokens of the target, or a small model that is given.

Must not know how it is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.loading.checkpoint import ModelSpec, load_model
from decoding.errors import ConfigError
from training.files import whole_folder
from training.pruning import block_influence, decoder_layers, keep_layers, most_influential, trim_vocabulary
from training.texts import Chat
from training.vocabulary import DraftVocabulary, most_used

_INFLUENCE_CHATS = 16
_LAYERS_OF_TARGET = 8  # a drafter has one layer for that many of its target


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """What a drafter starts from."""

    target: str
    model: str | None = None  # None: layers of the target
    layers: int | None = None  # None: one for 8 of the target's
    vocabulary: int | None = 8192  # tokens to keep, beside the special ones; None: all
    device: str = "auto"


def write_start(options: StartOptions, chats: Sequence[Chat], special_tokens: Sequence[int], folder: Path) -> str:
    """Write the untrained drafter into a new folder, and return a line that says what it has of which model.

    Raises:
        ConfigError: a model can't be loaded or pruned.
    """
    path = options.model or options.target
    model = load_model(ModelSpec(name="start", path=path, dtype="float32", device=options.device))
    vocabulary = DraftVocabulary.load(Path(path))
    said = f"all layers of {path}"
    if options.model is None or options.layers is not None:
        kept = _chosen_layers(model, options.layers, vocabulary, chats)
        said = f"layers {', '.join(map(str, kept))} of {path}"
        model = keep_layers(model, kept)
    size = model.get_input_embeddings().num_embeddings
    if vocabulary.token_ids is None and options.vocabulary is not None and options.vocabulary < size:
        vocabulary = DraftVocabulary(most_used(chats, options.vocabulary, special_tokens))
        assert vocabulary.token_ids is not None
        model = trim_vocabulary(model, vocabulary.token_ids.tolist())
    with whole_folder(folder) as unfinished:
        model.save_pretrained(unfinished)
        vocabulary.save(unfinished)
    tokens = size if vocabulary.token_ids is None else len(vocabulary.token_ids)
    return f"{said}, {tokens:,} tokens, {model.num_parameters():,} parameters"


def load_start(folder: Path) -> tuple[PreTrainedModel, DraftVocabulary]:
    """Load a model that `write_start` wrote, in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, DraftVocabulary.load(folder)


def _chosen_layers(
    model: PreTrainedModel, count: int | None, vocabulary: DraftVocabulary, chats: Sequence[Chat]
) -> list[int]:
    """Return the most influential layers, the first and the last always among them if two are kept."""
    layers = len(decoder_layers(model))
    if count is not None and not 1 <= count <= layers:
        raise ConfigError(f"--layers is {count}, and the model has {layers}: keep 1 to {layers}")
    texts = [torch.tensor([[*chat.prompt, *chat.tokens]]) for chat in chats[:_INFLUENCE_CHATS]]
    influence = block_influence(model, map(vocabulary.read, texts))
    infinite = float("inf")
    ranked = [infinite, *influence[1:-1], infinite][:layers]
    return most_influential(ranked, count or max(round(layers / _LAYERS_OF_TARGET), min(2, layers)))
