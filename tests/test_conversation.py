"""A conversation feeds each turn's new ids and no others, and remembers what it has shown.

Most answers are scripted: the sampler chooses given ids whatever the logits. The oracle for what
has been fed is `apply_chat_template` over the whole conversation.
"""

import io
import re
import time
from collections import deque
from dataclasses import replace
from statistics import median

import pytest
import torch
from conftest import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_logits_equal, one_layer_oracle
from rich.console import Console
from test_template import CASES, CHATML_DEFAULT, IM, SYSTEM, Case, tokenizer_of, whole

from streamchat import CacheConfig, SamplingConfig, StateError, Stream, UnsupportedModelError
from streamchat.chat.conversation import MAX_TURNS, Conversation
from streamchat.chat.session import ChatSession
from streamchat.chat.thinking import split_thinking
from streamchat.config import MAX_PENALTY_WINDOW
from streamchat.engine.generate import Sampler
from streamchat.engine.stream import RECENT_CACHES
from streamchat.errors import StreamFullError
from streamchat.events import (
    Evicted,
    Finished,
    Prefilled,
    QuestionEvicted,
    TextDelta,
    ThinkingDelta,
    TurnsEvicted,
)
from streamchat.model.load import LoadedModel, Source
from streamchat.ui.commands import Commands

VOCAB_SIZE = 272
"""Room for the byte tokenizers of `test_template`, special tokens included."""

ROOMY = CacheConfig(sink_size=4, window_size=400)
SMALL = CacheConfig(sink_size=4, window_size=60)

