"""Decode: what is shown, what stays in the cache, what ends it, and how tokens are chosen.

Most tests replay given ids instead of the model's own choice. The oracle for what the cache holds
is a fresh stream fed with the prompt and the text that was shown.
"""

import itertools
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import BYTE_VOCAB_SIZE, random_ids, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_logits_equal, greedy_oracle
from test_tokenizer import sentencepiece_tokenizer
from transformers import TopPLogitsWarper

from streamchat import CacheConfig, ConfigError, SamplingConfig, StateError, Stream
from streamchat.config import MAX_PENALTY_WINDOW
from streamchat.engine.generate import NucleusWarper, Sampler
from streamchat.events import Evicted, Finished, TextDelta
from streamchat.model.load import LoadedModel, Source, end_ids

CONFIG = CacheConfig(sink_size=4, window_size=60)
SMALL = CacheConfig(sink_size=2, window_size=8)
PROMPT = "Tell me: "
END = 2


@pytest.fixture
def endless(loaded):
    """The tiny model without any end token."""
    return replace(loaded, end_ids=frozenset())


@pytest.fixture
def replay(monkeypatch):
    """`replay(ids)`: what the sampler will choose, whatever the logits."""

    def set_ids(ids):
        ids = iter(list(ids))
        monkeypatch.setattr(Sampler, "choose", lambda _self, _logits, _recent: next(ids))

    return set_ids


def prompted(loaded, config=CONFIG, prompt=PROMPT):
    stream = Stream(loaded, config)
    stream.feed(loaded.tokenizer.encode(prompt))
    return stream


def text_of(events):
    deltas = [event.text for event in events if isinstance(event, TextDelta)]
    assert all(deltas), "a TextDelta without text"
    return "".join(deltas)


def finished(events):
    """The last event, and the only one of its kind."""
    assert [isinstance(event, Finished) for event in events].count(True) == 1
    assert isinstance(events[-1], Finished)
    return events[-1]


def assert_holds(stream, ids):
    """The stream is one that was fed `ids` and nothing else, now and from here on."""
    fresh = Stream(stream.loaded, stream.cache.config)
    fresh.feed(ids)
    assert stream.position == len(ids)
    assert list(stream.recent_ids) == ids
    assert_logits_equal(stream.logits, fresh.logits)
    for more in ([70], [71, 72, 73]):
        stream.feed(more)
        fresh.feed(more)
        assert_logits_equal(stream.logits, fresh.logits)


def assert_holds_text(stream, text, prompt=PROMPT):
    assert_holds(stream, stream.loaded.tokenizer.encode(prompt + text))


def evicted_positions(events):
    return [p for e in events if isinstance(e, Evicted) for p in range(e.first, e.last + 1)]


# Stop strings


def test_a_stop_string_spread_over_tokens(loaded, replay):
    """With stop "own fox", "The quick brown fox" shows "The quick br" and holds no more."""
    stream = prompted(loaded)
    replay(loaded.tokenizer.encode("The quick brown fox jumps"))
    events = list(stream.generate(stop=["own fox"]))
    assert text_of(events) == "The quick br"
    end = finished(events)
    assert (end.reason, end.num_tokens) == ("stop_string", 12)
    assert_holds_text(stream, "The quick br")


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("abababacz", ["ababac"], "ab"),
        ("aaaaaab", ["aaab"], "aaa"),
        ("ownown foo own fox", ["own fox"], "ownown foo "),
        ("one\nUse\nUser: two", ["\nUser:"], "one\nUse"),
        ("xabdz", ["abc", "bd"], "xa"),
        ("xabcz", ["bc", "abcd"], "xa"),
        ("xabcdz", ["abcd", "zz"], "x"),
        ("hello world", ["zebra", "o w", "world"], "hell"),
        ("abc", ["", "c"], "ab"),
        ("stop", ["stop"], ""),
        ("xyz", ["x"], ""),
        ("say ok", [" ok", "ok"], "say"),
        ("caf\xe9 !!", ["!!"], "caf\xe9 "),
        ("x\u6211\u5f88 y", [" y"], "x\u6211\u5f88"),
    ],
    ids=range(14),
)
def test_stop_strings(loaded, replay, text, stop, shown):
    """False starts, several stop strings, one at once: what is shown, by hand, is what is held."""
    stream = prompted(loaded)
    replay(loaded.tokenizer.encode(text))
    events = list(stream.generate(stop=stop))
    assert text_of(events) == shown
    end = finished(events)
    assert end.reason == "stop_string"
    assert end.num_tokens == len(shown.encode())
    assert_holds_text(stream, shown)


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("a\xe9!", "\xe9!", "a"),
        ("a \U0001f600x", "\U0001f600x", "a "),
        ("\u6211\u5f88", "\u6211\u5f88", ""),
    ],
    ids=["accent", "emoji", "cjk"],
)
def test_a_stop_string_that_begins_with_a_split_character(loaded, replay, text, stop, shown):
    """Of a stop string that begins inside a character, nothing stays in the cache, not one byte."""
    stream = prompted(loaded)
    replay(loaded.tokenizer.encode(text))
    assert text_of(list(stream.generate(stop=[stop]))) == shown
    assert_holds_text(stream, shown)


