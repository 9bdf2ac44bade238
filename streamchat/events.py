"""What the engine says while it works. Plain data: whoever draws it decides how."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["end_token", "stop_string", "length"]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt has been fed."""

    num_tokens: int
    elapsed_seconds: float


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that is certain: whole characters, no part of a stop string."""

    text: str


@dataclass(frozen=True, slots=True)
class Evicted:
    """Stream positions `first` to `last`, both included, have left the cache."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Generation has ended.

    Attributes:
        reason: `end_token`, `stop_string`, or `length` (the cap on new tokens).
        num_tokens: Tokens sampled and kept in the stream.
        elapsed_seconds: Time spent decoding, the prompt excluded.
    """

    reason: FinishReason
    num_tokens: int
    elapsed_seconds: float


Event = Prefilled | TextDelta | Evicted | Finished
