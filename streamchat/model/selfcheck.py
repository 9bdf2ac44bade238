"""Does this model, with these libraries, stream exactly? Asked once at load.

Three short questions, against the model's own path, which a table entry or a new release of a
library may have made wrong: (a) nothing evicted yet, (b) far along the stream, (c) cut in another
way; and where only some layers have a native window, (d) past that. A model that fails would stream
plausible rubbish, so it is refused.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from streamchat.cache.sink import SinkCache
from streamchat.config import CacheConfig
from streamchat.errors import SelfCheckError
from streamchat.model.families import trained_length
from streamchat.model.prepare import forward

TELEPORT = 2**25
"""Stream positions skipped in (b): float32 angles are wrong by more than a radian there."""

PROMPT_LENGTH = 24

SMALL_WINDOW = 8
"""What a native window is made for (d), so that a short prompt runs past it."""

RELATIVE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest error of a logit, as a share of the largest logit: rounding noise of each dtype, well
below the difference that one wrong position makes."""


def self_check(model: Any) -> None:
    """Run the questions on a prepared model.

    Raises:
        SelfCheckError: With the first question that fails, and by how much; or with what the model
            raised instead of an answer.
    """
    try:
        _ask(model)
    except SelfCheckError:
        raise
    except Exception as error:  # the model's own code runs here
        text = " ".join(str(error).split())[:200]
        raise SelfCheckError(
            f"self-check failed: the model stumbled on its first tokens, {type(error).__name__}: "
            f"{text}; it cannot be streamed with the installed libraries"
        ) from error


def _ask(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    vocab_size, geometry = model.config.vocab_size, model.streamchat_binding.geometry
    native = geometry.native_window
    # (b) must see all of its prompt in every layer, and the model's own path in one chunk.
    bounds = [bound - 1 for bound in (native, trained_length(model.config)) if bound is not None]
    length = max(1, min([PROMPT_LENGTH, *bounds]))
    shape = (_num_rows(model), length + 1)
    ids = torch.randint(vocab_size, shape, generator=generator).to(geometry.device)
    with torch.no_grad():
        own = model(ids, use_cache=False).logits
    _compare("before any eviction", _prompt_logits(model, ids), own)
    _compare(f"at stream position 2^25 + {length}", _teleported(model, ids), own[:, -1])
    _compare("cut in another way", *_two_cuts(model, ids))
    if _has_two_kinds_of_layers(model.config):
        shape = (len(ids), PROMPT_LENGTH)
        ids = torch.randint(vocab_size, shape, generator=generator).to(geometry.device)
        with _small_window(model), torch.no_grad():
            own = model(ids, use_cache=False).logits
            _compare("past the native window", _prompt_logits(model, ids), own)


def _has_two_kinds_of_layers(config: Any) -> bool:
    """Whether some layers have a native window; asked of the configuration, not of our table."""
    kinds = set(getattr(config, "layer_types", None) or [])
    return len(kinds) > 1 and getattr(config, "sliding_window", None) is not None


@contextmanager
def _small_window(model: Any) -> Iterator[None]:
    """Give the model a native window of a few tokens, which it reads at each forward pass.

    What we take it for becomes smaller by as much, so that a difference stays one.
    """
    config, binding = model.config, model.streamchat_binding
    window, geometry = config.sliding_window, binding.geometry
    cut = max(0, window - SMALL_WINDOW)
    if geometry.native_window is not None:
        native = geometry.native_window - cut
        binding.geometry = dataclasses.replace(geometry, native_window=native)
    config.sliding_window = window - cut
    try:
        yield
    finally:
        config.sliding_window, binding.geometry = window, geometry


def _num_rows(model: Any) -> int:
    """Prompts to ask with, of which most must agree.

    In 16 bit, rounding now and then sends a token to another expert, which is no fault of ours.
    """
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    has_experts = any(getattr(model.config, name, None) for name in names)
    return 5 if has_experts and model.dtype != torch.float32 else 1


def _prompt_logits(model: Any, ids: Tensor) -> Tensor:
    """Nothing leaves a cache of 4 + n: the logits are those of the model's own path.

    They do not depend on where a stream starts; far out, an angle that is not exact shows.
    """
    config = CacheConfig(sink_size=4, window_size=ids.shape[1])
    cache = SinkCache.for_model(model, config, batch_size=ids.shape[0], start_position=TELEPORT)
    return forward(model, ids, cache, ids.shape[1])


def _teleported(model: Any, ids: Tensor) -> Tensor:
    """All prompt tokens are sinks, and W = 1.

    Then, and only then, the distances to the sinks stay the dense ones however far the stream runs.
    """
    num_sinks = ids.shape[1] - 1
    config = CacheConfig(sink_size=num_sinks, window_size=1)
    cache = SinkCache.for_model(model, config, batch_size=ids.shape[0])
    forward(model, ids[:, :-1], cache)
    cache.skip(TELEPORT)
    return forward(model, ids[:, -1:], cache)[:, -1]


def _two_cuts(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """A small cache past several wraps: one chunk after a first token, and token by token."""
    config = CacheConfig(sink_size=2, window_size=2)
    chunked, single = (
        SinkCache.for_model(model, config, batch_size=ids.shape[0]) for _ in range(2)
    )
    forward(model, ids[:, :1], chunked)
    in_chunk = forward(model, ids[:, 1:], chunked)
    for index in range(ids.shape[1]):
        by_token = forward(model, ids[:, index : index + 1], single)
    return in_chunk[:, -1], by_token[:, -1]


def _compare(question: str, got: Tensor, expected: Tensor) -> None:
    """Hold logits against each other, shape (num_rows, ..., vocab_size); of several rows, most."""
    scale = max(1.0, float(expected.abs().max()))
    errors = (got.float() - expected.float()).abs().amax(dim=-1).flatten()
    error = float(errors.median() if len(got) > 1 else errors.max()) / scale
    tolerance = RELATIVE_TOLERANCE[expected.dtype]
    if not error <= tolerance:  # also where the error is NaN
        raise SelfCheckError(
            f"self-check failed {question}: logits differ by {error:.2g} of their size, allowed "
            f"{tolerance:.0e}; this model would not stream exactly with the installed libraries "
            "(--no-self-check streams it all the same, at the risk of rubbish)"
        )
