"""The bundled models' tokenizer, and model folders with it, which are written whole."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training.files import whole_folder
from training.tiny.corpus import Turn

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


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of exactly `VOCABULARY` tokens that puts BOS before plain text."""
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


def conversation_text(turns: Sequence[Turn]) -> str:
    """Return a conversation as the chat template writes it, without the leading BOS."""
    return "".join(f"<|{turn.role}|>{turn.text}{EOS}" for turn in turns)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model folder."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    for argument in ("is_local", "local_files_only"):  # of this call, which would be saved with the tokenizer
        tokenizer.init_kwargs.pop(argument, None)
    return tokenizer


def build(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden: int,
    layers: int,
    intermediate: int,
    kv_heads: int,
    seed: int,
) -> LlamaForCausalLM:
    """Create a float32 model with tied embeddings, GPT-2's initialisation and heads of size 64."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=kv_heads,
        head_dim=HEAD,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    generator = torch.Generator().manual_seed(seed)
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