def shown_by_the_oracle(text, stop):
    """The text before the first stop string that is complete, or all of it."""
    for end in range(1, len(text) + 1):
        found = [text[:end].find(s) for s in stop if s in text[:end]]
        if found:
            return text[: min(found)], "stop_string"
    return text, "length"


@settings(max_examples=80, deadline=None)
@given(
    text=st.text(alphabet="ab", min_size=1, max_size=14),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3),
    config=st.sampled_from([CONFIG, SMALL]),
)
def test_any_stop_strings(loaded, text, stop, config):
    """The oracle looks for the stop strings in each prefix of the whole text.

    Also with a cache so small that tokens of the stop string have evicted others: those are back,
    and only those that are not were told.
    """
    stream = prompted(loaded, config)
    ids = loaded.tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        remaining = iter(ids)
        patch.setattr(Sampler, "choose", lambda _self, _logits, _recent: next(remaining))
        events = list(stream.generate(stop=stop, max_new_tokens=len(ids)))
    shown, reason = shown_by_the_oracle(text, stop)
    assert text_of(events) == shown
    assert finished(events).reason == reason
    assert finished(events).num_tokens == len(shown)
    gone = range(config.sink_size, stream.position - config.window_size)
    assert evicted_positions(events) == [*gone]
    assert_holds_text(stream, shown)


def test_text_before_a_possible_stop_comes_at_once(loaded, replay):
    """Only what may begin a stop string is held back, and it comes as soon as it does not."""
    stream = prompted(loaded)
    replay(loaded.tokenizer.encode("abcabx."))
    events = list(stream.generate(stop=["abd"], max_new_tokens=7))
    assert [event.text for event in events[:-1]] == ["abc", "abx", "."]


def test_a_stop_string_that_never_ends_is_shown(loaded, replay):
    """At the cap, what was held back as a possible stop string is text after all."""
    stream = prompted(loaded)
    replay(loaded.tokenizer.encode("own fo"))
    events = list(stream.generate(stop=["own fox"], max_new_tokens=6))
    assert text_of(events) == "own fo"
    assert finished(events).reason == "length"
    assert_holds_text(stream, "own fo")


def test_held_back_text_comes_before_an_end_token(loaded, replay):
    """The same where the model ends its answer inside a possible stop string."""
    stream = prompted(loaded)
    replay([*loaded.tokenizer.encode("own fo"), END])
    events = list(stream.generate(stop=["own fox"]))
    assert text_of(events) == "own fo"
    assert finished(events).reason == "end_token"
    assert_holds_text(stream, "own fo")


class WordTokenizer:
    """Ids 0 to 254 are characters, 255 is "br own fox": a token with text on both sides."""

    WORD, TEXT = 255, "br own fox"

    def decode(self, ids):
        return "".join(self.TEXT if i == self.WORD else chr(i) for i in ids)

    def encode(self, text):
        return [ord(char) for char in text]

    encode_continuation = encode

    def lead(self, ids, text):
        return ""


