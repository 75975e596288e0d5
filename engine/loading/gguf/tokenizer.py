"""Makes a tokenizer of the tokenizers library from a GGUF file.

A file has the tokens, their scores or merges, and the name of the way in which texts are split before merging
(`tokenizer.ggml.pre`, whose patterns are in llama.cpp's src/llama-vocab.cpp and the models' own tokenizer.json).
"""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, TokenizersBackend
from transformers.tokenization_utils_base import generate_merges

from decoding.errors import ConfigError
from engine.loading.gguf.header import Header

_SPACE = "▁"  # how SentencePiece writes it
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_ENDS_OF_TURNS = {  # for files, mostly older ones, that name the end of a text alone
    *("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|EOT|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>"),
}
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE_DIGITS = (rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",)
_ONE_DIGIT = (rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",)
_MARKS = (
    rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_TEKKEN = (rf"{_CASED % ('', '')}|\p{{N}}|{_CASED_REST}",)
_GPT_4O = (rf"{_CASED % (f'{_SHORTENED}?', f'{_SHORTENED}?')}|\p{{N}}{{1,3}}|{_CASED_REST}",)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_GPT_2: tuple[str, ...] = ()  # the library's own
_DIGITS_APART = (r"\p{N}",)  # and then as GPT-2
_LLAMA_3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "exaone4"), _GPT_2),
    **dict.fromkeys(("mellum", "a.x-4.0", "granite-docling"), _GPT_2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS_APART),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS_APART),
    **dict.fromkeys((*_LLAMA_3, "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"), _THREE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"), _ONE_DIGIT),
    "qwen35": _MARKS,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT_4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK),
}
_WHOLE_TOKENS_FIRST = {*_LLAMA_3, "tekken", "glm4", "glm5"}  # a word that is a token is not merged
_BEGIN = {*_LLAMA_3, "tekken"}  # begins texts with a token unless the file says otherwise


def make_tokenizer(header: Header) -> PreTrainedTokenizerBase:
    """Return a file's own tokenizer, with its chat template.

    Raises ConfigError if it has none, or one of an unknown kind.
    """
    fields = {key.removeprefix("tokenizer."): value for key, value in header.fields.items()}
    kind, split = fields.get("ggml.model"), fields.get("ggml.pre", "default")
    tokens: list[str] = fields.get("ggml.tokens", [])
    if not tokens:
        raise ConfigError("it has no tokenizer; put the model's tokenizer.json and tokenizer_config.json beside it")
    if kind == "gpt2":
        backend = _byte_level(tokens, fields["ggml.merges"], split)
    elif kind in ("llama", "gemma4"):
        backend = _sentence_piece(tokens, fields, header.architecture)
    else:
        raise _unsupported(f"tokenizer.ggml.model is {kind}")
    _add_whole(backend, tokens, fields.get("ggml.token_type", ()))
    named = {role: fields.get(f"ggml.{name}_token_id") for role, name in _ROLES.items()}
    roles = {role: tokens[number] for role, number in named.items() if number is not None}
    begins = fields.get("ggml.add_bos_token", kind == "llama" or (kind == "gpt2" and split in _BEGIN))
    ends = fields.get("ggml.add_eos_token", False)
    _frame(
        backend,
        roles.get("bos_token") if begins and kind != "gemma4" else None,  # its chat template writes it
        roles.get("eos_token") if ends else None,
    )
    return TokenizersBackend(
        tokenizer_object=backend,
        chat_template=fields.get("chat_template"),
        clean_up_tokenization_spaces=False,
        **{role: roles.get(role) for role in _ROLES},
    )


def end_tokens(header: Header) -> list[int]:
    """Return the tokens that end a text, a turn or a message: those that the file names, and well-known ones."""
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in header.fields.items()}
    named = [fields.get(f"{end}_token_id") for end in ("eos", "eot", "eom")]
    tokens: list[str] = fields.get("tokens", [])
    known = _ENDS_OF_TURNS - {"<|end|>"} if "<|return|>" in tokens else _ENDS_OF_TURNS  # there it ends a part of a turn
    marked = enumerate(zip(tokens, fields.get("token_type", ()), strict=False))
    by_name = [number for number, (token, kind) in marked if token in known and kind in (_CONTROL, _USER_DEFINED)]
    return list(dict.fromkeys(token for token in (*named, *by_name) if token is not None))


def _byte_level(tokens: Sequence[str], merges: Sequence[str], split: str) -> Tokenizer:
    """Return a tokenizer that merges bytes, each of which is written as a character."""
    if split not in _SPLITS:
        raise _unsupported(f"tokenizer.ggml.pre is {split}")
    pairs: Any = [tuple(merge.split(" ")) for merge in merges]
    whole = split in _WHOLE_TOKENS_FIRST
    backend = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, pairs, ignore_merges=whole))
    patterns, as_gpt2 = _SPLITS[split], _SPLITS[split] in (_GPT_2, _DIGITS_APART)
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=as_gpt2))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(tokens: Sequence[str], fields: dict[str, Any], architecture: str) -> Tokenizer:
    """Return a tokenizer that merges characters; characters that are no token become bytes."""
    is_gemma = architecture.startswith("gemma")
    if is_gemma:  # files have spaces where the model's own tokenizer has this character
        tokens = [_SPACE * len(token) if token.isspace() and not token.strip(" ") else token for token in tokens]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if "ggml.merges" in fields:
        pairs: Any = [tuple(merge.split(" ")) for merge in fields["ggml.merges"]]
    else:  # the order of Gemma's tokens says in which order they were learned, their scores do not
        scores = [-number for number in range(len(tokens))] if is_gemma else fields["ggml.scores"]
        pairs = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)))
    unknown = fields.get("ggml.unknown_token_id")
    model = BPE(
        vocabulary, pairs, fuse_unk=True, byte_fallback=True, unk_token=None if unknown is None else tokens[unknown]
    )
    backend, has_prefix = Tokenizer(model), fields.get("ggml.add_space_prefix", not is_gemma)
    if architecture == "phi3":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    elif has_prefix:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", left=1)] if has_prefix else steps)
    return backend


def _add_whole(backend: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Let texts be split first at the tokens that the file marks."""
    vocabulary = backend.get_vocab()
    marked = [(token, kind) for token, kind in zip(tokens, kinds, strict=False) if token in vocabulary]
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in marked if kind == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token, kind in marked if kind == _USER_DEFINED]
    )


def _frame(backend: Tokenizer, begin: str | None, end: str | None) -> None:
    """Put tokens before and after each text."""
    around = [token for token in (begin, "$A", end) if token is not None]
    if len(around) > 1:
        named = [(token, backend.token_to_id(token)) for token in {begin, end} if token is not None]
        pair = " ".join([*around, *(f"{token.replace('$A', '$B')}:1" for token in around)])
        backend.post_processor = processors.TemplateProcessing(single=" ".join(around), pair=pair, special_tokens=named)


def _unsupported(problem: str) -> ConfigError:
    return ConfigError(
        f"its tokenizer is not supported ({problem}); put the model's tokenizer.json and "
        "tokenizer_config.json beside it"
    )
