"""Perplexity of one long text by cache policy, segment by segment, on the same tokens for all.

The measure of the sources (Xiao et al. 2023, section 4.1): the text is streamed once through each
policy, every token predicted from what its cache holds. Perplexity is exp of the mean negative
log-likelihood. A run can be kept in a folder and gone on with later: the numbers are the same.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from streamchat.chat.saved import pack, unpack, why_not
from streamchat.config import CacheConfig, Policy
from streamchat.engine.stream import Stream, StreamState
from streamchat.errors import ConfigError
from streamchat.model.load import LoadedModel
from streamchat.store.state import differences, load, save

SEGMENT = 1024
"""Tokens of one row."""

NUM_FIRST = 32
"""Tokens at the beginning of a segment whose losses are kept one by one."""

VERSION = 2
"""Of what is kept of a run."""

SECONDS_BETWEEN_SAVES = 60.0

MEGA = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What one policy made of a run of the text.

    Attributes:
        policy: Which.
        position: Stream position of its first token.
        num_tokens: Its tokens that have a loss: all but the first of a stream.
        nats: Sum of their negative log-likelihoods.
        seconds: Time it took.
        cache_megabytes: Allocated by the cache after it.
        memory_megabytes: Resident memory of the process after it.
        first_losses: Of its first `NUM_FIRST` tokens that have one, in nats: what is too slow for
            the whole text is compared on these.
    """

    policy: Policy
    position: int
    num_tokens: int
    nats: float
    seconds: float
    cache_megabytes: float
    memory_megabytes: float
    first_losses: tuple[float, ...]

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss."""
        return math.exp(self.nats / self.num_tokens) if self.num_tokens else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What one policy made of the text.

    Attributes:
        policy: Which.
        holds: The cache, in words.
        num_tokens: Tokens that have a loss.
        perplexity: Over all of them.
        perplexity_of_common: Over the tokens that every policy of the run has seen.
        perplexity_at_end: Over the last segment.
        tokens_per_second: Scored in chunks.
        cache_megabytes: Largest cache.
        work_per_token: Tokens that go through the model for each token scored.
    """

    policy: Policy
    holds: str
    num_tokens: int
    perplexity: float
    perplexity_of_common: float
    perplexity_at_end: float
    tokens_per_second: float
    cache_megabytes: float
    work_per_token: float


def with_policies(cache: CacheConfig, policies: Sequence[Policy], limit: int) -> list[CacheConfig]:
    """One cache for each policy, all of the same size; a dense one has room for `limit` tokens."""
    sizes = []
    for policy in policies:
        config = replace(cache, policy=policy)
        sizes.append(replace(config, window_size=limit) if policy == "dense" else config)
    return sizes


def stream_text(
    loaded: LoadedModel,
    config: CacheConfig,
    ids: Sequence[int],
    progress: Callable[[Segment, float], None] = lambda _segment, _left: None,
    *,
    segment: int = SEGMENT,
    folder: Path | None = None,
) -> Iterator[Segment]:
    """Score a text through one policy.

    Args:
        loaded: The model.
        config: Policy and sizes.
        ids: The text; a dense cache sees as much of it as it has room for.
        progress: Called after each segment with it and the seconds that are left, about.
        segment: Tokens of a row.
        folder: Where the run is kept, and gone on with if it is there.

    Yields:
        Each segment as it is done, those of an earlier run first.

    Raises:
        ConfigError: If the folder holds the run of another model, text or cache.
    """
    stream = Stream(loaded, config)
    if folder is None:
        yield from _score(stream, ids, segment, 0.0, progress)
        return
    kept = _Kept(folder, loaded, config, ids, segment)
    done = kept.resume(stream)
    yield from done
    try:
        for row in _score(stream, ids, segment, sum(row.seconds for row in done), progress):
            kept.add(row, stream)
            yield row
    finally:
        kept.save()