@pytest.mark.parametrize(("rest", "stop"), [("", "own"), ("es", "own foxes"), ("es", "foxes")])
def test_a_token_with_text_before_the_stop_string(loaded, replay, rest, stop):
    """Of a token that has text before the stop string, that text is shown, and alone is held.

    The stop string may end in that token, or in a later one.
    """
    loaded = replace(loaded, tokenizer=WordTokenizer())
    stream = prompted(loaded)
    encode = loaded.tokenizer.encode
    replay([*encode("a "), WordTokenizer.WORD, *encode(rest)])
    events = list(stream.generate(stop=[stop]))
    shown = "a br own fox"[: "a br own foxes".find(stop)]
    assert text_of(events) == shown
    assert finished(events).num_tokens == len(shown)
    assert_holds_text(stream, shown)


@pytest.fixture(scope="module")
def sentencepiece():
    """A tiny model with a tokenizer that puts a space before each text."""
    model, tokenizer = tiny_model(vocab_size=512), sentencepiece_tokenizer("metaspace")
    return LoadedModel(Source("tiny", "tiny"), model, tokenizer, frozenset())


def test_text_before_a_stop_string_gets_no_space(sentencepiece, replay):
    """SentencePiece: the first half of a token, fed again, continues the word before it.

    The oracle is the decoded text: encoding that half as a text of its own would give "quick e".
    """
    tokenizer = sentencepiece.tokenizer
    stream = prompted(sentencepiece, prompt="the quick")
    replay(tokenizer.inner.convert_tokens_to_ids(["ed"]))
    assert text_of(list(stream.generate(stop=["d"]))) == "e"
    assert tokenizer.decode(list(stream.recent_ids)) == "the quicke"


@pytest.mark.parametrize(
    ("answer", "stop", "held"),
    [
        (" dogs", "ogs", "the quick d"),
        (" dog fox", "g f", "the quick do"),
        (" dogs", "dogs", "the quick"),
        ("  dogs", "ogs", "the quick  d"),
        (" dog", "og", "the quick d"),
    ],
)
def test_the_space_before_the_first_word_stays_in_the_cache(
    sentencepiece, replay, answer, stop, held
):
    """SentencePiece: a stop string in the first word of an answer does not glue it to the prompt.

    The oracle is the decoded text of what the model chose, up to the stop string.
    """
    tokenizer = sentencepiece.tokenizer
    stream = prompted(sentencepiece, prompt="the quick")
    replay(tokenizer.encode_continuation(answer))
    assert finished(list(stream.generate(stop=[stop]))).reason == "stop_string"
    assert tokenizer.decode(list(stream.recent_ids)) == held


def test_many_tokens_without_text_inside_a_stop_string(loaded, replay):
    """More tokens than can be taken back: the stop string ends the answer all the same.

    Special tokens have no text. What of them stays in the cache is counted.
    """
    stream = prompted(loaded)
    position = stream.position
    encode = loaded.tokenizer.encode
    replay([*encode("a o"), *[1] * 30, *encode("wn fox")])
    events = list(stream.generate(stop=["own fox"]))
    assert text_of(events) == "a "
    assert finished(events).reason == "stop_string"
    assert finished(events).num_tokens == stream.position - position


# End tokens


@pytest.mark.parametrize(
    ("of_tokenizer", "of_config", "of_generation_config", "expected"),
    [
        (1, None, [1, 106, 50], {1, 106, 50}),
        (1, 7, 9, {1, 7, 9}),
        (None, 7, None, {7}),
        (None, [7, 8], None, {7, 8}),
        (5, None, None, {5}),
        (0, None, None, {0}),
        (None, None, None, set()),
        (None, [], [], set()),
    ],
    ids=range(8),
)
def test_end_ids_are_the_union(of_tokenizer, of_config, of_generation_config, expected):
    """Every id that tokenizer, configuration or generation configuration names."""
    model = SimpleNamespace(
        config=SimpleNamespace(eos_token_id=of_config),
        generation_config=SimpleNamespace(eos_token_id=of_generation_config),
    )
    assert end_ids(SimpleNamespace(eos_token_id=of_tokenizer), model) == expected


def test_end_ids_without_a_generation_config():
    """A model need not have a generation configuration, nor a configuration an end token."""
    model = SimpleNamespace(config=SimpleNamespace())
    assert end_ids(SimpleNamespace(eos_token_id=3), model) == {3}
    model.generation_config = None
    assert end_ids(SimpleNamespace(), model) == set()


