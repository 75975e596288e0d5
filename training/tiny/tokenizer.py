"""The byte-level BPE tokenizer that all bundled models share. Must not know about models."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

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
