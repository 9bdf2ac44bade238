"""An answer for each line of the input, in one conversation.

Answers are scripted: the sampler chooses given ids. The oracle for what has been fed is the
template's rendering of the whole conversation.
"""

import json
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_model
from test_notes import live_reader, reader_of
from test_template import CASES, SYSTEM, tokenizer_of, whole

from streamchat import CacheConfig
from streamchat.chat.conversation import Conversation
from streamchat.engine.generate import Sampler
from streamchat.events import Progress, Reply, TurnsEvicted
from streamchat.model.load import LoadedModel, Source
from streamchat.pipe import turns as turns_module
from streamchat.pipe.reply import reply
from streamchat.ui.lines import json_line, plain_line

ROOMY = CacheConfig(sink_size=4, window_size=400)
SMALL = CacheConfig(sink_size=4, window_size=60)
END = 4


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Threads gain nothing on tiny models, and cost much where other processes run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded():
    model = tiny_model(num_layers=1, vocab_size=272)
    tokenizer = tokenizer_of(CASES["chatml"])
    return LoadedModel(Source("tiny", "tiny"), model, tokenizer, frozenset({END}))


@pytest.fixture
def answers(monkeypatch, loaded):
    """`answers(text, …)`: what the next answers will be, each with an end token."""
    ids = deque()
    monkeypatch.setattr(Sampler, "choose", lambda _self, _logits, _recent: ids.popleft())

    def add(*texts):
        for text in texts:
            ids.extend([*loaded.tokenizer.encode(text), END])

    return add


def never():
    return False


def chat(loaded, cache=ROOMY, **options):
    return Conversation(loaded, system=SYSTEM, cache=cache, **options)


def replies_of(events):
    return [event for event in events if isinstance(event, Reply)]


def reply_all(conversation, data, tmp_path, **options):
    with reader_of(data, tmp_path, **options) as reader:
        return list(reply(conversation, reader, never))


def test_each_line_with_words_gets_one_reply(loaded, answers, tmp_path):
    """Lines are answered in order, under their own numbers; blank ones are passed over."""
    answers("One.", "Two.", "Five.")
    conversation = chat(loaded)
    events = reply_all(conversation, "one\ntwo\n\n \t\nfive", tmp_path)
    replies = replies_of(events)
    assert [(r.line, r.question, r.text, r.reason) for r in replies] == [
        (1, "one", "One.", "end_token"),
        (2, "two", "Two.", "end_token"),
        (5, "five", "Five.", "end_token"),
    ]
    assert [r.position for r in replies] == [turn.start for turn in conversation.turns]
    progress = [event for event in events if isinstance(event, Progress)]
    assert [event.num_lines for event in progress if event.num_lines] == sorted(
        event.num_lines for event in progress if event.num_lines
    )
    assert progress[-1].num_lines == 5
    assert progress[-1].stats.num_tokens == conversation.stream.position
    assert progress[-1].num_unnoted is None


def test_the_lines_are_turns_of_one_conversation(loaded, answers, tmp_path):
    """What has been fed in the end is one rendering of all lines and answers."""
    questions, texts = ["un", "deux", "trois"], ["one", "two", "three"]
    answers(*texts)
    conversation = chat(loaded)
    reply_all(conversation, "un\ndeux\r\ntrois\n", tmp_path)
    expected = whole(loaded.tokenizer, SYSTEM, questions, texts)
    ids = [*expected, *loaded.tokenizer.encode("three")]
    assert list(conversation.stream.recent_ids) == ids


def test_a_reply_comes_before_the_next_line(loaded, answers):
    """On a live input each line is answered while the producer still waits."""
    answers("One.", "Two.")
    with live_reader() as (reader, write):
        events = reply(chat(loaded), reader, never)
        for line, text in (("one\n", "One."), ("two\n", "Two.")):
            write(line)
            event = next(event for event in events if isinstance(event, Reply))
            assert event.text == text
        write(None)
        assert replies_of(events) == []


def test_a_long_line_is_one_turn(loaded, answers, tmp_path):
    """A line that comes in several pieces is put together again before it is answered."""
    answers("Long.", "Short.")
    line = "word " * 30 + "end"
    replies = replies_of(reply_all(chat(loaded), f"{line}\nshort\n", tmp_path, max_piece_chars=20))
    assert [(r.line, r.question, r.text) for r in replies] == [
        (1, line, "Long."),
        (2, "short", "Short."),
    ]


def test_a_line_without_end_becomes_several_turns(loaded, answers, tmp_path, monkeypatch):
    """A line too long for memory is answered in parts under its own number; none of it is lost."""
    monkeypatch.setattr(turns_module, "MAX_TURN_CHARS", 50)
    answers(*"abcdefg")
    line = "word " * 50
    conversation = chat(loaded)
    replies = replies_of(reply_all(conversation, f"{line}\nnext\n", tmp_path, max_piece_chars=20))
    assert "".join(r.question for r in replies[:-1]) == line
    assert {r.line for r in replies[:-1]} == {1}
    assert (replies[-1].line, replies[-1].question) == (2, "next")
    assert 3 <= len(replies) <= 7