@pytest.mark.parametrize("end_id", [END, 106, 50])
def test_every_end_token_ends_an_answer(loaded, replay, end_id):
    """Each id of the union ends it; it is neither shown nor fed nor counted."""
    loaded = replace(loaded, end_ids=frozenset({END, 106, 50}))
    stream = prompted(loaded)
    replay([*loaded.tokenizer.encode("ok"), end_id])
    events = list(stream.generate())
    assert text_of(events) == "ok"
    assert (finished(events).reason, finished(events).num_tokens) == ("end_token", 2)
    assert_holds_text(stream, "ok")


def test_an_answer_may_be_empty(loaded, replay):
    """An end token at once: no text, no tokens, the stream as it was."""
    stream = prompted(loaded)
    replay([END])
    events = list(stream.generate())
    assert len(events) == 1
    assert (finished(events).reason, finished(events).num_tokens) == ("end_token", 0)
    assert_holds_text(stream, "")


# The cap


@pytest.mark.parametrize("cap", [1, 5])
def test_the_cap_ends_an_answer(endless, cap):
    """`max_new_tokens` tokens are fed, no more; the reason is `length`."""
    stream = prompted(endless)
    position = stream.position
    end = finished(list(stream.generate(max_new_tokens=cap)))
    assert (end.reason, end.num_tokens) == ("length", cap)
    assert stream.position == position + cap


def test_without_any_end_token_the_default_cap_bounds_it(endless, replay):
    """With none anywhere, an answer ends after 256 tokens all the same."""
    stream = prompted(endless, SMALL)
    replay([END] * 1000)
    events = list(stream.generate())
    assert (finished(events).reason, finished(events).num_tokens) == ("length", 256)


def test_the_time_is_that_of_decoding(loaded, replay):
    """`elapsed_seconds` lies between nothing and the time of the whole call."""
    stream = prompted(loaded)
    replay(loaded.tokenizer.encode("some text"))
    started = time.perf_counter()
    end = finished(list(stream.generate(max_new_tokens=9)))
    assert 0 < end.elapsed_seconds <= time.perf_counter() - started


def test_a_character_that_the_cap_cuts(loaded, replay):
    """At the cap, half a character is shown as one U+FFFD, and the cache has its bytes."""
    ids = loaded.tokenizer.encode("a\U0001f600")[:-1]
    stream = prompted(loaded)
    replay(ids)
    events = list(stream.generate(max_new_tokens=4))
    assert text_of(events) == "a\ufffd"
    assert_holds(stream, loaded.tokenizer.encode(PROMPT) + ids)


def test_no_event_has_half_a_character(loaded, replay):
    """Each event's text is whole characters, and joined they are the text."""
    text = "na\xefve \u6211\u5f88 \U0001f469\u200d\U0001f469\u200d\U0001f467 e\u0301"
    stream = prompted(loaded)
    ids = loaded.tokenizer.encode(text)
    replay(ids)
    events = list(stream.generate(max_new_tokens=len(ids)))
    assert text_of(events) == text
    assert "\ufffd" not in text_of(events)
    assert_holds_text(stream, text)


def test_what_was_shown_is_fed_when_the_next_event_comes(loaded, replay):
    """When the caller has control again, all text but the newest event's is in the cache."""
    stream = prompted(loaded)
    position = stream.position
    replay(loaded.tokenizer.encode("abc"))
    seen = [
        (event.text, stream.position - position)
        for event in stream.generate(max_new_tokens=3)
        if isinstance(event, TextDelta)
    ]
    assert seen == [("a", 0), ("b", 1), ("c", 2)]


# Closing


