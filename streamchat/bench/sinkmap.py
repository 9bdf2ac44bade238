"""Does a model have attention sinks, and how many does it need?

Three looks at one text (Xiao et al. 2023, arXiv:2309.17453, sections 3.1 and 4.4; Sun et al. 2024,
arXiv:2402.17762, on the massive activations behind the sinks):

* how much attention the first tokens of a prompt draw, by layer and head;
* the norm of the hidden states after each layer, before and after the first tokens have left, in a
  window alone and in one of the same size with sinks;
* perplexity once the cache is full, by number of sinks, all caches being of the same size.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamchat.bench.perplexity import mean_perplexity, stream_text
from streamchat.cache.recorded import RecordingCache
from streamchat.config import DEFAULT_SINK_SIZE, CacheConfig
from streamchat.errors import ConfigError
from streamchat.model.compat import logits_of
from streamchat.model.families import trained_length
from streamchat.model.load import LoadedModel
from streamchat.model.policies import make_cache
from streamchat.model.prepare import forward

NUM_FIRST = (1, 2, 4, 8)
"""First tokens whose share of the attention is told."""

SINK_SIZES = (0, *NUM_FIRST)
"""Caches of the sweep."""

MAP_SIZE = DEFAULT_SINK_SIZE
"""First tokens that the map is drawn for, and sinks that the norms are measured with."""

PROMPT_LENGTH = 512
"""Tokens that are attended to at once: the weights of a layer are a square of these."""

CHUNK_SIZE = 64

TEXT_PER_CACHE = 4
"""A cache is at most this part of the text: most of it is then predicted with a full cache."""

SMALLEST_CACHE = 4 * max(SINK_SIZES)

TOLERANCE = 0.05
"""As good as the best: a perplexity no more than this above it."""

CLEARLY = 5.0
"""Tokens that draw so many times what all would draw alike are sinks."""

WITHOUT, WITH = "without sinks", "with sinks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A cache of the sweep.

    Attributes:
        num_sinks: First tokens that it keeps.
        num_newest: The others; together always the same.
        perplexity: Of the tokens predicted from a full cache.
    """

    num_sinks: int
    num_newest: int
    perplexity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """Norms of the hidden states after a layer: medians over tokens, but for the first.

    Attributes:
        layer: Which layer.
        of_first: Of the very first token.
        before: While all tokens were held.
        without_sinks: As many tokens later as the cache holds, in a window alone.
        with_sinks: Likewise, with the first tokens kept.
    """

    layer: int
    of_first: float
    before: float
    without_sinks: float
    with_sinks: float

    @property
    def move(self) -> float:
        """By which part the norm has grown without sinks."""
        return self.without_sinks / self.before - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of a map, for programs.

    Attributes:
        measure: `attention`, the share of it (0 to 1); `norm of first`, `norm before`, `norm
            without sinks`, `norm with sinks`, see `Norms`; `perplexity`, see `Sweep`.
        layer: From 0.
        head: From 0.
        num_first: Of how many first tokens, or how many of them are kept.
        value: The number.
    """

    measure: str
    layer: int | None = None
    head: int | None = None
    num_first: int | None = None
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkMap:
    """What was found.

    Attributes:
        prompt_length: Tokens in sight where attention was measured.
        drawn: By layer, head and token, what each of the first tokens draws of the attention.
        alike: What each would draw if all tokens in sight drew alike.
        cache_size: Tokens held in the streams.
        curves: Norms by layer and stream position, `without sinks` and `with sinks`.
        sweep: Perplexity by number of sinks.
    """

    prompt_length: int
    drawn: list[list[list[float]]]
    alike: float
    cache_size: int
    curves: dict[str, list[list[float]]]
    sweep: list[Sweep]

    def shares(self, num_first: int) -> list[list[float]]:
        """What the first tokens together draw, by layer and head."""
        return [[sum(head[:num_first]) for head in layer] for layer in self.drawn]

    def share(self, num_first: int) -> float:
        """What the first tokens together draw, mean of all heads."""
        return statistics.fmean(share for layer in self.shares(num_first) for share in layer)

    def norms(self) -> list[Norms]:
        """For each layer."""
        size, rows = self.cache_size, []
        curves = zip(self.curves[WITHOUT], self.curves[WITH], strict=True)
        for layer, (without, kept) in enumerate(curves):
            rows.append(
                Norms(
                    layer=layer,
                    of_first=without[0],
                    before=statistics.median(without[size // 2 : size]),
                    without_sinks=statistics.median(without[size:]),
                    with_sinks=statistics.median(kept[size:]),
                )
            )
        return rows

    def num_needed(self) -> int:
        """The fewest sinks that are as good as any."""
        best = min(row.perplexity for row in self.sweep)
        enough = (row for row in self.sweep if row.perplexity <= best * (1 + TOLERANCE))
        return min(row.num_sinks for row in enough)

    def figures(self) -> list[Figure]:
        """All of it, a number a row."""
        rows = [
            Figure(measure="attention", layer=layer, head=head, num_first=count, value=share)
            for count in NUM_FIRST
            for layer, heads in enumerate(self.shares(count))
            for head, share in enumerate(heads)
        ]
        for norms in self.norms():
            by_name = {
                "of first": norms.of_first,
                "before": norms.before,
                WITHOUT: norms.without_sinks,
                WITH: norms.with_sinks,
            }
            rows += [
                Figure(measure=f"norm {name}", layer=norms.layer, value=value)
                for name, value in by_name.items()
            ]
        return rows + [
            Figure(measure="perplexity", num_first=row.num_sinks, value=row.perplexity)
            for row in self.sweep
        ]


def cache_size_for(num_tokens: int, cache_size: int) -> int:
    """Tokens that the streams hold: a text must be several times longer.

    Args:
        num_tokens: Length of the text.
        cache_size: What is asked for; less for a short text.

    Raises:
        ConfigError: If text or cache are too short to tell sinks from the rest.
    """
    size = min(cache_size, num_tokens // TEXT_PER_CACHE)
    if size < SMALLEST_CACHE:
        raise ConfigError(
            f"a map of the sinks needs a cache of at least {SMALLEST_CACHE} tokens and a text "
            f"{TEXT_PER_CACHE} times as long, got {cache_size} and {num_tokens}"
        )
    return size


def map_sinks(
    loaded: LoadedModel,
    ids: Sequence[int],
    cache_size: int,
    progress: Callable[[str], None] = lambda _message: None,
) -> SinkMap:
    """Measure a model on a text.

    Args:
        loaded: A model that streams with sinks.
        ids: The text.
        cache_size: From `cache_size_for`.
        progress: Called with a few words before each step.
    """
    progress("measuring what the first tokens draw")
    length = min(PROMPT_LENGTH, len(ids), trained_length(loaded.model.config) or len(ids))
    drawn = attention_of_first(loaded, ids[:length])
    curves = {}
    for name, num_sinks in ((WITHOUT, 0), (WITH, MAP_SIZE)):
        progress(f"streaming past the first eviction, {name}")
        curves[name] = norms_by_position(
            loaded, _config(num_sinks, cache_size), ids[: 2 * cache_size]
        )
    sweep = []
    for num_sinks in SINK_SIZES:
        progress(f"measuring perplexity: {num_sinks} sinks")
        config = _config(num_sinks, cache_size)
        rows = list(stream_text(loaded, config, ids, segment=cache_size))
        sweep.append(
            Sweep(
                num_sinks=num_sinks,
                num_newest=config.window_size,
                perplexity=mean_perplexity(row for row in rows if row.position >= cache_size),
            )
        )
    queries = range(length // 2, length)
    return SinkMap(
        prompt_length=length,
        drawn=drawn,
        alike=statistics.fmean(1 / (query + 1) for query in queries),
        cache_size=cache_size,
        curves=curves,
        sweep=sweep,
    )


def _config(num_sinks: int, cache_size: int) -> CacheConfig:
    return CacheConfig(sink_size=num_sinks, window_size=cache_size - num_sinks)


def attention_of_first(loaded: LoadedModel, ids: Sequence[int]) -> list[list[list[float]]]:
    """What each of the first tokens draws, by layer, head and token; see `RecordingCache.drawn`."""
    model = loaded.model
    cache = RecordingCache(model.streamchat_binding.geometry, max(NUM_FIRST))
    forward(model, torch.tensor([list(ids)], device=loaded.device), cache)
    return [layer.tolist() for layer in cache.drawn]


def norms_by_position(
    loaded: LoadedModel, config: CacheConfig, ids: Sequence[int]
) -> list[list[float]]:
    """Stream a text; norms of the hidden states, by layer and stream position."""
    model, cache = loaded.model, make_cache(loaded.model, config)
    tokens = torch.tensor([list(ids)], device=loaded.device)
    with _hidden_states(model) as states:
        for chunk in torch.split(tokens, CHUNK_SIZE, dim=1):
            # Not `forward`: a compiled decode step has no layers to look into.
            logits_of(model, chunk, cache)
    return [torch.cat(layer).tolist() for layer in states]


@contextmanager
def _hidden_states(model: Any) -> Iterator[list[list[Tensor]]]:
    """By layer, the norms of each chunk's hidden states, as it goes through."""
    layers = layers_of(model)
    norms: list[list[Tensor]] = [[] for _ in layers]

    def look(into: list[Tensor]) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            into.append(hidden[0].float().norm(dim=-1).cpu())

        return hook

    hooks = [
        layer.register_forward_hook(look(into)) for layer, into in zip(layers, norms, strict=True)
    ]
    try:
        yield norms
    finally:
        for hook in hooks:
            hook.remove()


