"""A drafter for a target, from nothing but the target: parts of it, or a small model, trained on its texts."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from decoding.errors import ConfigError
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.draft_vocabulary import FILE, save_draft_vocabulary
from engine.loading.gguf.files import settings_folder
from engine.loading.settings import is_trimmed, load_tokenizer, vocabulary_size
from training.distillation.lessons import Batch, StudentVocabulary, most_used
from training.distillation.run import Made, RunOptions, StudentRun, time_drafter
from training.files import whole_folder
from training.finetune import add_lora, merge_lora
from training.pruning import block_influence, decoder_layers, keep_layers, most_influential, trim_vocabulary
from training.texts import Chat, Report, special_tokens

_BETAS = (0.9, 0.95)
_DECAY = 0.01
_INFLUENCE_CHATS = 16
_LAYERS_OF_TARGET = 8
_TEXT = "start.txt"  # says what the start is


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions:
    """How to make a drafter."""

    run: RunOptions
    model: str | None = None  # to start from; None: the target
    layers: int | tuple[int, ...] | None = None  # so many, or these; None: one for 8 of the target, all of another
    vocabulary: int | None = 8192  # tokens to keep, beside the special ones; None: all
    lora_rank: int | None = None  # None: all weights are trained

    def settings(self) -> dict[str, object]:
        """Return the settings that the weights depend on, by name."""
        names = ("model", "layers", "vocabulary", "lora_rank")
        return {"device": self.run.target.device} | {name: getattr(self, name) for name in names}


def train_drafter(options: DrafterOptions, *, report: Report) -> None:
    """Make a drafter for the target. Without epochs it is what training would start from.

    Raises ConfigError as `StudentRun` does, or if the model to start from can't be loaded or pruned.
    """
    run = StudentRun(options.run, report=report)
    folder = run.folder(options.settings())
    start = folder / "start"
    if not start.exists():
        write_start(options, run.texts.training, special_tokens(run.tokenizer), start)
    model, vocabulary, beginning = load_start(start)
    report(f"start: {beginning}")
    before = run.rates(DrafterStudent(model, vocabulary))
    rank = options.lora_rank
    trained = model if rank is None else add_lora(model, rank, seed=options.run.seed)
    run.distil(DrafterStudent(trained, vocabulary), folder)
    drafter = trained if rank is None else merge_lora(trained)
    run.finish(
        Made(
            student=DrafterStudent(drafter, vocabulary),
            name="Drafter",
            command="consort train drafter",
            start=beginning,
            parameters=drafter.num_parameters(),
            settings=options.settings(),
            before=before,
            save=partial(_save, drafter, start, run.tokenizer),
            time_steps=partial(time_drafter, run.options.target),
        )
    )


def _save(model: PreTrainedModel, start: Path, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    deepcopy(model).bfloat16().save_pretrained(folder)
    _copy_vocabulary(start, folder)
    tokenizer.save_pretrained(folder)


class DrafterStudent:
    """A `Student`. Along the teacher's text its draft of a token depends on the text alone, so one step says all."""

    def __init__(self, model: PreTrainedModel, vocabulary: StudentVocabulary) -> None:
        self.module: nn.Module = model
        self.vocabulary = vocabulary

    def steps(self, share: float) -> int:
        return 1

    def optimizers(self, learning_rate: float) -> list[Optimizer]:
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        return [AdamW(trained, lr=learning_rate, betas=_BETAS, weight_decay=_DECAY, fused=True)]

    def drafts(self, module: nn.Module, batch: Batch, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        logits = counted_logits(module, batch.tokens, batch.counted)[:, : self.vocabulary.drafted]
        for step in range(steps):
            starts = batch.starts(step)
            yield starts, logits if step == 0 else logits[starts + step]


def counted_logits(model: nn.Module, tokens: Tensor, counted: Tensor, **options: Any) -> Tensor:
    """Return the logits where an answer's token follows, [N, V]. The output layer computes no others.

    tokens: [B, T] int64, rows of the model's vocabulary. counted: [B, T] bool. options: of the model's call.
    """
    inner: Any = getattr(model, "module", model)
    head = inner.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][counted],))
    try:
        logits: Tensor = model(input_ids=tokens, **{"use_cache": False} | options).logits
    finally:
        handle.remove()
    return logits


def write_start(options: DrafterOptions, chats: Sequence[Chat], special_tokens: Sequence[int], folder: Path) -> None:
    """Write the untrained drafter and a line that says what it is into a new folder.

    Raises ConfigError if a model can't be loaded or pruned, or the given model has other tokens than the target.
    """
    target = options.run.target
    path = options.model or target.path
    if path != target.path and load_tokenizer(path).get_vocab() != load_tokenizer(target.path).get_vocab():
        raise ConfigError(f"--from {path} has other tokens than {target.path}: a drafter is trained on its target's")
    model, vocabulary = load_student(
        ModelSpec(name="start", path=path, dtype="float32", device=target.device, unpacked=True)
    )
    text = f"all layers of {path}"
    if options.model is None or options.layers is not None:
        layers = options.layers
        kept = layers if isinstance(layers, tuple) else _chosen_layers(model, layers, vocabulary, chats)
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
                _copy_vocabulary(Path(path), unfinished)
            else:
                save_draft_vocabulary(tokens, unfinished)


def load_start(folder: Path) -> tuple[PreTrainedModel, StudentVocabulary, str]:
    """Load what `write_start` wrote: a float32 model, its vocabulary, and a line that says what it is."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, StudentVocabulary.of_model(model, str(folder)), (folder / _TEXT).read_text(encoding="utf-8")


def load_student(spec: ModelSpec) -> tuple[PreTrainedModel, StudentVocabulary]:
    """Load a model as `load_model` does, but without the translation of ids that serving adds to a trimmed vocabulary.

    A trimmed model is loaded in float32, to the CPU.
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


def _copy_vocabulary(source: Path, folder: Path) -> None:
    if (source / FILE).exists():
        (folder / FILE).write_bytes((source / FILE).read_bytes())


def _chosen_layers(
    model: PreTrainedModel, layers: int | None, vocabulary: StudentVocabulary, chats: Sequence[Chat]
) -> Sequence[int]:
    """Return so many of the most influential layers, among them the first and the last."""
    count = len(decoder_layers(model))
    if layers is None:
        layers = max(round(count / _LAYERS_OF_TARGET), min(2, count))
    texts = (torch.tensor([[*chat.prompt, *chat.tokens]]) for chat in chats[:_INFLUENCE_CHATS])
    influence = block_influence(model, map(vocabulary.read, texts))
    return most_influential([inf, *influence[1:-1], inf][:count], layers)