@pytest.mark.parametrize("config", [CONFIG, SMALL], ids=["roomy", "small"])
def test_closing_leaves_the_cache_at_a_whole_token(endless, config):
    """Closed after its nth text, a stream holds the prompt and what was shown.

    The oracle is a run that `max_new_tokens` cut at the same token; the next answers are equal.
    """
    closed, capped = prompted(endless, config), prompted(endless, config)
    position, num_texts = closed.position, 0
    answer = closed.generate(max_new_tokens=50)
    for event in answer:
        num_texts += isinstance(event, TextDelta)
        if num_texts == 6:
            answer.close()
    num_tokens = closed.position - position
    assert 6 <= num_tokens < 50
    list(capped.generate(max_new_tokens=num_tokens))
    assert list(closed.recent_ids) == list(capped.recent_ids)
    assert_logits_equal(closed.logits, capped.logits)
    closed.feed([70])
    capped.feed([70])
    answers = [text_of(list(s.generate(max_new_tokens=20))) for s in (closed, capped)]
    assert answers[0] == answers[1]


def test_closing_after_the_shown_token(loaded, replay):
    """One event, one token: after closing, exactly that one is in the cache."""
    stream = prompted(loaded)
    replay(loaded.tokenizer.encode("abc"))
    answer = stream.generate()
    assert next(answer) == TextDelta("a")
    answer.close()
    assert list(answer) == []
    assert_holds_text(stream, "a")


def test_an_exception_at_an_event_feeds_the_shown_token(loaded, replay):
    """What the caller throws in comes back out, with the cache at a whole token."""
    stream = prompted(loaded)
    replay(loaded.tokenizer.encode("abc"))
    answer = stream.generate()
    next(answer)
    with pytest.raises(KeyboardInterrupt):
        answer.throw(KeyboardInterrupt)
    assert_holds_text(stream, "a")


def test_closing_at_an_eviction(loaded, replay):
    """Closed at an `Evicted`, the stream holds what was shown so far."""
    stream = prompted(loaded, SMALL, "0123456789")
    replay(loaded.tokenizer.encode("abc"))
    answer = stream.generate()
    assert [next(answer), next(answer)] == [TextDelta("a"), Evicted(2, 2)]
    answer.close()
    assert_holds_text(stream, "a", "0123456789")


def test_an_answer_that_is_never_begun_does_nothing(loaded):
    """Closing a generator before its first event leaves the stream alone."""
    stream = prompted(loaded)
    stream.generate().close()
    assert_holds_text(stream, "")


def test_closing_while_text_is_held_back(loaded, replay):
    """The module says that what is shown and what the cache holds are the same at every event.

    Here "ab" is shown, and "abab" is held back: after closing, the cache should not have it.
    """
    stream = prompted(loaded)
    replay(loaded.tokenizer.encode("abababab"))
    answer = stream.generate(stop=["ababac"])
    assert next(answer) == TextDelta("ab")
    answer.close()
    assert_holds_text(stream, "ab")


@settings(max_examples=80, deadline=None)
@given(
    text=st.text(alphabet="ab\xe9", min_size=1, max_size=14),
    stop=st.lists(st.text(alphabet="ab\xe9", min_size=1, max_size=5), max_size=3),
    num_events=st.integers(1, 14),
    config=st.sampled_from([CONFIG, SMALL]),
)
def test_closing_anywhere_leaves_what_was_shown(loaded, text, stop, num_events, config):
    """Closed at any event, whatever is held back: the cache has what was shown, whole characters.

    No position was told to be evicted that is back.
    """
    stream = prompted(loaded, config)
    ids = loaded.tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        remaining = iter(ids)
        patch.setattr(Sampler, "choose", lambda _self, _logits, _recent: next(remaining))
        answer = stream.generate(stop=stop, max_new_tokens=len(ids))
        events = list(itertools.islice(answer, num_events))
        answer.close()
    told = evicted_positions(events)
    gone = [*range(config.sink_size, stream.position - config.window_size)]
    assert told == gone[: len(told)]
    assert_holds_text(stream, text_of(events))


# Evictions


@pytest.mark.parametrize("prompt", ["x", "0123456", "0123456789", "0123456789abcdef"])
def test_each_eviction_is_told_once(endless, prompt):
    """Over two answers, the positions that left while decoding, in order, none twice.

    The oracle is arithmetic: after n tokens, the positions from S on that are not the last W.
    """
    stream = prompted(endless, SMALL, prompt)
    before = max(0, stream.position - 8)
    events = [e for _ in range(2) for e in stream.generate(max_new_tokens=15)]
    assert stream.position == len(prompt) + 30
    assert evicted_positions(events) == [*range(max(2, before), len(prompt) + 30 - 8)]


