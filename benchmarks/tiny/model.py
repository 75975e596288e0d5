"""The bundled models: their tokenizer, their first weights, next-token training for a given time, and their folders."""

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Muon, Optimizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.tiny.corpus import Document
from benchmarks.tiny.stream import Recipe, Stream
from training.files import whole_folder

VOCABULARY = 2048
CONTEXT = 1024
PAD, BOS, EOS = "<|pad|>", "<|begin|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
HEAD = 64
WARM_UP_SHARE = 0.02
DECAY_SHARE = 0.35
FINAL_SCALE = 0.02
TOKENS_PER_STEP = 4096
LENGTHS = ((0.55, 256), (0.9, 512), (1.0, 1024))
SAVE_EVERY_STEPS = 250
_HELD_OUT_LENGTH = 512  # tokens of a row


def train_tokenizer(documents: Sequence[Document]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of exactly `VOCABULARY` tokens that puts BOS before plain text."""
    kinds = ("library", "topics")
    texts = [document.text for document in documents if document.kind in kinds and not document.held_out]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", f"{BOS} $A {BOS} $B", [bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model folder."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    for argument in ("is_local", "local_files_only"):  # of this call, which would be saved with the tokenizer
        tokenizer.init_kwargs.pop(argument, None)
    return tokenizer


def build(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Create a float32 model with tied embeddings, GPT-2's initialisation and heads of size 64."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.hidden // HEAD,
        num_key_value_heads=recipe.kv_heads,
        head_dim=HEAD,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    generator = torch.Generator().manual_seed(recipe.seed)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    return model


def bfloat16_copy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a copy to publish: bfloat16 weights, and a generation config with the end token."""
    copy = deepcopy(model).bfloat16()
    copy.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return copy


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights, configuration and tokenizer into a folder, in place of what was there."""
    with whole_folder(folder) as unfinished:
        model.save_pretrained(unfinished, max_shard_size="2GB")
        tokenizer.save_pretrained(unfinished)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Load a saved model."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    assert isinstance(model, LlamaForCausalLM)
    return model


class TimedOptimizer:
    """Optimizers whose learning rate warms up, stays constant, then decays linearly over the given minutes."""

    def __init__(self, model: nn.Module, *, minutes: float, muon_rate: float, adam_rate: float) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        muon = Muon(matrices, lr=muon_rate, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
        adam = AdamW(others, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._optimizers: list[tuple[Optimizer, float]] = [(muon, muon_rate), (adam, adam_rate)]
        self._parameters = list(model.parameters())
        self._seconds = 60 * minutes
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Share of the minutes that has passed; above 1 after the end."""
        return (time.monotonic() - self._start) / self._seconds

    def step(self) -> None:
        """Apply the gradients at the current learning rate, and clear them."""
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        scale = min(self.elapsed / WARM_UP_SHARE, 1.0, (1.0 - self.elapsed) / DECAY_SHARE)
        for optimizer, rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * max(scale, FINAL_SCALE)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def pretrain(
    model: LlamaForCausalLM,
    stream: Stream,
    *,
    minutes: float,
    save: Callable[[], None],
    report: Callable[[str], None],
) -> None:
    """Train until the time is over. Rows grow from 256 to 1024 tokens; `save` is called every few hundred steps."""
    optimizer = TimedOptimizer(model, minutes=minutes, muon_rate=0.008, adam_rate=0.003)
    model.train()
    step = 0
    while optimizer.elapsed < 1.0:
        length = next(length for until, length in LENGTHS if optimizer.elapsed < until)
        loss = cross_entropy(model, stream.rows(TOKENS_PER_STEP // length, length))
        loss.backward()
        optimizer.step()
        step += 1
        if step % 10 == 0:
            report(f"step {step} elapsed {optimizer.elapsed:.3f} rows of {length} loss {loss.item():.4f}")
        if step % SAVE_EVERY_STEPS == 0:
            save()
    save()


def cross_entropy(model: LlamaForCausalLM, rows: Tensor) -> Tensor:
    """Return the mean next-token loss in nats. rows: [B, T] int64."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(rows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, pieces: Sequence[Sequence[int]]) -> float:
    """Return the mean next-token loss in nats over held-out pieces, packed in rows."""
    flat = torch.tensor([token for piece in pieces for token in piece])
    rows = flat[: len(flat) // _HELD_OUT_LENGTH * _HELD_OUT_LENGTH].view(-1, _HELD_OUT_LENGTH)
    losses = [cross_entropy(model, batch).item() * len(batch) for batch in rows.split(16)]
    return sum(losses) / len(rows)
