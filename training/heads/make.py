"""Heads for a target, from nothing but the target: texts, its hidden states along them, distillation, a report.

Each stage leaves whole files in the work folder and is skipped where they are, so a run that was killed at any moment
goes on. Must not know the command line.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

import torch
from transformers import PreTrainedModel

from actors.replica.replica import load_runner
from decoding.errors import ConfigError
from engine.heads.checkpoint import HeadsCheckpoint
from engine.loading.checkpoint import ModelSpec, load_model
from training.distillation.lessons import Lessons
from training.distillation.loop import distil
from training.distillation.rates import held_out_rates
from training.distillation.report import StudentReport
from training.distillation.text_stage import (
    TEXTS,
    Report,
    TargetOptions,
    fitted,
    load_target_tokenizer,
    special_tokens,
    write_missing,
)
from training.distillation.vocabulary import most_used
from training.files import whole_folder
from training.heads.features import StoredFeatures, stored_features, write_features
from training.heads.options import HeadsOptions
from training.heads.start import choose_layers, load_given, new_heads, read_start_checkpoint
from training.heads.step_times import measure_heads
from training.texts import split

_ROWS = 16  # texts that the target runs at once
_MADE = {"eagle3": "EAGLE-3 head", "medusa": "Medusa heads"}


def train_heads(options: HeadsOptions, *, report: Report) -> None:
    """Make heads for `options.target` in the folder `options.output`.

    Raises:
        ConfigError: the target, its tokenizer or the heads to start from can't be loaded, the output is not an empty
            folder, the work folder belongs to another target, there are no texts, or the disk is full.
    """
    if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
        raise ConfigError(f"--output {options.output} is there already: give another, or remove it")
    target, checkpoint = options.target, read_start_checkpoint(options)
    if checkpoint is not None:
        load_given(checkpoint, load_model(_model_spec(target)))  # before the texts, which take hours
    if target.threads is not None:
        torch.set_num_threads(target.threads)
    tokenizer = load_target_tokenizer(target.path)
    target = fitted(target)
    options = replace(options, target=target)
    training, held_out = write_missing(target, options.texts, options.work, tokenizer, report=report)
    model = load_model(_model_spec(target))
    given = None if checkpoint is None else load_given(checkpoint, model)
    layers = choose_layers(options, model) if given is None else given.layers
    features, held_out_features = split(_features(options, layers, report))
    if given is None:
        token_ids = most_used(training, options.vocabulary, _rows_of(model, special_tokens(tokenizer)))
        new = partial(new_heads, options, model, layers, token_ids, features)
    else:
        token_ids = given.token_ids
        new = partial(given.start, options, model)
    heads = new()
    report(f"start: {heads.parameters:,} parameters, {len(token_ids):,} tokens")
    lessons = Lessons(
        training,
        heads.student.vocabulary,
        tokens=options.tokens_per_step,
        longest=target.longest,
        seed=options.seed,
        features=features,
    )
    run = options.work / "runs" / _run_name(options, layers, len(training), checkpoint)
    distil(heads.student, lessons, options.distillation, run / "checkpoints", report=report)

    measure = partial(
        held_out_rates,
        chats=held_out,
        tokens=options.tokens_per_step,
        longest=target.longest,
        features=held_out_features,
        bfloat16=options.distillation.bfloat16,
    )
    with whole_folder(options.output) as unfinished:
        heads.save(unfinished)
        report("measuring the heads")
        StudentReport(
            made=_MADE[options.kind],
            command=f"consort train heads --kind {options.kind}",
            target=target.path,
            start=_start_in_words(options, layers, len(token_ids)),
            parameters=heads.parameters,
            settings=_settings(options, layers),
            texts=len(training),
            tokens=sum(len(chat.tokens) for chat in training),
            held_out_texts=len(held_out),
            before=measure(new().student),
            after=measure(heads.student),
            steps=measure_heads(target, unfinished, options.kind),
        ).write(unfinished)
    report(f"{options.output}: {heads.parameters:,} parameters; see report.md there")


def _features(options: HeadsOptions, layers: Sequence[int], report: Report) -> list[StoredFeatures]:
    """Let the target run along texts whose hidden states are missing, and return all."""
    target, texts = options.target, options.work / TEXTS
    folder = options.work / "features" / f"{'-'.join(map(str, layers))}-of-{target.longest}"
    runner = load_runner(
        ModelSpec(
            name="target",
            path=target.path,
            device=target.device,
            slots=_ROWS,
            max_length=target.longest,
            threads=target.threads,
        ),
        hidden_layers=layers,
    )
    for shards in write_features(runner, texts, folder, longest=target.longest):
        report(f"hidden states: {shards:,} shards")
    return stored_features(texts, folder, longest=target.longest)


def _model_spec(target: TargetOptions) -> ModelSpec:
    return ModelSpec(name="target", path=target.path, device=target.device, threads=target.threads)


def _start_in_words(options: HeadsOptions, layers: Sequence[int], tokens: int) -> str:
    start = "" if options.start is None else f"{options.start} and "
    states = "last states" if options.kind == "medusa" else f"states after {', '.join(map(str, layers))} layers"
    return f"{start}the {states} of {options.target.path}, {tokens:,} tokens"


def _rows_of(model: PreTrainedModel, tokens: Sequence[int]) -> list[int]:
    """Return the tokens that the target has rows for. A tokenizer may have more."""
    size = model.config.get_text_config(decoder=True).vocab_size
    return [token for token in tokens if token < size]


def _run_name(options: HeadsOptions, layers: Sequence[int], chats: int, checkpoint: HeadsCheckpoint | None) -> str:
    """Return a name that differs where the weights of the start or of a step would."""
    fixed = replace(options, distillation=replace(options.distillation, epochs=0, minutes=None))
    name = hashlib.sha256(repr((_settings(fixed, layers), chats)).encode())
    for _, tensor in sorted(checkpoint.tensors.items()) if checkpoint is not None else ():
        name.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return name.hexdigest()[:12]


def _settings(options: HeadsOptions, layers: Sequence[int]) -> dict[str, object]:
    """Return the settings that the weights depend on, by name."""
    distillation = asdict(options.distillation)
    for name in ("save_every_s", "report_every_s", "device"):
        del distillation[name]
    names = ("kind", "start", "vocabulary", "steps", "tokens_per_step", "seed")
    given = {name: getattr(options, name) for name in names}
    return {"target": options.target.path, "longest": options.target.longest, "layers": layers} | distillation | given