def test_an_eviction_is_told_after_the_token_that_causes_it(loaded, replay):
    """First the text, then, once its token is in the cache, what had to leave for it."""
    stream = prompted(loaded, SMALL, "012345678")
    replay(loaded.tokenizer.encode("abc"))
    events = list(stream.generate(max_new_tokens=3))
    shown = [TextDelta("a"), TextDelta("b"), Evicted(2, 2), TextDelta("c"), Evicted(3, 3)]
    assert events[:-1] == shown


def test_positions_that_a_stop_string_brings_back_were_not_evicted(loaded, replay):
    """After a stop string, the positions told are those that are not in the cache."""
    stream = prompted(loaded, SMALL, "012345678")
    replay(loaded.tokenizer.encode("ab own fox"))
    events = list(stream.generate(stop=["own fox"]))
    assert text_of(events) == "ab "
    assert evicted_positions(events) == [*range(2, stream.position - 8)]


def test_evictions_by_the_text_before_a_stop_string_are_told(loaded, replay):
    """Text of the last token that is shown with the stop evicts like any other."""
    loaded = replace(loaded, tokenizer=WordTokenizer())
    stream = prompted(loaded, SMALL, "0123456789")
    replay([WordTokenizer.WORD])
    events = list(stream.generate(stop=["own"]))
    assert text_of(events) == "br "
    assert evicted_positions(events) == [*range(2, stream.position - 8)]


# Choosing


def ids_of_answer(stream, num_tokens, sampling=None):
    """The ids that an answer appends."""
    list(stream.generate(max_new_tokens=num_tokens, sampling=sampling))
    return list(stream.recent_ids)[-num_tokens:]


def test_greedy_is_what_transformers_generates(endless):
    """Oracle C: before any eviction, the ids of transformers' greedy `generate`."""
    ids = random_ids(20)
    stream = Stream(endless, CONFIG)
    stream.feed(ids[0].tolist())
    assert ids_of_answer(stream, 30) == greedy_oracle(endless.model, ids, 30)[0].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0, "top_k": 5},
        {"temperature": 2.0, "top_p": 0.7},
        {"temperature": 2.0, "min_p": 0.2},
        {"temperature": 1.5, "repetition_penalty": 1.8},
        {"temperature": 2.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_sampling_is_what_transformers_generates(endless, options):
    """With the same seed, the ids of transformers' own sampling, whatever the filters.

    The oracle draws from torch's global generator, and its top_k must be set off explicitly.
    """
    ids = random_ids(20)
    stream = Stream(endless, CONFIG)
    stream.feed(ids[0].tolist())
    got = ids_of_answer(stream, 30, SamplingConfig(seed=5, **options))
    torch.manual_seed(5)
    out = endless.model.generate(
        ids,
        max_new_tokens=30,
        do_sample=True,
        eos_token_id=None,
        **({"top_k": 0, "repetition_penalty": 1.0} | options),
    )
    assert got == out[0, 20:].tolist()


def test_greedy_with_a_repetition_penalty_is_what_transformers_generates(endless):
    """The penalty holds without sampling too; at 8 it changes the answer."""
    ids = random_ids(20)
    answers = []
    for penalty in (1.0, 8.0):
        stream = Stream(endless, CONFIG)
        stream.feed(ids[0].tolist())
        answers.append(ids_of_answer(stream, 30, SamplingConfig(repetition_penalty=penalty)))
    out = endless.model.generate(
        ids, max_new_tokens=30, do_sample=False, eos_token_id=None, repetition_penalty=8.0
    )
    assert answers[1] == out[0, 20:].tolist()
    assert answers[0] != answers[1]


def test_a_seed_gives_the_same_answer_again(endless):
    """The same seed, the same ids; another seed, or none, others.

    30 tokens of 259 at temperature 3: equal by chance less than once in 10 to the 30.
    """
    stream = prompted(endless)

    def answer(seed):
        return ids_of_answer(stream.fork(), 30, SamplingConfig(temperature=3, seed=seed))

    assert answer(1) == answer(1)
    answers = [answer(1), answer(2), answer(None), answer(None)]
    assert len(set(map(tuple, answers))) == 4


def test_a_seed_does_not_touch_torch(endless):
    """Sampling neither sets nor draws from torch's global generator."""
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    ids_of_answer(prompted(endless), 5, SamplingConfig(temperature=1, seed=9))
    assert torch.equal(torch.rand(3), expected)


LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0])