def _score(
    stream: Stream,
    ids: Sequence[int],
    segment: int,
    seconds: float,
    progress: Callable[[Segment, float], None],
) -> Iterator[Segment]:
    """Segments from where the stream stands; `seconds` is what those before took."""
    config, process = stream.cache.config, psutil.Process()
    end = min(len(ids), config.cache_size) if config.policy == "dense" else len(ids)
    while stream.position < end:
        start = stream.position
        began = time.perf_counter()
        losses = [x for x in stream.score(ids[start : min(start + segment, end)]) if x is not None]
        row = Segment(
            policy=config.policy,
            position=start,
            num_tokens=len(losses),
            nats=math.fsum(losses),
            seconds=time.perf_counter() - began,
            cache_megabytes=stream.cache.num_bytes / MEGA,
            memory_megabytes=process.memory_info().rss / MEGA,
            first_losses=tuple(losses[:NUM_FIRST]),
        )
        seconds += row.seconds
        progress(row, seconds / stream.position * (end - stream.position))
        yield row


def summarize(config: CacheConfig, rows: Sequence[Segment], num_common: int) -> Summary:
    """Sum up a policy's segments.

    Args:
        config: Its cache.
        rows: At least one.
        num_common: Stream positions that every policy of the run has reached.
    """
    num_seen, size, work = rows[-1].position + rows[-1].num_tokens, config.cache_size, 1.0
    if config.policy == "recompute":  # before the window is full, each token once
        work = (min(num_seen, size) + max(0, num_seen - size) * size) / num_seen
    return Summary(
        policy=config.policy,
        holds=config.describe(),
        num_tokens=sum(row.num_tokens for row in rows),
        perplexity=mean_perplexity(rows),
        perplexity_of_common=mean_perplexity([row for row in rows if row.position < num_common]),
        perplexity_at_end=rows[-1].perplexity,
        tokens_per_second=sum(row.num_tokens for row in rows) / sum(row.seconds for row in rows),
        cache_megabytes=max(row.cache_megabytes for row in rows),
        work_per_token=work,
    )


def mean_perplexity(rows: Iterable[Segment]) -> float:
    """Perplexity over all tokens of some segments."""
    rows = list(rows)
    return math.exp(sum(row.nats for row in rows) / max(1, sum(row.num_tokens for row in rows)))


class _Kept:
    """A run on disk: its segments as JSON lines, and at times and at the end the stream's state.

    Segments after the saved state, which only a crash leaves, are computed again.
    """

    def __init__(
        self,
        folder: Path,
        loaded: LoadedModel,
        config: CacheConfig,
        ids: Sequence[int],
        segment: int,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{config.policy}-{config.sink_size}+{config.window_size}"
        self._rows, self._state = folder / f"{name}.jsonl", folder / f"{name}.safetensors"
        text = hashlib.blake2b(",".join(map(str, ids)).encode(), digest_size=16)
        self._text: dict[str, Any] = {
            "text": text.hexdigest(),
            "segment": segment,
            "version": VERSION,
        }
        self._loaded, self._config = loaded, config
        self._unsaved: StreamState | None = None
        self._num_rows = 0
        self._saved_at = time.monotonic()

    def resume(self, stream: Stream) -> list[Segment]:
        """Bring the stream to where the run was left; its segments up to there."""
        if not self._state.is_file():
            self._rows.unlink(missing_ok=True)
            return []
        saved = load(self._state)
        state, meta, _ = unpack(saved, self._config)
        text = {name: meta.get(name) for name in self._text}
        different = why_not(saved, self._loaded, self._config) + differences(text, self._text)
        if different:
            raise ConfigError(
                f"{self._state} holds another run: {'; '.join(different)}; choose another folder"
            )
        stream.restore(state)
        lines = self._rows.read_text(encoding="utf-8").splitlines()[: meta["num_rows"]]
        self._rows.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        self._num_rows = len(lines)
        rows = [json.loads(line) for line in lines]
        return [Segment(**{**row, "first_losses": tuple(row["first_losses"])}) for row in rows]

    def add(self, row: Segment, stream: Stream) -> None:
        """Append a segment, at whose end the stream stands."""
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        self._num_rows += 1
        self._unsaved = stream.snapshot()
        if time.monotonic() - self._saved_at >= SECONDS_BETWEEN_SAVES:
            self.save()

    def save(self) -> None:
        """Keep the stream's state after the last segment."""
        if self._unsaved is None:
            return
        meta = {**self._text, "num_rows": self._num_rows}
        save(self._state, pack(self._loaded, self._config, self._unsaved, meta))
        self._unsaved, self._saved_at = None, time.monotonic()
