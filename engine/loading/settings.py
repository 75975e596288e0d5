"""What the small files of a checkpoint say: its tokenizer, its recommended sampling, the limits of its texts.

Importing transformers' models takes seconds, and a coordinator runs none. Even its classes of
configurations and its AutoTokenizer import them, so converted GGUF files do without these where the general classes do.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    TokenizersBackend,
)
from transformers.utils.hub import cached_file

from decoding.errors import ConfigError
from engine.loading.gguf.files import is_gguf, settings_folder

TARGET_VOCABULARY_KEY = "target_vocab_size"  # in config.json: V of the target
MAX_LENGTH = 32_768  # tokens of a request where the configuration names no other number
_NEEDED = {"vocab_size", "max_position_embeddings"}  # keys by which the general class answers
_LENGTH_DEPENDENT = ("dynamic", "longrope")  # rotary positions that change with the text's length


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """A checkpoint's recommended settings, named as in SamplingParams; None: no recommendation."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    max_tokens: int | None = None

    def given(self) -> dict[str, float]:
        """Return the settings that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def load_tokenizer(
    path: str, revision: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a checkpoint's tokenizer and its chat template.

    Raises ConfigError if there is none, or it can't be loaded.
    """
    tokenizer: PreTrainedTokenizerBase
    try:
        folder = settings_folder(path)
        if is_gguf(path) and _class_of_tokenizer(Path(folder)) == TokenizersBackend.__name__:
            tokenizer = TokenizersBackend.from_pretrained(folder)
            return tokenizer
        tokenizer = AutoTokenizer.from_pretrained(folder, revision=revision, trust_remote_code=trust_remote_code)
        if tokenizer.chat_template is None:
            tokenizer.chat_template = _template_of_processor(folder, revision)
    except (ConfigError, OSError, ValueError, ImportError) as error:
        raise ConfigError(f"can't load the tokenizer of {path!r}: {error}") from error
    return tokenizer


def _template_of_processor(folder: str, revision: str | None) -> str | None:
    """Return the chat template of a multimodal checkpoint's processor, if it is the only one."""
    file = cached_file(folder, "chat_template.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if file is None else json.loads(Path(file).read_text(encoding="utf-8")).get("chat_template")


def _class_of_tokenizer(folder: Path) -> str | None:
    """Return the class that a tokenizer's own file names, if it has one."""
    file = folder / "tokenizer_config.json"
    return json.loads(file.read_text(encoding="utf-8")).get("tokenizer_class") if file.is_file() else None


def read_header(path: str, revision: str | None = None, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return a checkpoint's configuration, for `vocabulary_size`, `is_trimmed` and `context_length`.

    Raises ConfigError, OSError, ValueError if it can't be read.
    """
    folder = settings_folder(path)
    if is_gguf(path):
        header, _ = PretrainedConfig.get_config_dict(folder)
        if header.keys() >= _NEEDED:
            return PretrainedConfig.from_dict(header)
    config: PretrainedConfig = AutoConfig.from_pretrained(
        folder, revision=revision, trust_remote_code=trust_remote_code
    )
    return config


def load_end_tokens(path: str, revision: str | None = None, *, trust_remote_code: bool = False) -> list[int]:
    """Return the end tokens of a checkpoint's generation configuration, in their order."""
    ends = _generation_config(path, revision, trust_remote_code=trust_remote_code).eos_token_id
    return [] if ends is None else ends if isinstance(ends, list) else [ends]


def load_sampling_defaults(
    path: str, revision: str | None = None, *, trust_remote_code: bool = False
) -> SamplingDefaults:
    """Return the settings in a checkpoint's generation configuration.

    An explicit `do_sample: false` means temperature 0; without it, the request decides.
    """
    config = _generation_config(path, revision, trust_remote_code=trust_remote_code)
    given = {field.name: getattr(config, field.name, None) for field in fields(SamplingDefaults)}
    given["max_tokens"] = config.max_new_tokens
    if config.do_sample is False:
        given["temperature"] = 0.0
    return SamplingDefaults(**given)


def _generation_config(path: str, revision: str | None, *, trust_remote_code: bool) -> GenerationConfig:
    """Return a checkpoint's generation configuration; without one what config.json says, as transformers does."""
    try:
        return GenerationConfig.from_pretrained(settings_folder(path), revision=revision or "main")
    except OSError:  # many checkpoints have none
        pass
    try:
        return GenerationConfig.from_model_config(read_header(path, revision, trust_remote_code=trust_remote_code))
    except (ConfigError, OSError, ValueError):  # whoever needs the model says why it can't be read
        return GenerationConfig()


def vocabulary_size(config: PretrainedConfig) -> int:
    """Return V, how many logits a served model has: as many as its target, if its own vocabulary is trimmed."""
    text = config.get_text_config(decoder=True)
    return int(getattr(text, TARGET_VOCABULARY_KEY, None) or text.vocab_size)


def is_trimmed(config: PretrainedConfig) -> bool:
    """Whether it is the configuration of a drafter with a trimmed vocabulary."""
    return getattr(config.get_text_config(decoder=True), TARGET_VOCABULARY_KEY, None) is not None


def context_length(config: PretrainedConfig, wanted: int | None) -> int:
    """Return the most tokens of a request. wanted: as configured; None: as many as the model can tell apart."""
    if wanted is not None:
        return wanted
    text = config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None) or MAX_LENGTH
    return min(int(positions), MAX_LENGTH, *(length for _, length in length_limits(text)))


def length_limits(config: PretrainedConfig) -> Iterator[tuple[str, int]]:
    """Yield what a runner can't compute beyond a length, in words, and that length in tokens."""
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, Mapping)]
    for rope in by_layer or [parameters]:
        kind = str(rope.get("rope_type", "default"))
        if kind in _LENGTH_DEPENDENT:
            original = rope.get("original_max_position_embeddings") if kind == "longrope" else None
            length = int(original or config.max_position_embeddings)
            yield f"its rotary positions ({kind}) change with the length of the text", length
