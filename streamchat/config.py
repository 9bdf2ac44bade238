"""Options as frozen dataclasses, checked when built. No tensors, no disk."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from streamchat.errors import ConfigError

Policy = Literal["sink", "window", "dense", "recompute", "h2o", "snapkv"]
"""Which tokens stay: the first and the newest (StreamingLLM), the newest, all, the newest computed
anew at each step, the newest and those attended to most (H2O), those that the newest attend to
most (SnapKV)."""

POLICIES: tuple[Policy, ...] = get_args(Policy)

DEFAULT_SINK_SIZE = 4
"""Four sinks recover the perplexity of a model trained without a dedicated one (Xiao et al. 2023,
table 2)."""

MAX_PENALTY_WINDOW = 4096
"""Newest ids that every stream remembers for the repetition penalty."""

DEFAULT_WINDOW_SIZE = 1020
"""With the default sinks, a cache of 1,024 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How much of a stream the cache keeps.

    Attributes:
        sink_size: How many first tokens are kept for ever (S). 0 gives a plain sliding window. Only
            the policy `sink` has sinks: with another one they are added to the window, so that all
            policies hold the same number of tokens.
        window_size: How many newest tokens are kept, the current one included (W). Excludes the
            sinks, so the cache holds `sink_size + window_size` tokens. Of a scored policy, how many
            it holds in all; of `dense`, how many tokens a stream may have.
        is_auto: Whether the window is the largest there is room for: it gives way where the sinks
            grow, so that the cache keeps its size.
        has_auto_sinks: Whether the sinks are as many as the model needs, see `settle`. Where that
            is none, a prefix is pinned all the same; a `sink_size` of 0 that is asked for pins
            nothing.
        policy: Which tokens stay, see `Policy`.

    Raises:
        ConfigError: If `sink_size` < 0, `window_size` < 1, or there is no such policy.
    """

    sink_size: int = DEFAULT_SINK_SIZE
    window_size: int = DEFAULT_WINDOW_SIZE
    is_auto: bool = False
    has_auto_sinks: bool = False
    policy: Policy = "sink"

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got '{self.policy}'")
        if self.sink_size < 0:
            raise ConfigError(f"sink_size must be at least 0, got {self.sink_size}")
        if self.window_size < 1:
            raise ConfigError(f"window_size must be at least 1, got {self.window_size}")
        if self.policy != "sink" and self.sink_size:
            object.__setattr__(self, "window_size", self.cache_size)
            object.__setattr__(self, "sink_size", 0)

    @property
    def cache_size(self) -> int:
        """Tokens held once the cache is full: S + W."""
        return self.sink_size + self.window_size

    def holds_like(self, other: "CacheConfig") -> bool:
        """Whether caches of both hold the same tokens of every stream."""
        sizes = (self.policy, self.sink_size, self.window_size)
        return sizes == (other.policy, other.sink_size, other.window_size)

    @property
    def pins(self) -> bool:
        """Whether a prefix is pinned; not where another policy, or no sinks, were asked for."""
        return self.policy == "sink" and (self.sink_size > 0 or self.has_auto_sinks)

    def settle(self, *, has_learned_sinks: bool) -> "CacheConfig":
        """The same for a model: it needs no sinks beside those that it has learned (GPT-OSS)."""
        return replace(self, sink_size=0) if self.has_auto_sinks and has_learned_sinks else self

    def pin(self, num_tokens: int) -> "CacheConfig":
        """The same with so many sinks at least, if it `pins`."""
        if not self.pins or num_tokens <= self.sink_size:
            return self
        size = self.cache_size - num_tokens if self.is_auto else self.window_size
        return replace(self, sink_size=num_tokens, window_size=max(1, size))

    def describe(self) -> str:
        """In words, as `4 pinned + 1,020 newest`."""
        auto, size = " (auto)" if self.is_auto else "", f"{self.cache_size:,}"
        if self.policy == "sink":
            own = not self.sink_size and self.pins
            sinks = "the model's own sinks" if own else f"{self.sink_size:,} pinned"
            return f"{sinks} + {self.window_size:,} newest{auto}"
        return {
            "window": f"{size} newest{auto}, no sinks",
            "dense": f"all tokens, {size} at most",
            "recompute": f"{size} newest{auto}, computed anew at each step",
            "h2o": f"{size} tokens of each head{auto}: the newest half, and heavy hitters",
            "snapkv": f"{size} tokens of each head{auto}: those that the newest attended to",
        }[self.policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen from the logits.

    Attributes:
        temperature: 0 chooses the most likely token (greedy); above 0 flattens or sharpens.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set with this much probability; 1 keeps all.
        min_p: Keep tokens at least this likely relative to the most likely; 0 keeps all.
        repetition_penalty: Above 1 makes tokens of the penalty window less likely.
        penalty_window: How many of the newest stream tokens the penalty looks at. Bounded, so that
            a stream without end does not end up penalising its whole vocabulary.
        seed: Seed of the sampler; None draws one from the system.

    Raises:
        ConfigError: If a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    penalty_window: int = 256
    seed: int | None = None

    def __post_init__(self) -> None:
        # Written so that NaN is refused.
        if not self.temperature >= 0:
            raise ConfigError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be at least 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p must be in [0, 1], got {self.min_p}")
        if not self.repetition_penalty > 0:
            raise ConfigError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")
        if not 1 <= self.penalty_window <= MAX_PENALTY_WINDOW:
            raise ConfigError(
                f"penalty_window must be in [1, {MAX_PENALTY_WINDOW}], got {self.penalty_window}"
            )