def draws(config, recent_ids=(0,), num=400):
    sampler = Sampler(config)
    return [sampler.choose(LOGITS, list(recent_ids)) for _ in range(num)]


@pytest.mark.parametrize("temperature", [0.5, 1, 2.0])
def test_how_often_a_token_is_drawn(temperature):
    """Frequencies of 4,000 draws are softmax(logits / temperature), within four deviations."""
    ids = draws(SamplingConfig(temperature=temperature, seed=0), num=4000)
    for token, p in enumerate((LOGITS.double() / temperature).softmax(0).tolist()):
        deviation = (p * (1 - p) / 4000) ** 0.5
        assert abs(ids.count(token) / 4000 - p) < 4 * deviation + 1e-3


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        ({"temperature": 0}, {1}),
        ({"temperature": 0, "seed": 1, "top_k": 3, "top_p": 0.5}, {1}),
        ({"temperature": 2, "top_k": 1}, {1}),
        ({"temperature": 2, "top_k": 2}, {1, 2}),
        # At temperature 1 the probabilities are 0.090, 0.657, 0.242, 0.012.
        ({"temperature": 1, "top_p": 0.5}, {1}),
        ({"temperature": 1, "top_p": 0.8}, {1, 2}),
        ({"temperature": 1, "min_p": 1.0}, {1}),
        ({"temperature": 1, "min_p": 0.2}, {1, 2}),
        ({"temperature": 1, "min_p": 0.1}, {0, 1, 2}),
        ({"temperature": 50}, {0, 1, 2, 3}),
    ],
    ids=str,
)
def test_which_tokens_can_be_drawn(options, possible):
    """Which of four tokens each filter leaves, worked out by hand."""
    assert set(draws(SamplingConfig(**({"seed": 0} | options)))) == possible


def test_the_penalty_looks_at_its_window_only():
    """A token further back than `penalty_window` is not penalised: a stream has no end.

    Logits 3 and 2: divided by 2, the first token falls behind the second.
    """
    config = SamplingConfig(repetition_penalty=2.0, penalty_window=3)
    assert Sampler(config).choose(LOGITS, [1, 0, 0]) == 2
    assert Sampler(config).choose(LOGITS, [1, 0, 0, 0]) == 1
    assert Sampler(config).choose(LOGITS, [1]) == 2


def test_the_penalty_also_sees_the_prompt_and_the_answer(endless):
    """With a large penalty and all in its window, no token comes twice, of the prompt neither."""
    stream = prompted(endless)
    config = SamplingConfig(repetition_penalty=1e6)
    ids = ids_of_answer(stream, 40, config)
    assert len(set(ids)) == 40
    assert not set(ids) & set(endless.tokenizer.encode(PROMPT))


def test_choosing_leaves_the_logits_alone(endless):
    """The stream's own logits are what the model gave, after any processor."""
    stream = prompted(endless)
    before = stream.logits.clone()
    config = SamplingConfig(temperature=2, top_k=3, top_p=0.5, min_p=0.5, repetition_penalty=2.0)
    Sampler(config).choose(stream.logits, list(stream.recent_ids))
    assert torch.equal(stream.logits, before)


def test_half_precision_logits_are_chosen_from_in_float32():
    """bfloat16 logits: the filters see the numbers in float32, and greedy needs no processor."""
    logits = LOGITS.bfloat16()
    assert Sampler(SamplingConfig()).choose(logits, [0]) == 1
    assert Sampler(SamplingConfig(temperature=1, top_k=1)).choose(logits, [0]) == 1


# What is refused


def test_an_empty_stream_cannot_go_on(loaded):
    """A StateError that says what to do; nothing has been fed."""
    stream = Stream(loaded, CONFIG)
    with pytest.raises(StateError, match="feed at least one token"):
        next(stream.generate())
    assert stream.position == 0


