"""What a request asks of the sampler and of the stopping rules. Knows nothing of batches or tensors."""

from dataclasses import dataclass

from decoding.errors import InvalidRequestError

MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.001, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request, named as in OpenAI's API and transformers' `generate`.

    Raises:
        InvalidRequestError: a value is out of range; the error names the field.
    """

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    seed: int = 0
    stop: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "a whole number of at least 1")
        _require(
            self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE,
            "temperature",
            self.temperature,
            f"0 (greedy) or a number from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}",
        )
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "a number above 0 and at most 1 (1 turns it off)")
        _require(0 <= self.top_k <= MAX_TOP_K, "top_k", self.top_k, f"a whole number from 0 (off) to {MAX_TOP_K}")
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"a whole number from 0 to {MAX_SEED}")
        _require(all(self.stop), "stop", self.stop, "non-empty strings")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _require(holds: bool, field: str, given: object, expected: str) -> None:
    if not holds:
        raise InvalidRequestError(f"{field} must be {expected}, not {given!r}.", field=field)