BOS_CASE = Case("{{ bos_token }}" + CHATML_DEFAULT, IM, "", adds_bos=True)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Threads gain nothing on tiny models, and cost much where other processes run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    """One layer, so that oracle A holds."""
    return tiny_model(num_layers=1, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def loaded_with(model):
    """`loaded_with(case)`: the tiny model with the case's tokenizer and end token."""

    def make(case):
        tokenizer = tokenizer_of(case)
        end = tokenizer.inner.convert_tokens_to_ids(case.special[-1] if case.special else "</s>")
        return LoadedModel(Source("tiny", "tiny"), model, tokenizer, frozenset({end}))

    return make


@pytest.fixture(scope="module")
def chatml(loaded_with):
    return loaded_with(CASES["chatml"])


class Script:
    """Answers that the sampler will give, one after another, each with an end token."""

    def __init__(self, monkeypatch):
        self.ids = deque()
        monkeypatch.setattr(Sampler, "choose", lambda _self, _logits, _recent: self.ids.popleft())

    def answer(self, loaded, text, *, ends=True):
        """Let the next answer be `text`; it must be ended by other means where `ends` is false."""
        self.ids.extend(loaded.tokenizer.encode(text))
        if ends:
            self.ids.append(min(loaded.end_ids))


@pytest.fixture
def script(monkeypatch):
    return Script(monkeypatch)


@pytest.fixture
def fed(monkeypatch):
    """All ids that have gone through `Stream._forward`, by stream: `fed(stream)`."""
    ids_of = {}
    forward = Stream._forward

    def spy(self, ids, num_logits):
        ids_of.setdefault(id(self), []).extend(ids)
        return forward(self, ids, num_logits)

    monkeypatch.setattr(Stream, "_forward", spy)
    return lambda stream: ids_of.get(id(stream), [])


def text_of(events, kind=TextDelta):
    return "".join(event.text for event in events if isinstance(event, kind))


def ask(conversation, question):
    """All events of a turn, which begin with `Prefilled` and end with the only `Finished`."""
    events = list(conversation.say(question))
    fed = [event for event in events if isinstance(event, Prefilled)]
    assert events[: len(fed)] == fed
    assert fed[-1].num_tokens == fed[-1].num_total
    assert [type(event) for event in events].count(Finished) == 1
    assert isinstance(events[-1], Finished)
    assert text_of(events) == conversation.turns[-1].answer
    return events


def answer_to(conversation, script, question, text):
    script.answer(conversation.loaded, text)
    events = ask(conversation, question)
    assert conversation.turns[-1].answer == text
    return events


def close_after(events, num_events):
    """Take so many events and close; returns those taken."""
    taken = [event for _, event in zip(range(num_events), events, strict=False)]
    events.close()
    return taken


def held_text(conversation):
    """What the stream holds of the newest answer: its ids decoded."""
    stream, turn = conversation.stream, conversation.turns[-1]
    template = conversation.template
    turn_ids = list(stream.recent_ids)[turn.start - stream.position :]
    asked = template.first_turn if turn.start == 0 else template.next_turn
    return conversation.loaded.tokenizer.decode(turn_ids[len(asked(turn.question)) :])


# What is fed


def test_two_thousand_turns_are_one_conversation(loaded_with, script, fed):
    """After 2,000 turns the ids fed are one whole rendering, and nothing has grown on the way."""
    loaded = loaded_with(BOS_CASE)
    conversation = Conversation(loaded, cache=SMALL)
    num_bytes = conversation.stream.cache.num_bytes
    questions = [f"q{i}" for i in range(2000)]
    answers = [f"{i % 10}" for i in range(2000)]
    costs, first_full = [], None
    for question, answer in zip(questions, answers, strict=True):
        script.answer(loaded, answer)
        started = time.process_time()
        for _ in conversation.say(question):
            pass
        costs.append(time.process_time() - started)
        if first_full is None and conversation.stream.cache.num_evicted:
            first_full = len(costs)
    ids = fed(conversation.stream)
    messages = whole(loaded.tokenizer, None, questions, answers)
    assert ids == [*messages, *loaded.tokenizer.encode(answers[-1])]
    assert ids.count(loaded.tokenizer.inner.bos_token_id) == 1
    system = loaded.tokenizer.encode("You are Tiny.")
    starts = range(len(ids) - len(system))
    assert sum(ids[i] == system[0] and ids[i : i + len(system)] == system for i in starts) == 1

    assert median(costs[-100:]) <= 1.5 * median(costs[first_full : first_full + 100])
    assert len(conversation.turns) == MAX_TURNS
    assert conversation.num_turns == 2000
    assert conversation.turns[-1].number == 2000
    assert conversation.stream.cache.num_bytes == num_bytes
    cache_size = conversation.cache_config.cache_size
    assert len(conversation.stream.recent_ids) <= RECENT_CACHES * cache_size + MAX_PENALTY_WINDOW


@pytest.mark.parametrize("name", ["chatml-default-system", "llama3-adds-bos", "gemma2", "qwen3"])
def test_a_turn_feeds_its_own_ids_and_no_others(name, loaded_with, script, fed):
    """Turn by turn, through the cache's overflow, the stream has been fed one whole rendering."""
    loaded, case = loaded_with(CASES[name]), CASES[name]
    conversation = Conversation(loaded, system=SYSTEM, cache=SMALL)
    questions, answers = [], []
    for index in range(8):
        questions.append(f"question {index}?")
        answers.append(f"Answer {index}.")
        before = len(fed(conversation.stream))
        events = answer_to(conversation, script, questions[-1], answers[-1])
        expected = whole(loaded.tokenizer, SYSTEM, questions, answers, folds=case.folds)
        assert fed(conversation.stream) == [*expected, *loaded.tokenizer.encode(answers[-1])]
        assert events[0].num_tokens == len(expected) - before
        turn = conversation.turns[-1]
        assert (turn.start, turn.end) == (before, conversation.stream.position)


def test_without_a_template_a_base_model_chats(loaded_with, script, fed):
    """A base model's turns are the plain format, and it is stopped where it would ask itself."""
    loaded = loaded_with(Case("", (), "", adds_bos=True))
    conversation = Conversation(loaded, cache=ROOMY)
    script.answer(loaded, " Aye.\nUser:", ends=False)
    events = ask(conversation, "One?")
    assert events[-1].reason == "stop_string"
    assert conversation.turns[-1].answer == " Aye."
    script.answer(loaded, " Two.")
    ask(conversation, "Two?")
    text = "User: One?\nAssistant: Aye.\nUser: Two?\nAssistant: Two."
    expected = [loaded.tokenizer.inner.bos_token_id, *loaded.tokenizer.encode(text)]
    assert list(conversation.stream.recent_ids) == expected


# What is pinned


def test_the_system_prompt_is_held_after_overflow(chatml, script, fed):
    """After 30 turns the first P keys are, bit for bit, those of the system prompt.

    Oracles: the keys as they were before anything left; a stock pass over the pinned ids and the
    newest W (oracle A).
    """
    window = 60
    conversation = Conversation(chatml, system=SYSTEM * 2, cache=replace(SMALL, window_size=window))
    pinned = conversation.template.pinned_ids()
    num_pinned = len(pinned)
    assert num_pinned > 60
    assert conversation.num_pinned == conversation.cache_config.sink_size == num_pinned
    keys = None
    for index in range(30):
        answer_to(conversation, script, f"question {index}", f"answer {index}")
        cache = conversation.stream.cache
        assert cache.layout.num_sinks(cache.num_seen) == num_pinned
        now = cache.snapshot().tensors["keys"][:, :, :, :num_pinned]
        keys = now if keys is None else keys
        assert torch.equal(now, keys)
    assert cache.num_evicted > 5 * window
    ids = fed(conversation.stream)
    assert ids[:num_pinned] == pinned
    expected = one_layer_oracle(chatml.model, ids, num_pinned, window)
    assert_logits_equal(conversation.stream.logits, expected)


@pytest.mark.parametrize("asked", [4, 300])
def test_sinks_are_raised_and_never_lowered(chatml, asked):
    """There are as many sinks as asked for, and at least the pinned ids."""
    config = CacheConfig(sink_size=asked, window_size=200)
    conversation = Conversation(chatml, system=SYSTEM, cache=config)
    num_pinned = len(conversation.template.pinned_ids())
    assert conversation.num_pinned == num_pinned
    assert conversation.cache_config.sink_size == max(asked, num_pinned)
    assert conversation.cache_config.window_size == 200


def test_a_window_without_sinks_pins_nothing(chatml, script):
    """`--sinks 0` asks for a plain window: the system prompt leaves like anything else."""
    conversation = Conversation(chatml, system=SYSTEM, cache=replace(SMALL, sink_size=0))
    assert conversation.num_pinned == conversation.cache_config.sink_size == 0
    assert conversation.stream.stats().num_pinned == 0
    answer_to(conversation, script, "one", "1")
    conversation.undo()
    answer_to(conversation, script, "one", "1")


def test_pinned_ids_and_window_beyond_the_trained_length_are_refused(chatml):
    """S + W that fits without the system prompt, but not with it, is refused, with the way out."""
    trained = chatml.model.config.max_position_embeddings
    config = CacheConfig(sink_size=4, window_size=trained - 10)
    num_pinned = Conversation(chatml, system=SYSTEM, cache=SMALL).num_pinned
    with pytest.raises(UnsupportedModelError, match=f"largest --window is {trained - num_pinned}"):
        Conversation(chatml, system=SYSTEM, cache=config)
    fits = replace(config, window_size=trained - num_pinned)
    assert Conversation(chatml, system=SYSTEM, cache=fits).num_pinned == num_pinned


# How answers end

END_IDS = [4, 9, 250]


@pytest.mark.parametrize("end", END_IDS)
def test_any_of_several_end_tokens_ends_an_answer(chatml, script, fed, end):
    """Each of the end ids ends the turn, is not shown, and is not fed."""
    loaded = replace(chatml, end_ids=frozenset(END_IDS))
    conversation = Conversation(loaded, cache=ROOMY)
    script.ids.extend([*loaded.tokenizer.encode("No."), end])
    events = ask(conversation, "Well?")
    assert events[-1].reason == "end_token"
    assert text_of(events) == "No."
    expected = [*conversation.template.first_turn("Well?"), *loaded.tokenizer.encode("No.")]
    assert fed(conversation.stream) == expected


def test_without_any_end_token_the_cap_ends_an_answer(chatml, script):
    """Where nothing names an end token, the cap still bounds the turn."""
    loaded = replace(chatml, end_ids=frozenset())
    conversation = Conversation(loaded, cache=ROOMY, max_new_tokens=12)
    script.answer(chatml, "and so on and on and on")
    events = ask(conversation, "Well?")
    assert (events[-1].reason, events[-1].num_tokens) == ("length", 12)
    assert conversation.turns[-1].answer == "and so on an"


@pytest.mark.parametrize("config", [ROOMY, SMALL], ids=["roomy", "full"])
def test_a_stop_string_is_neither_shown_nor_kept(chatml, script, config):
    """A stop string spread over tokens leaves no trace on the screen or in the next turn."""
    conversation = Conversation(chatml, system=SYSTEM, cache=config, stop=["own fox"])
    script.answer(chatml, "The quick brown fox", ends=False)
    events = ask(conversation, "Tell me a story.")
    assert events[-1].reason == "stop_string"
    assert text_of(events) == "The quick br"
    answer_to(conversation, script, "And?", "No.")
    expected = whole(chatml.tokenizer, SYSTEM, ["Tell me a story.", "And?"], ["The quick br"])
    assert list(conversation.stream.recent_ids) == [*expected, *chatml.tokenizer.encode("No.")]


# Interrupted answers


@pytest.mark.parametrize("config", [ROOMY, CacheConfig(sink_size=4, window_size=20)])
@pytest.mark.parametrize("num_events", [2, 3, 8, 21, 60])
def test_an_interrupted_answer_is_one_with_a_cap(loaded, config, num_events):
    """Closed after any event, a chat goes on as one whose cap was the tokens kept.

    The answers are the tiny model's own, greedy; the numbers are bit-identical.
    """
    loaded = replace(loaded, end_ids=frozenset())
    conversation = Conversation(loaded, cache=config, max_new_tokens=200)
    taken = close_after(conversation.say("Tell me a long story."), num_events)
    assert len(taken) == num_events
    turn = conversation.turns[-1]
    assert turn.answer == text_of(taken)
    assert turn.end == conversation.stream.position
    num_kept = turn.end - turn.start - taken[0].num_tokens
    assert num_kept > 0
    reference = Conversation(loaded, cache=config, max_new_tokens=num_kept)
    ask(reference, "Tell me a long story.")
    assert reference.turns[-1].answer.startswith(turn.answer)
    assert reference.stream.recent_ids == conversation.stream.recent_ids
    assert torch.equal(reference.stream.logits, conversation.stream.logits)
    conversation.max_new_tokens = reference.max_new_tokens = 30
    ask(conversation, "And then?")
    ask(reference, "And then?")
    assert conversation.turns[-1].answer == reference.turns[-1].answer
    assert torch.equal(reference.stream.logits, conversation.stream.logits)


ANSWER = "naïve own foe 👩‍👧 own f"


@pytest.mark.parametrize("config", [ROOMY, SMALL], ids=["roomy", "full"])
@pytest.mark.parametrize("stop", [(), ("own fox",)], ids=["no stop", "stop"])
def test_what_is_shown_is_what_is_held_whenever_it_is_closed(chatml, script, config, stop):
    """Closed after whichever event, the cache holds the text that was shown and nothing else."""
    num_events, mismatches = 2, []
    while True:
        script.ids.clear()
        conversation = Conversation(chatml, system=SYSTEM, cache=config, stop=stop)
        script.answer(chatml, ANSWER)
        taken = close_after(conversation.say("Go on, and on, and on: fill the window."), num_events)
        shown, held = conversation.turns[-1].answer, held_text(conversation)
        assert shown == text_of(taken)
        if held != shown:
            mismatches.append((type(taken[-1]).__name__, shown[-10:], held[-10:]))
        if len(taken) < num_events:
            break
        num_events += 1
    assert conversation.turns[-1].answer == ANSWER
    assert num_events > 15
    assert mismatches == []


@pytest.mark.parametrize("num_turns", [0, 5])
def test_closed_while_it_is_fed_a_question_is_taken_back(chatml, script, num_turns):
    """A long question that is interrupted on its way in leaves the chat as it was."""
    conversation = Conversation(chatml, system="Hi.", cache=SMALL)
    for index in range(num_turns):
        answer_to(conversation, script, f"question {index}", f"answer {index}")
    stream = conversation.stream
    before = (stream.position, stream.logits, list(stream.recent_ids))
    gone, turns = conversation.num_turns_gone(), list(conversation.turns)
    (event,) = close_after(conversation.say("a very long question " * 100), 1)
    assert isinstance(event, Prefilled)
    assert 0 < event.num_tokens <= 256 < 2000 < event.num_total
    assert (stream.position, list(stream.recent_ids)) == (before[0], before[2])
    assert stream.logits is before[1] or torch.equal(stream.logits, before[1])
    assert (conversation.num_turns_gone(), list(conversation.turns)) == (gone, turns)
    assert conversation.num_turns == num_turns
    answer_to(conversation, script, "a short one", "yes")
    if num_turns:
        assert conversation.undo() is True
        assert (stream.position, list(stream.recent_ids)) == (before[0], before[2])


@pytest.mark.parametrize("name", ["chatml", "gemma2", "llama2", "qwen3"])
@pytest.mark.parametrize("kept", ["", "Ah"])
def test_questions_in_a_row_make_a_conversation(name, kept, loaded_with, script, fed):
    """After an empty or a broken-off answer, a question stands where a strict template wants it."""
    case, loaded = CASES[name], loaded_with(CASES[name])
    conversation = Conversation(loaded, system=SYSTEM, cache=ROOMY)
    if kept:
        script.answer(loaded, f"{case.lead}Ah, well")
        close_after(conversation.say("One?"), 1 + len(case.lead + kept))
        assert conversation.turns[-1].answer == case.lead + kept
    else:
        answer_to(conversation, script, "One?", "")
    script.ids.clear()
    answer_to(conversation, script, "Two?", "No.")
    expected = whole(loaded.tokenizer, SYSTEM, ["One?", "Two?"], [kept], folds=case.folds)
    text = loaded.tokenizer.inner.decode(expected)
    if not kept and case.lead:
        text = text.replace("[/INST]  </s>", "[/INST] </s>")
    assert loaded.tokenizer.inner.decode(fed(conversation.stream)) == text + "No."


# What leaves


def test_each_turn_is_told_once_and_when_it_is_gone(chatml, script):
    """`TurnsEvicted` names every turn once, in order, as soon as its last token has left."""
    conversation = Conversation(chatml, system=SYSTEM, cache=SMALL)
    told, ends = 0, {}
    for index in range(40):
        events = answer_to(conversation, script, "q" * (1 + index % 7), "a" * (index % 50))
        ends[index + 1] = conversation.turns[-1].end
        for event in events:
            if isinstance(event, TurnsEvicted):
                assert event.first == told + 1
                assert event.last >= event.first
                told = event.last
        first_held = conversation.stream.position - SMALL.window_size
        assert told == sum(end <= first_held for end in ends.values())
        assert conversation.num_turns_gone() == told
    assert 30 < told < 40


def test_one_long_question_drives_out_several_turns_at_once(chatml, script):
    """Turns that leave together are told together, before the answer begins."""
    conversation = Conversation(chatml, system=SYSTEM, cache=replace(SMALL, window_size=150))
    for _ in range(3):
        events = answer_to(conversation, script, "short", "yes")
        assert not any(isinstance(event, TurnsEvicted) for event in events)
    events = answer_to(conversation, script, "long " * 40, "yes")
    assert events[1] == TurnsEvicted(1, 3)
    assert text_of(events[:2]) == ""


@pytest.mark.parametrize("num_turns", [0, 3])
def test_a_question_is_told_once_when_it_begins_to_leave(chatml, script, num_turns):
    """`QuestionEvicted` comes once, with the token that drives out the question's first."""
    conversation = Conversation(chatml, system="Hi.", cache=SMALL)
    for _ in range(num_turns):
        events = answer_to(conversation, script, "hm?", "ok")
        assert not any(isinstance(event, QuestionEvicted) for event in events)
    script.answer(chatml, "x" * 150)
    told_at, question = [], "which?"
    for event in conversation.say(question):
        if isinstance(event, QuestionEvicted):
            assert event.turn == num_turns + 1
            told_at.append(conversation.stream.position)
    # The markup that opens a turn belongs to it; the first one's is pinned.
    first = conversation.num_pinned if num_turns == 0 else conversation.turns[-1].start
    assert told_at == [first + SMALL.window_size + 1]


def test_a_question_that_stays_is_not_told_to_leave(chatml, script):
    """An answer that just fills the window behind its question evicts none of it."""
    conversation = Conversation(chatml, system=SYSTEM, cache=SMALL)
    num_free = SMALL.window_size - (len(conversation.template.first_turn("hm?")))
    num_free += conversation.num_pinned
    events = answer_to(conversation, script, "hm?", "x" * num_free)
    assert conversation.stream.cache.num_evicted == 0
    assert not any(isinstance(event, (QuestionEvicted, TurnsEvicted)) for event in events)


def test_a_question_among_the_sinks_never_leaves(chatml, script):
    """With more sinks than the system prompt takes, a question that stands in them stays."""
    conversation = Conversation(
        chatml, system="Hi.", cache=CacheConfig(sink_size=100, window_size=40)
    )
    assert len(conversation.template.first_turn("hm?")) < 100
    events = answer_to(conversation, script, "hm?", "x" * 250)
    assert conversation.stream.cache.num_evicted > 0
    assert not any(isinstance(event, QuestionEvicted) for event in events)


def test_a_turn_among_the_sinks_never_leaves(chatml, script):
    """A turn that is in the cache, as sinks, is not told to have left."""
    conversation = Conversation(
        chatml, system="Hi.", cache=CacheConfig(sink_size=200, window_size=40)
    )
    events = answer_to(conversation, script, "hm?", "yes")
    assert conversation.stream.cache.num_evicted == 0
    assert not any(isinstance(event, TurnsEvicted) for event in events)
    assert conversation.num_turns_gone() == 0


def test_turns_that_undo_brings_back_have_not_left(chatml, script):
    """After an exact undo, turns that the undone one had driven out are in the memory again."""
    conversation = Conversation(chatml, system="Hi.", cache=SMALL)
    answer_to(conversation, script, "one", "1")
    assert conversation.num_turns_gone() == 0
    events = answer_to(conversation, script, "two", "x" * 60)
    assert TurnsEvicted(1, 1) in events
    assert conversation.undo()
    assert conversation.stream.cache.num_evicted == 0
    assert conversation.num_turns_gone() == 0
    assert TurnsEvicted(1, 1) in answer_to(conversation, script, "two", "x" * 60)


# Taking back


def assert_same_state(stream, position, logits, ids):
    assert stream.position == position
    assert list(stream.recent_ids) == ids
    assert torch.equal(stream.logits, logits)


@pytest.mark.parametrize("num_turns", [1, 2, 9])
@pytest.mark.parametrize("interrupted", [False, True])
def test_undo_brings_back_the_very_state(chatml, script, num_turns, interrupted):
    """Logits, position and ids are those of before the turn; what comes next is bit-identical."""
    conversation = Conversation(chatml, system=SYSTEM, cache=SMALL)
    for index in range(num_turns):
        answer_to(conversation, script, f"question {index}", f"answer {index}")
    stream = conversation.stream
    before = (stream.position, stream.logits.clone(), list(stream.recent_ids))
    answer_to(conversation, script, "next?", "This.")
    after = (stream.position, stream.logits.clone(), list(stream.recent_ids))
    assert conversation.undo() is True
    assert_same_state(conversation.stream, *before)

    script.answer(chatml, "a long answer that fills the whole window, and more of it, and more")
    close_after(conversation.say("something else"), 50 if interrupted else 1000)
    script.ids.clear()
    assert conversation.undo() is True
    assert_same_state(conversation.stream, *before)
    assert [turn.number for turn in conversation.turns] == list(range(1, num_turns + 1))
    assert conversation.num_turns == num_turns

    answer_to(conversation, script, "next?", "This.")
    assert_same_state(conversation.stream, *after)
    assert conversation.turns[-1].number == num_turns + 1


def test_undo_of_the_only_turn_leaves_an_empty_stream(chatml, script, fed):
    """With no turn left, the next one begins with the system prompt again."""
    conversation = Conversation(chatml, system=SYSTEM, cache=ROOMY)
    answer_to(conversation, script, "one", "1")
    assert conversation.undo() is True
    assert conversation.stream.position == 0
    with pytest.raises(StateError, match="no turn to take back"):
        conversation.undo()
    answer_to(conversation, script, "two", "2")
    expected = [*conversation.template.first_turn("two"), *chatml.tokenizer.encode("2")]
    assert list(conversation.stream.recent_ids) == expected


@pytest.mark.parametrize("config", [ROOMY, SMALL], ids=["roomy", "full"])
def test_deeper_undo_feeds_again_what_was_retained(chatml, script, fed, config):
    """The second undo in a row says that it is not exact, and stands where the turn began.

    Oracle A at that point: for one layer, text that has left makes no difference.
    """
    conversation = Conversation(chatml, system=SYSTEM, cache=config)
    for index in range(6):
        answer_to(conversation, script, f"question {index}", f"answer {index}")
    ids, start = fed(conversation.stream), conversation.turns[-2].start
    assert conversation.undo() is True
    assert conversation.undo() is False
    assert [turn.number for turn in conversation.turns] == [1, 2, 3, 4]
    num_pinned, window = conversation.num_pinned, config.window_size
    stream = conversation.stream
    expected = one_layer_oracle(chatml.model, ids[:start], num_pinned, window)
    assert_logits_equal(stream.logits, expected)
    assert stream.position == min(start, num_pinned + window)
    assert conversation.turns[-1].end == stream.position
    lengths = [turn.end - turn.start for turn in conversation.turns]
    assert len(set(lengths[1:])) == 1

    told = conversation.num_turns_gone()
    for index in range(8):
        events = answer_to(conversation, script, f"more {index}", f"answer {index}")
        for event in events:
            if isinstance(event, TurnsEvicted):
                assert event.first > told
                told = event.last
    first_held = conversation.stream.position - window
    assert told == sum(turn.end <= first_held for turn in conversation.turns)
    assert [turn.number for turn in conversation.turns] == list(range(1, 13))
    assert conversation.undo() is True


def test_turns_that_a_deeper_undo_could_not_feed_again_are_gone(chatml, script):
    """Turns before what was fed again are told by `/evicted`, as they were before the undo."""
    conversation = Conversation(chatml, system=SYSTEM, cache=SMALL)
    for index in range(6):
        answer_to(conversation, script, f"question {index}", f"answer {index}")
    conversation.undo()
    conversation.undo()
    held = conversation.loaded.tokenizer.decode(list(conversation.stream.recent_ids))
    assert "answer 3" in held
    assert "answer 1" not in held
    assert conversation.num_turns_gone() >= 2


@pytest.mark.parametrize("num_undone", [2, 3, 4, 5, 6, 7])
def test_however_many_turns_are_undone_the_system_prompt_stays(chatml, script, num_undone):
    """After any number of undos the next answer is given behind the whole system prompt."""
    conversation = Conversation(chatml, system=SYSTEM * 2, cache=SMALL)
    pinned = conversation.template.pinned_ids()
    for index in range(7):
        answer_to(conversation, script, f"question {index}", f"answer {index}")
    for _ in range(num_undone):
        conversation.undo()
    assert conversation.num_turns == len(conversation.turns) == 7 - num_undone
    answer_to(conversation, script, "and now?", "now")
    ids = list(conversation.stream.recent_ids)
    assert ids[: len(pinned)] == pinned
    turn = [*chatml.tokenizer.encode("and now?"), *chatml.tokenizer.encode("now")]
    assert ids[-1:] == turn[-1:]
    assert conversation.turns[-1].end == conversation.stream.position


def test_every_turn_of_a_long_chat_can_be_undone(chatml, script):
    """Beyond the ids that a stream remembers, undo still ends at the empty chat and no sooner."""
    conversation = Conversation(chatml, system="Hi.", cache=SMALL)
    num_turns = 130
    for index in range(num_turns):
        answer_to(conversation, script, f"question {index}", f"answer {index}")
    assert conversation.stream.position > len(conversation.stream.recent_ids)
    for index in range(num_turns):
        assert conversation.undo() is (index == 0)
        assert conversation.num_turns == len(conversation.turns) == num_turns - 1 - index
    with pytest.raises(StateError):
        conversation.undo()
    answer_to(conversation, script, "again", "yes")
    expected = [*conversation.template.first_turn("again"), *chatml.tokenizer.encode("yes")]
    assert list(conversation.stream.recent_ids) == expected


def test_regen_asks_the_last_question_from_the_same_state(loaded):
    """`/regen` takes the turn back and hands its question over; greedy gives the same answer."""
    console = Console(file=io.StringIO(), width=80)
    conversation = Conversation(loaded, cache=ROOMY, max_new_tokens=20)
    ask(conversation, "One?")
    ask(conversation, "Two?")
    answer, logits = conversation.turns[-1].answer, conversation.stream.logits
    outcome = Commands(console).run("/regen", ChatSession(conversation))
    assert outcome.ask == "Two?"
    assert conversation.num_turns == 1
    ask(conversation, outcome.ask)
    assert conversation.turns[-1].answer == answer
    assert torch.equal(conversation.stream.logits, logits)
    with pytest.raises(StateError, match="no turn"):
        Commands(console).run("/regen", ChatSession(Conversation(loaded, cache=ROOMY)))


def test_clear_starts_anew_with_the_same_system_prompt(chatml, script, fed):
    """After `clear` the chat is one that has just been made."""
    conversation = Conversation(chatml, system=SYSTEM, cache=SMALL)
    for _ in range(5):
        answer_to(conversation, script, "one", "1")
    conversation.clear()
    assert conversation.num_turns == len(conversation.turns) == 0
    assert conversation.num_turns_gone() == 0
    assert conversation.stream.position == 0
    with pytest.raises(StateError):
        conversation.undo()
    answer_to(conversation, script, "two", "2")
    expected = whole(chatml.tokenizer, SYSTEM, ["two"], [])
    assert list(conversation.stream.recent_ids) == [*expected, *chatml.tokenizer.encode("2")]
    assert conversation.turns[-1].number == 1


def test_a_seed_decides_the_whole_chat(loaded):
    """Two chats with one seed are the same; the random state goes on from turn to turn."""
    answers = []
    for _ in range(2):
        sampling = SamplingConfig(temperature=1.5, seed=3)
        conversation = Conversation(loaded, cache=ROOMY, sampling=sampling, max_new_tokens=12)
        for _ in range(3):
            ask(conversation, "Again?")
        answers.append([turn.answer for turn in conversation.turns])
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 3


# Thinking

THOUGHTS = [
    ("qwen3", "<think>\nhm, <b>5</b>?\n</think>\n\nAye, 我.", "hm, <b>5</b>?\n", "Aye, 我."),
    ("qwen3", "\n<think></think>Aye.", "", "Aye."),
    ("qwen3", "Aye, <think>no</think>!", "", "Aye, <think>no</think>!"),
    ("qwen3", "\n\n<thin", "", "<thin"),
    ("qwen3", "<think>a</thin</think>b", "a</thin", "b"),
    ("open-think", "hm\n</think>\n\nAye </think>.", "hm\n", "Aye </think>."),
    ("open-think", "</think>Aye.", "", "Aye."),
]


@pytest.mark.parametrize(("name", "text", "thought", "answer"), THOUGHTS)
def test_thinking_is_shown_apart_and_not_kept(
    name, text, thought, answer, loaded_with, script, fed
):
    """Thinking comes as `ThinkingDelta`, one byte at a time; the stream holds the answer alone.

    Oracle: a rendering of the history with the answers as they should be kept, by a template that
    strips nothing.
    """
    loaded = loaded_with(CASES[name])
    conversation = Conversation(loaded, system=SYSTEM, cache=ROOMY)
    script.answer(loaded, text)
    events = ask(conversation, "Well?")
    assert text_of(events, ThinkingDelta) == thought
    assert text_of(events) == answer
    kinds = [type(event) for event in events if isinstance(event, (TextDelta, ThinkingDelta))]
    assert kinds == sorted(kinds, key=[ThinkingDelta, TextDelta].index)
    script.answer(loaded, text)
    ask(conversation, "Sure?")
    plain = tokenizer_of(CASES["chatml"])
    expected = whole(plain, SYSTEM, ["Well?", "Sure?"], [answer])
    assert fed(conversation.stream) == [*expected, *plain.encode(answer)]


def test_the_answer_is_given_behind_the_thinking(loaded_with, script, fed):
    """While it answers, the model sees its thinking, and the template's own opening of it."""
    loaded = loaded_with(CASES["open-think"])
    conversation = Conversation(loaded, system=SYSTEM, cache=ROOMY)
    seen = []
    fork = Stream.fork
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "fork", lambda self: seen.append(fork(self)) or seen[-1])
        script.answer(loaded, "hm</think>Aye.")
        ask(conversation, "Well?")
    (forked,) = seen
    expected = [*whole(loaded.tokenizer, SYSTEM, ["Well?"], [])]
    assert list(forked.recent_ids) == [*expected, *loaded.tokenizer.encode("hm</think>Aye.")]


