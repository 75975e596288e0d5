"""Finetuning on chats or texts with low-rank adapters: transformers' Trainer on peft's layers, resumable.

LoRA: Hu et al., arXiv 2106.09685. Chats and texts are read from a file with one JSON object per line.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from decoding.errors import ConfigError
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.gguf.files import settings_folder
from engine.loading.settings import is_trimmed, load_tokenizer
from training.files import whole_folder

IGNORED = -100  # the label of a token that is not learned, as transformers has it
_ROLES = ("system", "developer", "user", "assistant", "tool")
_EXPECTED = 'give {"messages": [{"role": …, "content": …}, …]} or {"text": …}'
_RUN = "finetune.json"  # which run the checkpoints beside it are of
_STATE = "trainer_state.json"  # the Trainer writes it last
_STEPS_PER_REPORT = 10


@dataclass(frozen=True, slots=True)
class Example:
    """A chat, or a text if there are no messages."""

    line: int  # in its file, from 1
    messages: Sequence[Mapping[str, str]] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens, and which of them are learned."""

    tokens: list[int]  # [T]
    labels: list[int]  # [T]: the same, or IGNORED


def read_examples(file: Path) -> list[Example]:
    """Return the examples of a JSONL file without its empty lines. Raises ConfigError with the number of a bad line."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: can't be read: {error}") from error
    examples = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                examples.append(_parse(number, line))
            except ValueError as error:
                raise ConfigError(f"{file}, line {number}: {error}") from error
    if not examples:
        raise ConfigError(f"{file}: has no examples; {_EXPECTED} on each line")
    return examples


def encode(example: Example, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Row]:
    """Return rows of at most `max_length` tokens. Of chats, only what the assistant says is learned.

    A chat is one row if its template writes a turn in the same way when others follow. If not, each turn of the
    assistant is a row of its own, with all before it. What is too long is cut at the end.

    Raises ConfigError if the tokenizer has no chat template, or it refuses the chat.
    """
    if not example.messages:
        tokens: list[int] = tokenizer(example.text, verbose=False)["input_ids"]
        if tokenizer.eos_token_id is not None and tokens[-1:] != [tokenizer.eos_token_id]:
            tokens.append(tokenizer.eos_token_id)
        return [Row(tokens[:max_length], tokens[:max_length])]
    try:
        answers = [index for index, message in enumerate(example.messages) if message["role"] == "assistant"]
        spans = [_span(example, index, tokenizer) for index in answers]
    except (ValueError, TemplateError) as error:
        raise ConfigError(f"line {example.line}: the chat template refuses it: {error}") from error
    whole = spans[-1][0]
    if all(whole.startswith(text) for text, _ in spans):
        spans_of_rows = [(whole, [(start, len(text)) for text, start in spans])]
    else:
        spans_of_rows = [(text, [(start, len(text))]) for text, start in spans]
    rows = [_row(text, learned, tokenizer, max_length) for text, learned in spans_of_rows]
    return [row for row in rows if any(label != IGNORED for label in row.labels)]


def _parse(number: int, line: str) -> Example:
    """Return a line's example; raises ValueError with the reason why it is none."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(value, dict) or ("messages" in value) == ("text" in value):
        raise ValueError(f"is neither a chat nor a text; {_EXPECTED}")
    if "text" in value:
        if not isinstance(value["text"], str) or not value["text"]:
            raise ValueError("text must be a string that is not empty")
        return Example(number, text=value["text"])
    messages = value["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message")
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError("messages has no turn of the assistant, so there is nothing to learn")
    return Example(number, messages=messages)


def _check_message(name: str, message: object) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"{name} must be an object with role and content")
    if message.get("role") not in _ROLES:
        raise ValueError(f"{name}.role must be one of {', '.join(_ROLES)}, not {message.get('role')!r}")
    if not isinstance(message.get("content"), str):
        raise ValueError(f"{name}.content must be a string")


