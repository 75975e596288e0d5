"""What an answer has of its own, whatever was asked. Knows no formats."""

import secrets
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """Id, time and seed of an answer."""

    answer_id: str  # 24 hexadecimal digits
    created: int  # seconds since 1970
    seed: int

    @staticmethod
    def new(seed: int) -> "AnswerIdentity":
        """Return the identity of an answer that begins now."""
        return AnswerIdentity(secrets.token_hex(12), int(time.time()), seed)

    def __str__(self) -> str:
        return f"{self.answer_id}.{self.created:x}.{self.seed:x}"