@pytest.mark.parametrize("cap", [0, -1])
def test_a_cap_below_one_is_refused(loaded, cap):
    """A StateError that names the value."""
    stream = prompted(loaded)
    with pytest.raises(StateError, match=f"max_new_tokens must be at least 1, got {cap}"):
        next(stream.generate(max_new_tokens=cap))
    assert_holds_text(stream, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
        ({"top_p": float("nan")}, r"top_p must be in \(0, 1\], got nan"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\], got -0.1"),
        ({"min_p": 1.5}, r"min_p must be in \[0, 1\], got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0, got 0"),
        ({"penalty_window": 0}, r"penalty_window must be in \[1, 4096\], got 0"),
        ({"penalty_window": 4097}, r"penalty_window must be in \[1, 4096\], got 4097"),
    ],
    ids=str,
)
def test_sampling_options_out_of_range(options, message):
    """A ConfigError that names the option, its range and what was got."""
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**options)


@pytest.mark.parametrize(
    "option", ["temperature", "top_p", "min_p", "repetition_penalty", "penalty_window"]
)
def test_options_that_are_no_number(option):
    """NaN is out of every range."""
    with pytest.raises(ConfigError, match=option):
        SamplingConfig(**{option: float("nan")})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "penalty_window": 1},
        {"temperature": 5.0, "top_p": 1e-6, "min_p": 1, "repetition_penalty": 0.5},
        {"repetition_penalty": 2.0, "penalty_window": MAX_PENALTY_WINDOW},
    ],
    ids=str,
)
def test_sampling_options_at_the_ends_of_their_range(options):
    """The ends that the messages name are allowed, and a token can be chosen with them."""
    assert Sampler(SamplingConfig(**options)).choose(LOGITS, [0]) in range(4)


@pytest.mark.parametrize("option", ["temperature", "min_p", "top_p", "repetition_penalty"])
def test_options_may_be_whole_numbers(option):
    """1 and 2 are as good as 1.0 and 2.0: the configuration takes them, so the sampler does."""
    value = 1 if option in ("top_p", "min_p") else 2
    options = {"temperature": 1.0} | {option: value}
    assert Sampler(SamplingConfig(**options)).choose(LOGITS, [0]) in range(4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sink_size": -1}, "sink_size must be at least 0, got -1"),
        ({"window_size": 0}, "window_size must be at least 1, got 0"),
    ],
    ids=str,
)
def test_cache_sizes_out_of_range(options, message):
    """A ConfigError that names the size, its range and what was got."""
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**options)


def test_cache_sizes_at_the_ends_of_their_range():
    """No sinks and a window of one token are allowed; the cache holds their sum."""
    assert CacheConfig(sink_size=0, window_size=1).cache_size == 1
    assert CacheConfig().cache_size == 1024


def test_the_largest_window_is_remembered(endless):
    """Even with the smallest cache, a stream remembers all that the largest window looks at.

    The id at the far end of the window is penalised, and the one before it is not.
    """
    stream = Stream(endless, CacheConfig(sink_size=0, window_size=1))
    stream.feed([70, 71, *[72] * (MAX_PENALTY_WINDOW - 1)])
    logits = torch.zeros(BYTE_VOCAB_SIZE)
    logits[70], logits[71] = 3.0, 3.5
    config = SamplingConfig(repetition_penalty=2.0, penalty_window=MAX_PENALTY_WINDOW)
    assert Sampler(config).choose(logits, stream.recent_ids) == 70
    logits[70] = 1.5  # 71, were it not penalised, would be above; so it is in the window
    assert Sampler(config).choose(logits, stream.recent_ids) == 71
    logits[71] = 2.5
    assert Sampler(config).choose(logits, stream.recent_ids) == 70


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("vocab_size", [3, 1024, 5000])
@pytest.mark.parametrize("sharpness", [0.01, 1.0, 8.0], ids=["flat", "plain", "peaked"])
def test_the_nucleus_is_that_of_transformers(top_p, vocab_size, sharpness):
    """Few candidates, all of them, or more than are looked at first: the same set, untouched."""
    scores = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(3)) * sharpness
    expected = TopPLogitsWarper(top_p)(None, scores)
    assert torch.equal(NucleusWarper(top_p)(None, scores), expected)