def _span(example: Example, index: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """Return a chat up to a turn of the assistant, as its template writes it, and where that turn starts."""
    if not tokenizer.chat_template:
        raise ConfigError(f"line {example.line} is a chat, but the model's tokenizer has no chat template; give texts")
    messages = [dict(message) for message in example.messages[: index + 1]]
    before = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    pairs = zip(str(before), str(text), strict=False)
    return str(text), len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _row(text: str, learned: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Row:
    """Return the tokens of a text. learned: where the characters to learn start and end."""
    if not tokenizer.is_fast:
        raise ConfigError("chats need a fast tokenizer (tokenizer.json), which tells where each token is; give texts")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens: list[int] = encoded["input_ids"][:max_length]
    labels = [
        token if any(start <= first < end for start, end in learned) else IGNORED
        for token, (first, _) in zip(tokens, encoded["offset_mapping"], strict=False)
    ]
    return Row(tokens, labels)


def add_lora(model: PreTrainedModel, rank: int, *, seed: int) -> PreTrainedModel:
    """Return the model with its weights frozen and trainable adapters in all its linear layers but the last."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("--lora needs peft: pip install 'consort[lora]'") from error
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # peft initialises from the global generator
        return cast(PreTrainedModel, get_peft_model(model, config))


def merge_lora(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with its adapters added to its weights."""
    adapted: Any = model
    return cast(PreTrainedModel, adapted.merge_and_unload())


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneOptions:
    """What is trained, on what machine, and where the results go."""

    model: str  # a local folder, a .gguf file or a Hub id
    output: Path
    work: Path  # for checkpoints
    rank: int = 16
    keep_adapter: bool = False  # write the adapter alone, not merged into the model
    epochs: float = 3.0
    learning_rate: float = 2e-4
    batch_size: int = 8  # rows of a step
    max_length: int = 1024  # tokens of a row
    save_steps: int = 50  # between two checkpoints
    threads: int | None = None
    device: str = "auto"
    seed: int = 0


def finetune(options: FinetuneOptions, examples: Sequence[Example], report: Callable[[str], None]) -> None:
    """Train adapters on the examples, and write the model or the adapter to `options.output`, whole or not at all.

    The same call goes on from the last checkpoint in `options.work`, where checkpoints are removed at the end. Its
    results are then those of a run that was not interrupted.

    Raises ConfigError if the model can't be loaded or trained, an example can't be encoded, `work` has checkpoints of a
    run with other settings, or the disk is full.
    """
    if options.output.exists():
        raise ConfigError(f"{options.output} exists already; name a new folder")
    if find_spec("peft") is None:
        raise ConfigError("finetuning needs peft: pip install 'consort[lora]'")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer(options.model)
    rows = [row for example in examples for row in encode(example, tokenizer, max_length=options.max_length)]
    if not rows:
        raise ConfigError(f"nothing is learned within {options.max_length} tokens: raise --max-length")
    labels = [label for row in rows for label in row.labels]
    learned = sum(label != IGNORED for label in labels)
    report(f"{len(examples)} examples, {len(labels):,} tokens, {learned:,} learned")
    _check_run(options, rows)
    model = _load(options)
    adapted = add_lora(model, options.rank, seed=options.seed)
    trainable = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    report(f"{options.model}: {model.num_parameters():,} parameters, {trainable:,} of them trained")
    _train(adapted, rows, options, report)
    with whole_folder(options.output) as folder:
        if options.keep_adapter:
            adapted.save_pretrained(folder)
        else:
            merged: Any = merge_lora(adapted)
            stored = AutoConfig.from_pretrained(settings_folder(options.model)).dtype or torch.float32
            merged.to(stored).save_pretrained(folder, max_shard_size="2GB")
            tokenizer.save_pretrained(folder)
    for checkpoint in _checkpoints(options.work):
        shutil.rmtree(checkpoint, ignore_errors=True)
    (options.work / _RUN).unlink(missing_ok=True)
    with suppress(OSError):
        options.work.rmdir()  # if nothing else is in it


def _load(options: FinetuneOptions) -> PreTrainedModel:
    spec = ModelSpec(name="model", path=options.model, dtype="float32", device=options.device, unpacked=True)
    model = load_model(spec)
    if is_trimmed(model.config):
        raise ConfigError(f"{options.model} is a drafter with a trimmed vocabulary; `consort train drafter` trains it")
    if getattr(model.config, "quantization_config", None) is not None:
        raise ConfigError(f"{options.model} is quantised; finetune the checkpoint that it was made from")
    return model


def _check_run(options: FinetuneOptions, rows: Sequence[Row]) -> None:
    """Note which run the checkpoints are of. Raises ConfigError if there are some of another."""
    settings = asdict(options)
    for name in ("output", "work", "keep_adapter", "save_steps", "threads"):  # they may change
        del settings[name]
    data = hashlib.sha256(repr([(row.tokens, row.labels) for row in rows]).encode()).hexdigest()
    run = json.dumps(settings | {"data": data})
    file = options.work / _RUN
    known = file.read_text(encoding="utf-8") if file.exists() else None
    if known != run and _checkpoints(options.work):
        raise ConfigError(
            f"{options.work} has checkpoints of other settings or data; remove them, or give another --work"
        )
    options.work.mkdir(parents=True, exist_ok=True)
    file.write_text(run, encoding="utf-8")


def _checkpoints(work: Path) -> list[Path]:
    return [folder for folder in work.glob("checkpoint-*") if folder.name.split("-")[1].isdigit() and folder.is_dir()]


def _last_checkpoint(work: Path) -> Path | None:
    """Return the newest checkpoint that was written to its end."""
    whole = [folder for folder in _checkpoints(work) if _is_json(folder / _STATE)]
    return max(whole, key=lambda folder: int(folder.name.split("-")[1]), default=None)


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _train(
    model: PreTrainedModel, rows: Sequence[Row], options: FinetuneOptions, report: Callable[[str], None]
) -> None:
    arguments = TrainingArguments(
        output_dir=str(options.work),
        num_train_epochs=options.epochs,
        learning_rate=options.learning_rate,
        per_device_train_batch_size=options.batch_size,
        lr_scheduler_type="cosine",
        warmup_steps=0.03,  # below 1: a share of all steps
        seed=options.seed,
        use_cpu=model.device.type == "cpu",
        logging_steps=_STEPS_PER_REPORT,
        save_steps=options.save_steps,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, data_collator=_batch, train_dataset=list(rows), callbacks=[_Progress(report)])
    trainer.remove_callback(PrinterCallback)
    checkpoint = _last_checkpoint(options.work)
    if checkpoint is not None:
        report(f"going on after step {checkpoint.name.split('-')[1]}")
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))


def _batch(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Return the rows of a step, padded, [B, T] each."""
    tokens = pad_sequence([torch.tensor(row.tokens) for row in rows], batch_first=True)
    labels = pad_sequence([torch.tensor(row.labels) for row in rows], batch_first=True, padding_value=IGNORED)
    lengths = torch.tensor([len(row.tokens) for row in rows])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


class _Progress(TrainerCallback):
    """Reports the loss now and then."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def on_log(self, args: Any, state: TrainerState, control: Any, **given: Any) -> None:
        loss = given["logs"].get("loss")
        if loss is not None:
            self._report(f"step {state.global_step} of {state.max_steps}, epoch {state.epoch:.2f}: loss {loss:.4f}")