@pytest.mark.parametrize("name", ["qwen3", "open-think"])
@pytest.mark.parametrize("how", ["closed", "cap"])
def test_an_answer_that_ends_while_thinking_is_empty(name, how, loaded_with, script, fed):
    """Broken off by the user or the cap inside its thinking, a turn keeps no answer at all."""
    loaded = loaded_with(CASES[name])
    conversation = Conversation(loaded, system=SYSTEM, cache=ROOMY, max_new_tokens=15)
    opening = "" if conversation.template.thinking_ids() else "<think>"
    script.answer(loaded, f"{opening}let me think about it</think>Aye.")
    events = conversation.say("Well?")
    taken = close_after(events, 5 if how == "closed" else 1000)
    assert text_of(taken, ThinkingDelta)
    assert isinstance(taken[-1], Finished) == (how == "cap")
    assert conversation.turns[-1].answer == ""
    script.ids.clear()
    script.answer(loaded, f"{opening}</think>Aye.")
    conversation.max_new_tokens = 100
    ask(conversation, "So?")
    plain = tokenizer_of(CASES["chatml"])
    expected = whole(plain, SYSTEM, ["Well?", "So?"], [""])
    assert fed(conversation.stream) == [*expected, *plain.encode("Aye.")]


def test_an_answer_closed_behind_its_thinking_keeps_what_was_shown(loaded_with, script, fed):
    """Closed in the middle of the answer, the stream holds the letters that were shown."""
    loaded = loaded_with(CASES["qwen3"])
    conversation = Conversation(loaded, system=SYSTEM, cache=ROOMY)
    script.answer(loaded, "<think>hm</think>\n\nAye, indeed")
    taken = []
    events = conversation.say("Well?")
    while text_of(taken) != "Aye, i":
        taken.append(next(events))
    events.close()
    assert conversation.turns[-1].answer == "Aye, i"
    expected = whole(loaded.tokenizer, SYSTEM, ["Well?"], [])
    assert fed(conversation.stream) == [*expected, *loaded.tokenizer.encode("Aye, i")]
    assert conversation.turns[-1].end == conversation.stream.position