def layers_of(model: Any) -> list[Any]:
    """The layers of a model, first to last: the outermost list of as many as attend."""
    num_layers = model.streamchat_binding.geometry.num_layers
    lists = (m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList))
    return list(next(modules for modules in lists if len(modules) == num_layers))


def verdict(name: str, found: SinkMap) -> str:
    """What a map says, in a sentence."""
    share, alike = found.share(MAP_SIZE), MAP_SIZE * found.alike
    has = "has sinks" if share >= CLEARLY * alike else "has no clear sinks"
    by_sinks = {row.num_sinks: row.perplexity for row in found.sweep}
    needed, most = found.num_needed(), max(by_sinks)
    needs = f"it needs {needed or 'none'}"
    shown = [f"{by_sinks[0]:,.2f} without"]
    shown += [f"{by_sinks[n]:,.2f} with {n}" for n in sorted({needed, most} - {0})]
    moved = max(found.norms(), key=lambda norms: abs(norms.move))
    return (
        f"{name} {has}: the first {MAP_SIZE} of {found.prompt_length:,} tokens draw {share:.0%} of "
        f"the attention ({alike:.1%} if all drew alike), the first alone {found.share(1):.0%}; "
        f"{needs} to come within {TOLERANCE:.0%} of the best: perplexity {', '.join(shown)}, in "
        f"caches of {found.cache_size:,} tokens; once "
        f"they have left, the norm after layer {moved.layer} moves by {moved.move:+.0%} (with "
        f"{MAP_SIZE} kept: {moved.with_sinks / moved.before - 1:+.0%})"
    )
