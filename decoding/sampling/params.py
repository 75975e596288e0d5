"""Sampling and stopping parameters of a request."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from decoding.errors import require

MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_LOGPROBS = 100
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.001, 100

Verification = Literal["coupled", "rejection"]
StructureKind = Literal["json", "regex", "choice", "grammar"]


class Traits(NamedTuple):
    """Which processors act on a request."""

    common: frozenset[str]  # of "top_k", "top_p" and "min_p", with "temperature"; none if the request is greedy
    top_k: int  # 0 if the request is greedy
    has_cutoffs: bool  # typical_p, epsilon_cutoff or eta_cutoff; False if the request is greedy
    is_penalised: bool  # repetition, frequency or presence penalty
    may_forbid: bool  # tokens, grammars aside
    is_shaped: bool  # by any processor that depends on the text, grammars aside


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """A structure that the answer must match: JSON schema, regular expression, JSON list of texts, or Lark grammar."""

    kind: StructureKind
    definition: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request, named as in OpenAI's API, vLLM's extensions of it and transformers' `generate`.

    Raises:
        InvalidRequestError: a value is out of range; the error names the field.
    """

    # The distribution, in the order of the processors.
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, bias
    repetition_penalty: float = 1.0  # on tokens of prompt and answer; 1: off
    presence_penalty: float = 0.0  # on the answer's tokens; 0: off
    frequency_penalty: float = 0.0  # on the answer's tokens, per occurrence; 0: off
    no_repeat_ngram_size: int = 0  # no n-gram occurs twice; 0: off
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # forbidden token sequences
    min_tokens: int = 0  # no end token before this length
    allowed_token_ids: tuple[int, ...] = ()  # all others are forbidden; empty: off
    forced_bos_token_id: int | None = None  # the answer's first token
    forced_eos_token_id: int | None = None  # the token at max_tokens
    suppress_tokens: tuple[int, ...] = ()  # forbidden
    begin_suppress_tokens: tuple[int, ...] = ()  # forbidden as the answer's first token
    structure: Structure | None = None
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    typical_p: float = 1.0  # 1: off
    epsilon_cutoff: float = 0.0  # 0: off
    eta_cutoff: float = 0.0  # 0: off

    # Sampling from it.
    seed: int = 0
    verification: Verification = "coupled"

    # The end of the answer.
    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False  # applies to stop tokens too
    max_time_s: float | None = None  # seconds from admission

    # Log-probabilities to return, of the model's own distribution.
    logprobs: int | None = None  # number of most probable tokens beside each answer token; None: off
    prompt_logprobs: int | None = None  # the same for prompt tokens

    prompt_attention: bool = False  # return how much the answer's tokens attend to each token of the prompt

    def __post_init__(self) -> None:
        temperature, top_k, logprobs = self.temperature, self.top_k, f"a whole number from 0 to {MAX_LOGPROBS}"
        for field, holds, expected in (
            ("max_tokens", self.max_tokens >= 1, "a whole number of at least 1"),
            (
                "temperature",
                temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE,
                f"0 (greedy) or a number from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}",
            ),
            ("top_p", 0 < self.top_p <= 1, "a number above 0 and at most 1 (1 turns it off)"),
            ("top_k", 0 <= top_k <= MAX_TOP_K, f"a whole number from 0 (off) to {MAX_TOP_K}"),
            ("min_p", 0 <= self.min_p <= 1, "a number from 0 (off) to 1"),
            ("typical_p", 0 < self.typical_p <= 1, "a number above 0 and at most 1 (off)"),
            ("epsilon_cutoff", 0 <= self.epsilon_cutoff < 1, "a number from 0 (off) to below 1"),
            ("eta_cutoff", 0 <= self.eta_cutoff < 1, "a number from 0 (off) to below 1"),
            (
                "repetition_penalty",
                0.01 <= self.repetition_penalty <= 100,
                "a number from 0.01 to 100 (1 turns it off)",
            ),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "a number from -2 to 2 (0 turns it off)"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "a number from -2 to 2 (0 turns it off)"),
            ("no_repeat_ngram_size", self.no_repeat_ngram_size >= 0, "at least 0 (off)"),
            (
                "min_tokens",
                0 <= self.min_tokens <= self.max_tokens,
                f"a whole number from 0 to max_tokens, {self.max_tokens}",
            ),
            ("seed", 0 <= self.seed <= MAX_SEED, f"a whole number from 0 to {MAX_SEED}"),
            ("stop", all(self.stop), "non-empty strings"),
            ("logprobs", 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, logprobs),
            ("prompt_logprobs", 0 <= (self.prompt_logprobs or 0) <= MAX_LOGPROBS, logprobs),
        ):
            require(holds, field, getattr(self, field), expected)
        require(all(self.bad_words_ids), "bad_words", self.bad_words_ids, "non-empty")
        for field, tokens in self.named_tokens():
            require(min(tokens, default=0) >= 0, field, tokens, "token ids, which are not negative")
        biases = dict(self.logit_bias)
        is_bounded = all(-100 <= bias <= 100 for _, bias in self.logit_bias)
        require(is_bounded, "logit_bias", biases, "numbers from -100 to 100 by token id")
        require(self.max_time_s is None or self.max_time_s > 0, "max_time", self.max_time_s, "seconds, more than 0")

    @property
    def greedy(self) -> bool:
        """Whether tokens are chosen by argmax."""
        return self.temperature == 0

    @property
    def rejects(self) -> bool:
        """Whether drafts are verified by rejection sampling; never for greedy requests, where both rules agree."""
        return self.verification == "rejection" and not self.greedy

    @property
    def traits(self) -> Traits:
        """Which processors act. Computed at each access."""
        penalised = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)
        forced = self.forced_bos_token_id is not None or self.forced_eos_token_id is not None
        may_forbid = forced or bool(
            self.no_repeat_ngram_size
            or self.bad_words_ids
            or self.min_tokens
            or self.allowed_token_ids
            or self.suppress_tokens
            or self.begin_suppress_tokens
        )
        acting = {"temperature": True, "top_k": self.top_k != 0, "top_p": self.top_p != 1, "min_p": self.min_p != 0}
        return Traits(
            frozenset(field for field, acts in acting.items() if acts and not self.greedy),
            0 if self.greedy else self.top_k,
            not self.greedy and (self.typical_p, self.epsilon_cutoff, self.eta_cutoff) != (1, 0, 0),
            penalised,
            may_forbid,
            bool(self.logit_bias) or penalised or may_forbid,
        )

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the answer."""
        return self.eos_token_ids + self.stop_token_ids

    @property
    def hidden_token_ids(self) -> frozenset[int]:
        """End tokens that are not part of the text. Computed at each access."""
        return frozenset(self.eos_token_ids if self.include_stop_str_in_output else self.end_token_ids)

    def with_seed(self, seed: int) -> "SamplingParams":
        """Return a copy with another seed. Its cost does not depend on the number of tokens that are named."""
        require(0 <= seed <= MAX_SEED, "seed", seed, f"a whole number from 0 to {MAX_SEED}")
        changed = copy.copy(self)
        object.__setattr__(changed, "seed", seed)  # `replace` would check every field again
        return changed

    def named_tokens(self) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield fields and the token ids that they name, to be checked against a vocabulary."""
        yield "logit_bias", [token for token, _ in self.logit_bias]
        yield "bad_words", [token for word in self.bad_words_ids for token in word]
        for field in ("allowed_token_ids", "suppress_tokens", "begin_suppress_tokens", "stop_token_ids"):
            yield field, getattr(self, field)
        for field in ("forced_bos_token_id", "forced_eos_token_id"):
            if getattr(self, field) is not None:
                yield field, [getattr(self, field)]
