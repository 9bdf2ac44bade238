"""A stream: the same numbers however it is fed, and copies that do not disturb each other."""

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch
from conftest import BYTE_VOCAB_SIZE, random_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_logits_equal

from streamchat import CacheConfig, StateError, Stream
from streamchat.config import MAX_PENALTY_WINDOW
from streamchat.engine.stream import RECENT_CACHES
from streamchat.events import StreamStats, TextDelta

CONFIG = CacheConfig(sink_size=4, window_size=12)
IDS = random_ids(90)[0].tolist()
SCORE_TOLERANCE = 1e-4
"""Nats. Scores are about 7 on average and reach 20; one wrong position moves one by 0.1 or more."""


def new_stream(loaded, *fed, config=CONFIG, **options):
    stream = Stream(loaded, config, **options)
    for ids in fed:
        stream.feed(ids)
    return stream


def cut_ids(ids, cuts):
    bounds = [0, *sorted(cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(bounds)]


def assert_same_scores(got, expected):
    assert len(got) == len(expected)
    for index, (score, other) in enumerate(zip(got, expected, strict=True)):
        if score is None or other is None:
            assert score is other, f"score {index} is {score}, expected {other}"
        else:
            assert abs(score - other) <= SCORE_TOLERANCE, f"score {index}"


def assert_same_from_here(stream, other):
    """Both stand at the same token, and what they say of the next ones is the same."""
    assert stream.position == other.position
    assert list(stream.recent_ids) == list(other.recent_ids)
    assert_logits_equal(stream.logits, other.logits)
    for ids in ([7], [8], [9, 10, 11], [12] * 20):
        stream.feed(ids)
        other.feed(ids)
        assert_logits_equal(stream.logits, other.logits)


def scores_by_the_stock_model(loaded, ids):
    """The oracle: log-softmax in float64 over a stock forward pass of everything."""
    with torch.no_grad():
        logits = loaded.model(torch.tensor([ids]), use_cache=False).logits[0].double()
    log_probs = logits.log_softmax(dim=-1)
    return [-float(log_probs[i, token]) for i, token in enumerate(ids[1:])]


# Feed and score


CUTS = st.lists(st.integers(0, len(IDS)), max_size=6)
CHUNK_SIZES = st.sampled_from([1, 2, 7, 16, 256])


@pytest.fixture(scope="module")
def by_token(loaded):
    """All ids fed one by one, and the scores on the way."""
    stream = Stream(loaded, CONFIG, chunk_size=1)
    return stream, stream.score(IDS)


@settings(max_examples=15, deadline=None)
@given(cuts=CUTS, chunk_size=CHUNK_SIZES)
def test_any_cut_feeds_the_same(loaded, by_token, cuts, chunk_size):
    """However the ids are cut into calls and chunks, the state is that of token by token."""
    stream = new_stream(loaded, *cut_ids(IDS, cuts), chunk_size=chunk_size)
    assert_same_from_here(stream, by_token[0].fork())


@settings(max_examples=15, deadline=None)
@given(cuts=CUTS, chunk_size=CHUNK_SIZES)
def test_any_cut_scores_the_same(loaded, by_token, cuts, chunk_size):
    """Scores of the parts are the scores of the whole, an empty part included."""
    stream = Stream(loaded, CONFIG, chunk_size=chunk_size)
    scores = [score for part in cut_ids(IDS, cuts) for score in stream.score(part)]
    assert_same_scores(scores, by_token[1])
    assert_same_from_here(stream, by_token[0].fork())


def test_feed_and_score_leave_the_same_state(loaded):
    """Scoring tokens is feeding them, and the two may alternate."""
    stream = new_stream(loaded)
    stream.feed(IDS[:30])
    scores = stream.score(IDS[30:50])
    stream.feed(IDS[50:])
    expected = Stream(loaded, CONFIG)
    assert_same_scores(scores, expected.score(IDS)[30:50])
    assert_same_from_here(stream, expected)


@pytest.mark.parametrize("chunk_size", [1, 7, 256])
def test_scores_are_those_of_the_stock_model(loaded, chunk_size):
    """Before any eviction, the oracle is transformers' forward and a log-softmax in float64.

    The first token has no score. It would miss what eviction does: `test_exactness` has that.
    """
    stream = Stream(loaded, CacheConfig(sink_size=4, window_size=100), chunk_size=chunk_size)
    first, *scores = stream.score(IDS)
    assert first is None
    assert_same_scores(scores, scores_by_the_stock_model(loaded, IDS))


def test_more_rows_than_are_turned_into_losses_at_once(loaded):
    """A chunk of 200 tokens is scored in several blocks of rows, and each row in its place."""
    ids = random_ids(200, seed=5)[0].tolist()
    stream = Stream(loaded, CacheConfig(sink_size=4, window_size=200))
    assert_same_scores(stream.score(ids)[1:], scores_by_the_stock_model(loaded, ids))


def test_only_the_first_token_of_a_stream_has_no_score(loaded):
    """None once, whichever call the first token is in; a later call's first token has a score."""
    stream = Stream(loaded, CONFIG)
    assert stream.score([5]) == [None]
    assert None not in stream.score([6, 7])
    stream = new_stream(loaded, [5])
    assert None not in stream.score([6])


def test_nothing_fed_is_nothing_done(loaded):
    """An empty feed or score is a no-op, at the start of a stream and later."""
    stream = Stream(loaded, CONFIG)
    stream.feed([])
    assert stream.score([]) == []
    assert (stream.position, stream.logits, list(stream.recent_ids)) == (0, None, [])
    stream.feed(IDS)
    logits = stream.logits
    stream.feed([])
    assert stream.score([]) == []
    assert stream.logits is logits
    assert_same_from_here(stream, new_stream(loaded, IDS))


@pytest.mark.parametrize("bad", [-1, BYTE_VOCAB_SIZE, 10**9])
@pytest.mark.parametrize("method", ["feed", "score"])
def test_ids_out_of_range_are_refused(loaded, method, bad):
    """An id outside the vocabulary is a StateError that names the range; nothing was fed.

    -1 would otherwise be somebody's padding, and an id too large a crash on a GPU.
    """
    stream = new_stream(loaded, IDS)
    with pytest.raises(StateError, match=rf"\[0, {BYTE_VOCAB_SIZE}\), got .*{bad}"):
        getattr(stream, method)([5, bad, 6])
    assert_same_from_here(stream, new_stream(loaded, IDS))


def test_the_ends_of_the_vocabulary_are_in_range(loaded):
    """0 and the last id may be fed."""
    stream = new_stream(loaded, [0, BYTE_VOCAB_SIZE - 1])
    assert stream.position == 2


def test_logits_of_one_chunk_at_most(loaded):
    """Feeding asks for one row of logits, scoring for one chunk's; only the last row is kept.

    The oracle is what the model was asked for and gave.
    """
    rows = []

    def spy(_model, _args, kwargs, output):
        rows.append((kwargs["logits_to_keep"], output.logits.shape[1]))

    hook = loaded.model.register_forward_hook(spy, with_kwargs=True)
    try:
        stream = Stream(loaded, CONFIG, chunk_size=32)
        stream.feed(IDS[:70])
        assert rows == [(1, 1)] * 3
        rows.clear()
        stream.score(IDS[:70])
        assert rows == [(32, 32), (32, 32), (6, 6)]
    finally:
        hook.remove()
    assert stream.logits.shape == (BYTE_VOCAB_SIZE,)
    assert stream.logits.untyped_storage().nbytes() == BYTE_VOCAB_SIZE * 4


def test_the_cache_has_the_default_size(loaded):
    """Without a configuration: 4 sinks and 1,020 newest tokens."""
    assert Stream(loaded).cache.config == CacheConfig(sink_size=4, window_size=1020)


def test_recent_ids_are_bounded(loaded):
    """A stream remembers its newest ids, and only so many, however it is fed; so do its copies."""
    bound = RECENT_CACHES * CONFIG.cache_size + MAX_PENALTY_WINDOW
    ids = random_ids(bound + 100)[0].tolist()
    stream = new_stream(loaded, ids[:4])
    assert list(stream.recent_ids) == ids[:4]
    stream.feed(ids[4:2000])
    stream.score(ids[2000 : bound + 20])
    assert list(stream.recent_ids) == ids[20 : bound + 20]
    for copy in (stream.fork(), stream):
        copy.feed(ids[bound + 20 : bound + 21])
        assert list(copy.recent_ids) == ids[21 : bound + 21]


@pytest.mark.parametrize("length", [0, 3, 16, 45])
def test_stats_say_where_a_stream_stands(loaded, length):
    """Held, fitting, pinned, evicted and fed tokens; the oracle is counting."""
    assert new_stream(loaded, IDS[:length]).stats() == StreamStats(
        num_held=min(length, 16),
        cache_size=16,
        num_pinned=min(length, 4),
        num_evicted=max(0, length - 16),
        num_tokens=length,
    )


# Copies

LENGTHS = pytest.mark.parametrize("length", [0, 3, 16, 17, 45])


@LENGTHS
def test_forks_are_independent(loaded, length):
    """What is fed to a fork does not reach the stream, nor the other way round.

    The oracle is a fresh stream fed with everything.
    """
    stream = new_stream(loaded, IDS[:length])
    fork = stream.fork()
    fork.feed(IDS[45:60])
    twin = stream.fork()
    stream.feed(IDS[60:70])
    list(twin.generate(max_new_tokens=3)) if length else twin.feed([5])
    assert_same_from_here(fork, new_stream(loaded, IDS[:length], IDS[45:60]))
    assert_same_from_here(stream, new_stream(loaded, IDS[:length], IDS[60:70]))


def test_a_fork_has_the_same_sizes(loaded):
    """Model, cache sizes and chunk size of a fork are those of the stream."""
    stream = new_stream(loaded, IDS, chunk_size=7)
    fork = stream.fork()
    assert fork.loaded is stream.loaded
    assert (fork.chunk_size, fork.cache.config) == (7, CONFIG)
    assert fork.cache is not stream.cache


def test_asking_a_fork_does_not_disturb_the_stream(loaded):
    """A seeded answer on a fork, then the same answer on the stream itself."""
    loaded = replace(loaded, end_ids=frozenset())
    stream = new_stream(loaded, IDS)
    answers = [
        [e.text for e in s.generate(max_new_tokens=20) if isinstance(e, TextDelta)]
        for s in (stream.fork(), stream)
    ]
    assert answers[0] == answers[1]


@LENGTHS
def test_restore_goes_back(loaded, length):
    """A snapshot brings back the state, twice, whatever was done in between."""
    stream = new_stream(loaded, IDS[:length])
    snapshot = stream.snapshot()
    for later in (IDS[45:50], IDS[45:90]):
        stream.feed(later)
        stream.restore(snapshot)
        assert stream.position == length
        assert list(stream.recent_ids) == IDS[:length]
        if length == 0:
            assert stream.logits is None
    stream.feed(IDS[60:70])
    assert_same_from_here(stream, new_stream(loaded, IDS[:length], IDS[60:70]))


def test_restoring_into_another_stream_of_the_same_sizes(loaded):
    """A snapshot is all of a stream's state: another stream goes on from it."""
    stream = new_stream(loaded, IDS)
    other = new_stream(loaded, [5, 6])
    other.restore(stream.snapshot())
    assert_same_from_here(other, stream)


def test_a_snapshot_of_other_sizes_is_refused(loaded):
    """A StateError that says so."""
    other = new_stream(loaded, IDS, config=CacheConfig(sink_size=2, window_size=8))
    with pytest.raises(StateError, match="other sizes"):
        new_stream(loaded, IDS[:20]).restore(other.snapshot())


def test_a_refused_snapshot_changes_nothing(loaded):
    """After the StateError the stream is what it was."""
    stream = new_stream(loaded, IDS[:20])
    other = new_stream(loaded, IDS, config=CacheConfig(sink_size=2, window_size=8))
    with contextlib.suppress(StateError):
        stream.restore(other.snapshot())
    assert_same_from_here(stream, new_stream(loaded, IDS[:20]))


@pytest.mark.parametrize("length", [2, 15, 16, 40])
def test_rewind_takes_back_single_tokens(loaded, length):
    """Tokens fed one at a time are taken back; the oracle is a stream that never had them."""
    stream = new_stream(loaded, IDS[:length])
    stream.cache.set_undo_depth(5)
    before = stream.logits
    for token in IDS[60:65]:
        stream.feed([token])
    stream.rewind(5, before)
    assert_same_from_here(stream, new_stream(loaded, IDS[:length]))


def test_rewind_further_than_was_kept_is_refused(loaded):
    """A StateError, and the stream is what it was."""
    stream = new_stream(loaded, IDS)
    with pytest.raises(StateError, match="can take back 0 tokens, asked for 1"):
        stream.rewind(1, stream.logits)
    assert_same_from_here(stream, new_stream(loaded, IDS))


def test_rewind_by_nothing_changes_nothing(loaded):
    """Taking back no token leaves the ids that the repetition penalty looks at."""
    stream = new_stream(loaded, IDS)
    stream.rewind(0, stream.logits)
    assert list(stream.recent_ids) == IDS