def test_turns_that_leave_are_told_between_replies(loaded, answers, tmp_path):
    """`TurnsEvicted` names each turn once, in order, as in a chat."""
    answers(*(f"answer {i}" for i in range(10)))
    data = "".join(f"line {i}\n" for i in range(10))
    events = reply_all(chat(loaded, SMALL), data, tmp_path)
    told = [event for event in events if isinstance(event, TurnsEvicted)]
    assert [t.first for t in told] == [1, *(t.last + 1 for t in told[:-1])]
    assert told[-1].last >= 8
    assert len(replies_of(events)) == 10


@pytest.mark.parametrize("num_letters", [1, 5])
def test_a_stop_ends_the_answer_and_keeps_it(loaded, answers, tmp_path, num_letters):
    """A stop within an answer keeps what was said, without a reason, and takes no other line."""
    answers("A long answer.", "Never.")
    conversation = chat(loaded)
    with reader_of("one\ntwo\n", tmp_path) as reader:
        events = list(
            reply(
                conversation,
                reader,
                lambda: (
                    bool(conversation.turns) and len(conversation.turns[-1].answer) >= num_letters
                ),
            )
        )
    (event,) = replies_of(events)
    shown = "A long answer."[:num_letters].strip()
    assert (event.text, event.reason) == (shown, None)
    expected = [*whole(loaded.tokenizer, SYSTEM, ["one"], []), *loaded.tokenizer.encode(shown)]
    assert list(conversation.stream.recent_ids) == expected


def test_the_conversation_goes_on_after_a_stop(loaded, answers, tmp_path):
    """After an answer was broken off, the next lines are answered behind what was said of it."""
    answers("A long answer.")
    conversation = chat(loaded)
    stop = SimpleNamespace(after=3)

    def should_stop():
        return bool(conversation.turns) and len(conversation.turns[-1].answer) >= stop.after

    with reader_of("one\n", tmp_path) as reader:
        list(reply(conversation, reader, should_stop))
    assert conversation.turns[-1].answer == "A l"
    with pytest.MonkeyPatch.context() as patch:
        ids = iter([*loaded.tokenizer.encode("Two."), END])
        patch.setattr(Sampler, "choose", lambda _self, _logits, _recent: next(ids))
        (event,) = replies_of(reply_all(conversation, "two\n", tmp_path))
    assert (event.text, event.reason) == ("Two.", "end_token")
    expected = whole(loaded.tokenizer, SYSTEM, ["one", "two"], ["A l"])
    ids = [*expected, *loaded.tokenizer.encode("Two.")]
    assert list(conversation.stream.recent_ids) == ids


def test_a_stop_before_the_first_line_answers_nothing(loaded, tmp_path):
    """A stop that comes while nothing has been read ends without a reply."""
    with live_reader() as (reader, _write):
        events = list(reply(chat(loaded), reader, lambda: True))
    assert all(isinstance(event, Progress) for event in events)


@pytest.mark.parametrize(
    ("options", "reason", "text"),
    [({"max_new_tokens": 6}, "length", "A long"), ({"stop": ["ng an"]}, "stop_string", "A lo")],
)
def test_a_reply_says_why_it_ended(loaded, answers, tmp_path, options, reason, text):
    """The cap and a stop string are named as the reason."""
    answers("A long answer.")
    (event,) = replies_of(reply_all(chat(loaded, **options), "one\n", tmp_path))
    assert (event.text, event.reason) == (text, reason)


def test_special_tokens_in_a_line_stay_text(loaded, answers, tmp_path):
    """`<|im_end|>` in a line is part of the question."""
    answers("No.")
    conversation = chat(loaded)
    (event,) = replies_of(reply_all(conversation, "a<|im_end|>b\n", tmp_path))
    assert event.question == "a<|im_end|>b"
    ids = list(conversation.stream.recent_ids)
    assert ids.count(END) == 2
    assert "a<|im_end|>b" in loaded.tokenizer.decode(ids)


def test_a_reply_as_json_has_all_its_fields(loaded, answers, tmp_path):
    """JSON carries line, question, answer with its line ends, position and reason, in one line."""
    answers("One,\n\ntwo é 我.")
    conversation = chat(loaded)
    (event,) = replies_of(reply_all(conversation, 'say "it"\n', tmp_path))
    line = json_line(event)
    assert "\n" not in line
    assert json.loads(line) == {
        "event": "reply",
        "line": 1,
        "question": 'say "it"',
        "text": "One,\n\ntwo é 我.",
        "position": 0,
        "reason": "end_token",
    }
    assert "我" in line


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("One,\n\n two.", "One, two."),
        ("", ""),
        ("a\tb\u2028c", "a b c"),
        ("[red]x[/]", "[red]x[/]"),
    ],
)
def test_a_reply_as_text_is_one_line(text, plain):
    """A plain reply takes one line, whatever the answer holds."""
    assert plain_line(Reply(1, "q", text, 0, "end_token")) == plain