def test_a_long_answer_behind_thinking_tells_that_its_question_leaves(loaded_with, script):
    """`QuestionEvicted` comes for a model that thinks, too."""
    loaded = loaded_with(CASES["qwen3"])
    conversation = Conversation(loaded, system="Hi.", cache=SMALL)
    script.answer(loaded, "<think>hm</think>" + "x" * 150)
    events = ask(conversation, "Well?")
    assert conversation.stream.cache.num_evicted > 60
    assert [type(event) for event in events].count(QuestionEvicted) == 1


def split_oracle(text, *, thinking):
    """Thinking and answer of a whole text, by a regular expression."""
    mark = "" if thinking else r"\s*<think>"
    match = re.fullmatch(rf"{mark}\s*(.*?)(?:</think>\s*(.*))?", text, re.DOTALL)
    if match is None:
        return "", text.lstrip()
    return match[1], match[2] or ""


@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "<", "/think>", " ", "\n", "a", "b"])),
    cuts=st.lists(st.integers(1, 5), min_size=1),
    thinking=st.booleans(),
)
def test_however_the_text_is_cut_the_thinking_is_the_same(text, cuts, thinking):
    """Marks that are spread over deltas split a text as they split the whole.

    Oracle: a regular expression over the whole text.
    """
    text = "".join(text)
    deltas, begin = [], 0
    while begin < len(text):
        size = cuts[begin % len(cuts)]
        deltas.append(TextDelta(text[begin : begin + size]))
        begin += size
    parts = list(split_thinking(deltas, thinking=thinking))
    assert all(part.text for part in parts)
    in_one = list(split_thinking([TextDelta(text)], thinking=thinking))
    for kind in (ThinkingDelta, TextDelta):
        assert text_of(parts, kind) == text_of(in_one, kind)
    rest = text.partition("</think>")[2]
    if not rest.lstrip().startswith("<think>"):  # thinking twice is no case of the oracle
        thought, answer = split_oracle(text, thinking=thinking)
        assert (text_of(parts, ThinkingDelta), text_of(parts)) == (thought, answer)


def test_other_events_pass_between_the_parts():
    """What is no text goes through in its place."""
    events = [
        TextDelta("<thi"),
        Evicted(1, 1),
        TextDelta("nk>a</think>b"),
        Finished("length", 9, 0),
    ]
    assert list(split_thinking(events, thinking=False)) == [
        Evicted(1, 1),
        ThinkingDelta("a"),
        TextDelta("b"),
        Finished("length", 9, 0),
    ]


def test_a_full_dense_cache_takes_the_question_back(loaded):
    """What does not fit any more leaves the conversation as it was, and usable."""
    config = CacheConfig(sink_size=0, window_size=200, policy="dense")
    conversation = Conversation(loaded, cache=config, max_new_tokens=5)
    for _ in conversation.say("hello"):
        pass
    before = conversation.stream.snapshot()
    with pytest.raises(StreamFullError, match="200 at most"):
        list(conversation.say("x" * 200))
    assert conversation.num_turns == 1
    assert conversation.stream.position == before.cache.num_seen
    assert torch.equal(conversation.stream.logits, before.logits)
    list(conversation.say("again"))
    assert conversation.num_turns == 2
