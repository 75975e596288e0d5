"""Small tokenizers of other kinds than the bundled one, and texts that are hard to tokenize."""

import json
import math
from collections import Counter
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from decoding.tokenizers.text_aligner import Speller
from decoding.tokenizers.vocabulary import Vocabulary

ROOT = Path(__file__).parents[2]
UNKNOWN, BOS, EOS = "<unk>", "<s>", "</s>"
SENTENCEPIECE_ROLES = {UNKNOWN: "unk", BOS: "bos", EOS: "eos"}
BUNDLED_ROLES = {"<|pad|>": "pad", "<|begin|>": "bos", "<|end|>": "eos"} | {
    role: role for role in ("<|system|>", "<|user|>", "<|assistant|>")
}
HARD_TEXTS = [
    "naïve café — 漢字 漢語 👩‍👩‍👧 👍🏽 🇮🇱 שלום שלום é é",
    "def f(x):\n    return x['a']  # don't\n\n\n\tif  x:   y\n",
    "  two spaces, then\ttabs\t\tand 3.14159 — 12,345;\r\n(all of it)   ",
    "हिन्दी में लिखा हुआ पाठ, العربية أيضا",
]


@cache
def held_out_texts() -> list[str]:
    lines = (ROOT / "models" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [text for line in lines if isinstance(text := json.loads(line).get("prompt"), str)]


@cache
def bundled_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ROOT / "models" / "target" / "tokenizer.json"))


@cache
def sentencepiece_tokenizer() -> Tokenizer:
    """Train a tokenizer like Llama's: BPE, ▁ for a space and before a text, unknown characters as bytes."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    # The trainer's own choice of an alphabet breaks ties at random.
    counts = Counter("".join(held_out_texts()).replace(" ", "▁"))
    alphabet = sorted(counts, key=lambda character: (-counts[character], character))[:90]
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False, initial_alphabet=alphabet, limit_alphabet=90)
    trained.train_from_iterator(held_out_texts(), trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = [UNKNOWN, BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [tuple(merge) for merge in model["merges"]]
    ids = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([UNKNOWN, BOS, EOS])
    return tokenizer


@cache
def unigram_tokenizer() -> Tokenizer:
    """Make a tokenizer like T5's: a unigram model that can't spell unknown characters.

    The library's trainer depends on the order of its hash maps, which is another in each process.
    """
    counts = Counter[str]()
    for word in (f"▁{word}" for text in held_out_texts() for word in text.split(" ")):
        counts.update(word[start:end] for start in range(len(word)) for end in range(start + 1, len(word) + 1)[:8])
    pieces = sorted(counts, key=lambda piece: (len(piece) > 1, -counts[piece] * len(piece), piece))[:597]
    scores = [(piece, math.log(counts[piece] / counts.total())) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram([*((special, 0.0) for special in (UNKNOWN, BOS, EOS)), *scores], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([UNKNOWN, BOS, EOS])
    return tokenizer


@cache
def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    roles = SENTENCEPIECE_ROLES | BUNDLED_ROLES
    return Vocabulary.build(tokens, control={token: role for token, role in roles.items() if token in tokens})


@cache
def speller_of(tokenizer: Tokenizer) -> Speller:
    return Speller(vocabulary_of(tokenizer), lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
