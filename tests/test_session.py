"""Chats that are kept: gone on from bit for bit, rebuilt where that cannot be, and recalled.

The oracle for going on is the same chat without a break; for what a rebuilt model has heard, the
ids that the template writes for the turns that fit.
"""

import io
import itertools
import os
import shutil
import threading
from collections import deque

import pytest
import torch
from conftest import BYTE_VOCAB_SIZE, byte_tokenizer, tiny_model
from rich.console import Console
from test_folder import needs_permissions
from test_log import small_disk  # noqa: F401 - a fixture

from streamchat import CacheConfig, SamplingConfig, Stream, load
from streamchat.chat import recalled
from streamchat.chat import session as session_module
from streamchat.chat.conversation import Conversation
from streamchat.chat.journal import Journal
from streamchat.chat.resume import Asked
from streamchat.chat.saved import pack, unpack
from streamchat.chat.session import ChatSession
from streamchat.engine.generate import Sampler, generate
from streamchat.errors import SessionError, SessionInUseError, StateError, UsageError
from streamchat.events import PassagesRecalled, TextDelta
from streamchat.model.load import LoadedModel, Source
from streamchat.model.tokenizer import Tokenizer
from streamchat.store.folder import STATE_NAME, Sessions
from streamchat.store.log import Log, Passage
from streamchat.store.recall import Recalled
from streamchat.store.state import load as load_state
from streamchat.store.state import save as save_state
from streamchat.ui.commands import Commands

SMALL = CacheConfig(sink_size=4, window_size=120)
ROOMY = CacheConfig(sink_size=4, window_size=500)
GREEDY = SamplingConfig()
SAMPLED = SamplingConfig(temperature=1.0, top_p=0.9, repetition_penalty=1.1, seed=7)
NUM_TURNS = 12
MAX_NEW = 8


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Threads gain nothing on tiny models, and cost much where other processes run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded():
    """A model that says small letters alone: its answers are encoded as they were decoded."""
    model = tiny_model(num_layers=2, vocab_size=BYTE_VOCAB_SIZE)
    inner = byte_tokenizer()
    keep = inner.convert_tokens_to_ids([*"abcdefghijklmnopqrstuvwxyz"])
    others = torch.ones(BYTE_VOCAB_SIZE, dtype=torch.bool)
    others[keep] = False
    model.lm_head.weight.data[others] = 0
    return LoadedModel(Source("tiny", "tiny"), model, Tokenizer(inner), frozenset({2}))


@pytest.fixture(scope="module")
def compiled(tiny_folder):
    """A model whose decode steps are compiled, with weights in int8."""
    return load(str(tiny_folder), device="cpu", check=False)


class Disk:
    """A folder of sessions, and chats in it that the test closes at its end."""

    def __init__(self, root):
        self.root = root
        self.sessions = Sessions(root)
        self.open_ones = []

    def chat(self, loaded, name="tea", *, asked=None, system=None, recalls=False, **options):
        """A chat that goes on in a session; gives it and what the user was told."""
        recall = {"recall_budget": options.pop("recall_budget", 256)}
        conversation = Conversation(
            loaded, system=system, max_new_tokens=MAX_NEW, **{"cache": SMALL, **options}
        )
        journal = Journal(self.sessions, name)
        chat = ChatSession(conversation, journal, recalls=recalls, **recall)
        self.open_ones.append(chat)
        return chat, chat.resume(asked)

    def folder(self, name="tea"):
        return self.root / "sessions" / name

    def copy(self, root, name="tea"):
        """The session as it lies on the disk now, in another folder."""
        target = root / "sessions" / name
        target.parent.mkdir(parents=True)
        shutil.copytree(self.folder(name), target)
        return Disk(root)

    def log(self, name="tea"):
        return Log(self.folder(name) / "log.sqlite", read_only=True)


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path / "data")
    yield made
    for chat in made.open_ones:
        chat.close()


def say(chat, question):
    """The answer to a question."""
    return "".join(event.text for event in chat.say(question) if isinstance(event, TextDelta))


def where(chat):
    """All that should be the same after a break."""
    conversation = chat.conversation
    turns = [(t.number, t.question, t.answer, t.start, t.end) for t in conversation.turns]
    return (
        conversation.stream.position,
        list(conversation.stream.recent_ids),
        conversation.num_turns,
        conversation.num_turns_gone(),
        conversation.stream.stats(),
        conversation.cache_config.cache_size,
        turns,
    )


def fill(chat, number, first=0):
    for index in range(first, first + number):
        say(chat, f"filler{index}")


# Going on exactly


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", ["sink", "window", "recompute", "h2o"])
def test_every_save_point_is_gone_on_from_bit_by_bit(loaded, disk, tmp_path, policy, sampling):
    """Saved after each of twelve turns, from an empty cache to the third time round.

    Oracle: the chat that was not broken off. Position, ids, turns, counters, logits; then the next
    answer, of the same ids.
    """
    options = {"cache": CacheConfig(sink_size=4, window_size=120, policy=policy)}
    options["sampling"] = sampling
    chat, notices = disk.chat(loaded, **options)
    assert notices == []
    points, answers = [], []
    for index in range(NUM_TURNS):
        answers.append(say(chat, f"question {index}"))
        chat.journal.flush()
        copy = disk.copy(tmp_path / f"copy-{index}")
        points.append((copy, where(chat), chat.conversation.stream.logits))
    answers.append(say(chat, f"question {NUM_TURNS}"))
    cache_size = chat.conversation.cache_config.cache_size
    assert points[0][1][0] < cache_size < 3 * cache_size < points[-1][1][0]
    for index, (copy, expected, logits) in enumerate(points):
        again, notices = copy.chat(loaded, **options)
        assert notices == []
        assert where(again) == expected
        assert torch.equal(again.conversation.stream.logits, logits)
        assert say(again, f"question {index + 1}") == answers[index + 1]
        again.close()


def test_a_compiled_model_goes_on_bit_by_bit(compiled, disk):
    """int8 weights and compiled steps: a chat broken off after each turn is the whole one."""
    options = {"sampling": SAMPLED, "cache": CacheConfig(sink_size=4, window_size=100)}
    whole, _ = disk.chat(compiled, "whole", **options)
    for index in range(6):
        part, notices = disk.chat(compiled, "part", **options)
        assert notices == []
        assert say(part, f"question {index}") == say(whole, f"question {index}")
        assert torch.equal(part.conversation.stream.logits, whole.conversation.stream.logits)
        part.close()


@pytest.mark.parametrize("num_before", [1, 63, 64, 65, 128, 200, 500])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_state_in_the_middle_of_an_answer(loaded, tmp_path, num_before, sampling):
    """Below, at and above a full cache of 64, and in the second and eighth round.

    Saved between two tokens of an answer, with the sampler: what follows has the same ids.
    """
    config = CacheConfig(sink_size=4, window_size=60)
    stream = Stream(loaded, config)
    ids = torch.randint(3, BYTE_VOCAB_SIZE, (num_before,), generator=torch.Generator())
    stream.feed(ids.tolist())
    sampler = Sampler(sampling)
    list(generate(stream, 5, sampler, ()))
    path = tmp_path / "state"
    tensors = {"random": sampler.random_state()}
    save_state(path, pack(loaded, config, stream.snapshot(), {}, tensors))
    list(generate(stream, 90, sampler, ()))
    state, _, tensors = unpack(load_state(path), config)
    other, other_sampler = Stream(loaded, config), Sampler(SAMPLED)
    other.restore(state)
    other_sampler = Sampler(sampling)
    other_sampler.set_random_state(tensors["random"])
    list(generate(other, 90, other_sampler, ()))
    assert list(other.recent_ids) == list(stream.recent_ids)
    assert torch.equal(other.logits, stream.logits)


def test_an_answer_that_was_stopped_is_kept_as_shown(loaded, disk):
    """Ctrl-C in an answer, then the end: the next process has what was on the screen."""
    chat, _ = disk.chat(loaded)
    events, shown = chat.say("Hello"), ""
    for event in events:
        shown += event.text if isinstance(event, TextDelta) else ""
        if len(shown) >= 3:
            break
    events.close()
    expected, logits = where(chat), chat.conversation.stream.logits
    chat.close()
    again, _ = disk.chat(loaded)
    assert where(again) == expected
    assert torch.equal(again.conversation.stream.logits, logits)
    assert again.conversation.turns[-1].answer == shown


def test_a_question_that_was_taken_back_while_it_was_fed_leaves_nothing(loaded, disk):
    """Stopped before the model had heard all of it: neither state nor log knows of it."""
    chat, _ = disk.chat(loaded)
    say(chat, "one")
    expected = where(chat)
    events = chat.say("two " * 200)
    next(events)
    events.close()
    assert where(chat) == expected
    chat.close()
    again, notices = disk.chat(loaded)
    assert (notices, where(again)) == ([], expected)


def test_undo_and_regen_reach_the_disk(loaded, disk):
    """Taken back and asked again, exactly and from what was retained; then gone on from."""
    chat, _ = disk.chat(loaded)
    fill(chat, 6)
    assert chat.undo()
    assert not chat.undo()  # the model was told again what it had retained
    say(chat, "something else")
    expected, logits = where(chat), chat.conversation.stream.logits
    last = chat.conversation.turns[-1]
    chat.close()
    with disk.log() as log:
        said = [p for p in log.passages() if p.role == "user"]
        assert [p.text for p in said] == [*(f"filler{n}" for n in range(4)), "something else"]
        positions = [p.first_position for p in log.passages()]
        assert positions == sorted(positions)
    again, notices = disk.chat(loaded)
    assert notices == []
    assert where(again) == expected
    assert torch.equal(again.conversation.stream.logits, logits)
    assert again.conversation.turns[-1] == last
    again.close()


def test_clear_begins_anew_in_the_same_log(loaded, disk):
    """The next process has the turns since then alone; the log has all, in rising positions."""
    chat, _ = disk.chat(loaded)
    fill(chat, 4)
    chat.clear()
    assert chat.conversation.stream.position == 0
    chat.close()
    chat, notices = disk.chat(loaded)
    assert notices == []
    assert chat.conversation.stream.position == chat.conversation.num_turns == 0
    say(chat, "after")
    expected = where(chat)
    chat.close()
    again, notices = disk.chat(loaded)
    assert (notices, where(again)) == ([], expected)
    assert [turn.question for turn in again.conversation.turns] == ["after"]
    (disk.folder() / STATE_NAME).unlink()
    again.close()
    rebuilt, _ = disk.chat(loaded)
    assert [turn.question for turn in rebuilt.conversation.turns] == ["after"]
    with disk.log() as log:
        assert log.num_passages("user") == 5
        positions = [p.first_position for p in log.passages()]
        assert positions == sorted(positions)


def test_without_a_turn_there_is_nothing_to_take_back(loaded, disk):
    """Said, and nothing written."""
    chat, _ = disk.chat(loaded)
    with pytest.raises(StateError, match="no turn"):
        chat.undo()
    chat.close()
    assert disk.sessions.names() == []


def test_the_seed_on_the_command_line_wins(loaded, disk):
    """Without one, the random numbers go on; with one, they begin there."""
    chat, _ = disk.chat(loaded, sampling=SAMPLED)
    say(chat, "Hello")
    state = chat.conversation.sampler.random_state()
    fresh = Sampler(SAMPLED).random_state()
    chat.close()
    for asked, expected in ((Asked(), state), (Asked(seed=True), fresh)):
        again, _ = disk.chat(loaded, sampling=SAMPLED, asked=asked)
        assert torch.equal(again.conversation.sampler.random_state(), expected)
        again.close()
    assert not torch.equal(state, fresh)


def test_the_background_never_encodes(loaded, disk, monkeypatch):
    """A tokenizer used by two threads at once writes special tokens as text, now and then."""
    threads = set()
    encode = Tokenizer.encode

    def spy(self, text):
        threads.add(threading.current_thread().name)
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    fresh = LoadedModel(loaded.source, loaded.model, loaded.tokenizer, loaded.end_ids)
    chat, _ = disk.chat(fresh)
    fill(chat, 3)
    chat.close()
    assert threads == {threading.current_thread().name}


# What came between


def test_a_turn_that_only_the_log_has_is_fed_to_the_model(loaded, disk, monkeypatch):
    """Killed after the commit and before the state was saved: the turn is not lost, and said."""
    chat, _ = disk.chat(loaded)
    fill(chat, 2)
    chat.journal.flush()
    state = (disk.folder() / STATE_NAME).read_bytes()
    say(chat, "the last one")
    expected = where(chat)
    chat.close()
    (disk.folder() / STATE_NAME).write_bytes(state)
    again, notices = disk.chat(loaded)
    assert notices == ["1 turn that the saved state had not seen: fed from the log"]
    # Greedy answers of this model decode to what they were encoded from.
    assert where(again)[2:] == expected[2:]
    say(again, "and on")
    again.close()
    with disk.log() as log:
        ends = [(p.first_position, p.last_position) for p in log.passages()]
        assert all(a[1] < b[0] for a, b in itertools.pairwise(ends))


def test_passages_wait_where_the_log_cannot_be_written(loaded, disk, monkeypatch):
    """A full disk: a line says so, nothing is saved that the log has not; later all is there."""
    chat, _ = disk.chat(loaded)
    say(chat, "before")
    chat.journal.flush()
    state = (disk.folder() / STATE_NAME).read_bytes()
    append = Log.append

    def full(_self, _passages):
        raise SessionError("cannot use the log: database or disk is full")

    monkeypatch.setattr(Log, "append", full)
    for question in ("one", "two"):
        say(chat, question)
    chat.journal.flush()
    assert chat.take_errors() == ["cannot use the log: database or disk is full"]
    assert (disk.folder() / STATE_NAME).read_bytes() == state
    monkeypatch.setattr(Log, "append", append)
    say(chat, "three")
    expected = where(chat)
    chat.close()
    assert chat.take_errors() == []
    again, notices = disk.chat(loaded)
    assert (notices, where(again)) == ([], expected)
    with disk.log() as log:
        asked = [p.text for p in log.passages() if p.role == "user"]
        assert asked == ["before", "one", "two", "three"]


def test_a_state_that_cannot_be_saved_is_said_and_the_log_goes_on(loaded, disk, small_disk):  # noqa: F811
    """No room for the state, room for the log: the next process feeds from the log."""
    chat, _ = disk.chat(loaded, cache=ROOMY)
    say(chat, "before")
    chat.journal.flush()
    log_bytes = sum(path.stat().st_size for path in disk.folder().glob("log*"))
    assert (disk.folder() / STATE_NAME).stat().st_size < log_bytes
    small_disk((disk.folder() / STATE_NAME).stat().st_size - 1)
    fill(chat, 1)
    chat.journal.flush()
    small_disk(1 << 30)
    (error, *_) = chat.take_errors()
    assert "cannot" in error
    chat.close()
    again, _ = disk.chat(loaded, cache=ROOMY)
    assert [turn.question for turn in again.conversation.turns] == ["before", "filler0"]


# Rebuilding


def rebuilt_ids(chat, turns):
    """What a new stream is fed of these turns."""
    conversation, ids = chat.conversation, []
    for turn in turns:
        encode = conversation.template.next_turn if ids else conversation.template.first_turn
        ids += encode(turn.told + turn.question)
        ids += conversation.loaded.tokenizer.encode_continuation(turn.answer)
    return ids


def assert_rebuilt(chat, notices, reason):
    """A reason, and the newest turns that fit into the window; older ones are gone."""
    assert reason in " ".join(notices)
    assert "the model's memory was rebuilt: " in notices[-1]
    conversation = chat.conversation
    turns = list(conversation.turns)
    window = conversation.cache_config.window_size
    kept = [
        turn
        for index, turn in enumerate(turns)
        if sum(map(conversation.num_tokens, turns[index:])) <= window
    ]
    assert f"{len(kept)} turn" in notices[-1]
    ids = list(conversation.stream.recent_ids)
    assert ids == rebuilt_ids(chat, kept)
    assert conversation.num_turns == turns[-1].number
    assert conversation.num_turns_gone() >= turns[-1].number - len(kept)


def test_without_a_state_the_newest_turns_are_fed_again(loaded, disk):
    """The state file is gone: said, and the window filled from the log, by whole turns."""
    chat, _ = disk.chat(loaded)
    fill(chat, 5)
    chat.close()
    (disk.folder() / STATE_NAME).unlink()
    again, notices = disk.chat(loaded)
    assert_rebuilt(again, notices, "there is no saved state")
    fill(again, 2, first=5)
    expected, logits = where(again), again.conversation.stream.logits
    again.close()
    third, notices = disk.chat(loaded)
    # The first turn that was fed again lacks what had closed the one before.
    assert (notices, where(third)[:6]) == ([], expected[:6])
    assert torch.equal(third.conversation.stream.logits, logits)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("weights", "weights was"),
        ("dtype", "dtype was float32, is bfloat16"),
        ("sizes", "window_size was 120, is 90"),
        ("system", "it has another system prompt"),
    ],
)
def test_a_state_of_another_kind_is_not_gone_on_from(loaded, disk, change, reason):
    """Another model, dtype, size or system prompt: said, and rebuilt from the words."""
    chat, _ = disk.chat(loaded)
    fill(chat, 5)
    chat.close()
    asked, options = Asked(sizes=change == "sizes", system=change == "system"), {}
    if change == "sizes":
        options["cache"] = CacheConfig(sink_size=4, window_size=90)
    if change == "system":
        options["system"] = "Be brief."
    if change in ("weights", "dtype"):
        fields = {"num_layers": 2, "vocab_size": BYTE_VOCAB_SIZE}
        fields |= {"seed": 5} if change == "weights" else {"dtype": torch.bfloat16}
        model = tiny_model(**fields)
        tokenizer = Tokenizer(byte_tokenizer())
        loaded = LoadedModel(Source("tiny", "tiny"), model, tokenizer, frozenset({2}))
    again, notices = disk.chat(loaded, asked=asked, **options)
    assert notices[0].startswith("the saved state cannot be gone on from: ")
    assert_rebuilt(again, notices, reason)


def test_a_dense_cache_is_rebuilt_from_what_fits(loaded, disk):
    """No eviction: older turns are left out, and nothing is refused."""
    dense = CacheConfig(policy="dense", window_size=200)
    chat, _ = disk.chat(loaded)
    fill(chat, 8)
    chat.close()
    again, notices = disk.chat(loaded, asked=Asked(sizes=True), cache=dense)
    assert "was rebuilt" in notices[-1]
    assert 0 < again.conversation.stream.position <= 200


def test_one_turn_larger_than_the_window(loaded, disk):
    """It is fed whole, and leaves in the window what it had left there."""
    chat, _ = disk.chat(loaded)
    say(chat, "word " * 60)
    held = list(chat.conversation.stream.recent_ids)[-SMALL.window_size :]
    chat.close()
    (disk.folder() / STATE_NAME).unlink()
    again, notices = disk.chat(loaded)
    assert "was rebuilt: 1 turn" in notices[-1]
    assert list(again.conversation.stream.recent_ids)[-SMALL.window_size :] == held


# Damage


def flipped(data):
    return data[:-20] + bytes([data[-20] ^ 4]) + data[-19:]


DAMAGE = {
    "truncated": (lambda data: data[: len(data) // 2], "is damaged"),
    "zeroed": (lambda data: bytes(len(data)), "is damaged"),
    "empty": (lambda _data: b"", "is damaged"),
    "flipped": (flipped, "its checksum does not match"),
    "foreign": (lambda _data: b"PK\x03\x04 and so on, a zip file", "is damaged"),
    "newer": (
        lambda data: data.replace(b'"version":"1"', b'"version":"2"'),
        "has format 2, this version of streamchat reads 1",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_state_is_put_aside_and_rebuilt(loaded, disk, kind):
    """Whatever was done to it: the reason, another name for the file, and the turns of the log."""
    damage, reason = DAMAGE[kind]
    chat, _ = disk.chat(loaded)
    fill(chat, 5)
    chat.close()
    path = disk.folder() / STATE_NAME
    before = path.read_bytes()
    path.write_bytes(damage(before))
    assert path.read_bytes() != before
    again, notices = disk.chat(loaded)
    assert_rebuilt(again, notices, reason)
    assert "put aside as state.safetensors.damaged-1" in notices[0]
    assert (disk.folder() / "state.safetensors.damaged-1").read_bytes() == damage(before)
    say(again, "and on")
    again.close()
    third, notices = disk.chat(loaded)
    assert notices == []
    assert third.conversation.turns[-1].question == "and on"


@pytest.mark.parametrize(
    "own",
    [
        {"position_offset": "far"},
        {"begin": [1]},
        {"num_turns": 1.5},
        {"system": 7},
        {"num_pinned": {}},
    ],
)
def test_a_state_that_was_made_up_is_put_aside(loaded, disk, own):
    """A whole file with a checksum of its own, that says nonsense."""
    chat, _ = disk.chat(loaded)
    fill(chat, 5)
    chat.close()
    path = disk.folder() / STATE_NAME
    saved = load_state(path)
    meta = {**saved.meta, "own": {**saved.meta["own"], **own}}
    save_state(path, type(saved)(saved.fingerprint, meta, saved.tensors))
    again, notices = disk.chat(loaded)
    assert_rebuilt(again, notices, "put aside as state.safetensors.damaged-1")


def test_tensors_of_another_shape_are_put_aside(loaded, disk):
    """The same, in the tensors."""
    chat, _ = disk.chat(loaded)
    fill(chat, 5)
    chat.close()
    path = disk.folder() / STATE_NAME
    saved = load_state(path)
    tensors = {**saved.tensors, "cache.keys": saved.tensors["cache.keys"][:, :, :, :3]}
    save_state(path, type(saved)(saved.fingerprint, saved.meta, tensors))
    again, notices = disk.chat(loaded)
    assert_rebuilt(again, notices, "is no state of this chat")


@pytest.mark.parametrize("kind", ["empty", "zeroed", "foreign"])
def test_a_lost_log_is_said_and_the_model_goes_on(loaded, disk, kind):
    """The state is whole: the model remembers, its words are lost, and new ones are logged."""
    chat, _ = disk.chat(loaded)
    fill(chat, 5)
    expected, logits = where(chat), chat.conversation.stream.logits
    chat.close()
    path = disk.folder() / "log.sqlite"
    path.write_bytes(DAMAGE[kind][0](path.read_bytes()))
    again, notices = disk.chat(loaded)
    assert "the log of session tea is empty: the model remembers" in notices[-1]
    if kind != "empty":
        assert "put aside as log.sqlite.damaged-1, a new log begins" in notices[0]
    assert torch.equal(again.conversation.stream.logits, logits)
    assert where(again)[:3] == expected[:3]
    say(again, "and on")
    assert again.conversation.num_turns == 6
    end = again.conversation.stream.position
    again.close()
    with disk.log() as log:
        assert log.next_position() == end


# Recall

FACT = "my sister Henrietta repairs violins in Zurich"


def recalled_by(chat, question):
    """The turn's recall event, or None; and the ids fed with its question."""
    conversation = chat.conversation
    start = conversation.stream.position
    events = list(chat.say(question))
    turn = conversation.turns[-1]
    fed = list(conversation.stream.recent_ids)[start - conversation.stream.position :]
    told = [event for event in events if isinstance(event, PassagesRecalled)]
    assert len(told) <= 1
    return (told[0] if told else None), fed[: turn.answer_start - turn.start]


def test_what_has_left_is_told_again_in_the_turn_that_asks_for_it(loaded, disk):
    """Marked with turn and time, before the question, in the ids that are fed, and shown.

    In the log stands which passage it was, and its words only once.
    """
    chat, _ = disk.chat(loaded, recalls=True, cache=CacheConfig(sink_size=4, window_size=320))
    say(chat, FACT)
    fill(chat, 12)
    assert chat.conversation.num_turns_gone() >= 1
    event, fed = recalled_by(chat, "What does Henrietta repair?")
    decode = chat.conversation.loaded.tokenizer.decode
    assert event.num_passages == 1
    first, line, last, *rest = event.text.split("\n")
    assert (first, last, rest) == (recalled.FIRST_LINE, recalled.LAST_LINE, ["", ""])
    with disk.log() as log:
        [passage] = [p for p in log.passages() if p.text == FACT]
    assert line == f"[{recalled.whence(passage)}] {FACT}"
    assert line.startswith("[turn 1, 20")
    assert f"{event.text}What does Henrietta repair?" in decode(fed)
    assert fed == chat.conversation.template.next_turn(f"{event.text}What does Henrietta repair?")
    chat.close()
    with disk.log() as log:
        said = list(log.passages())
        assert sum(FACT in p.text for p in said) == 1
        [reference] = [p for p in said if p.role == recalled.ROLE]
        assert recalled.told(recalled.referred(log, reference.text)) == event.text
        assert reference.turn == 14
        assert said[-3].text == "What does Henrietta repair?"


def test_what_is_held_is_not_told_again(loaded, disk):
    """Neither what has never left, nor what was told again and is still there."""
    chat, _ = disk.chat(loaded, recalls=True, cache=CacheConfig(sink_size=4, window_size=320))
    say(chat, FACT)
    assert recalled_by(chat, "Zurich?")[0] is None
    fill(chat, 12)
    assert recalled_by(chat, "Henrietta?")[0] is not None
    again, _ = recalled_by(chat, "And what does Henrietta repair?")
    assert again is None or FACT not in again.text
    chat.close()
    resumed, _ = disk.chat(loaded, recalls=True, cache=CacheConfig(sink_size=4, window_size=320))
    again, _ = recalled_by(resumed, "Henrietta repairs what?")
    assert again is None or FACT not in again.text
    fill(resumed, 12)
    assert FACT in recalled_by(resumed, "violins, in Zurich")[0].text


def test_a_question_that_was_asked_before_is_no_answer(loaded, disk):
    """It has all the words and says nothing new: what answers it is told again instead."""
    chat, _ = disk.chat(loaded, recalls=True, cache=CacheConfig(sink_size=4, window_size=320))
    say(chat, "Henrietta's violins?")
    say(chat, FACT)
    fill(chat, 12)
    event, _ = recalled_by(chat, "violins, Henrietta's")
    assert [line for line in event.text.split("\n") if "Henrietta" in line] == [
        line for line in event.text.split("\n") if FACT in line
    ]


@pytest.mark.parametrize("budget", [16, 140, 220, 10_000])
def test_recall_is_bounded(loaded, disk, budget):
    """By its budget with all marks, and by half the window."""
    options = {"recalls": True, "recall_budget": budget}
    chat, _ = disk.chat(loaded, cache=CacheConfig(sink_size=4, window_size=480), **options)
    for index in range(4):
        say(chat, f"the violin number {index} is very old")
    fill(chat, 14)
    event, _ = recalled_by(chat, "violin very old")
    if budget == 16:
        assert event is None
        return
    tokenizer = chat.conversation.loaded.tokenizer
    assert len(tokenizer.encode(event.text)) <= min(budget, 240)
    assert event.num_passages == (1 if budget < 200 else 2)


def test_recall_costs_nothing_when_it_is_off(loaded, disk, monkeypatch):
    """Nothing is searched, waited for or fed."""

    def fail(*_args, **_kwargs):
        pytest.fail("searched")

    chat, _ = disk.chat(loaded)
    say(chat, FACT)
    fill(chat, 5)
    monkeypatch.setattr(session_module, "search", fail)
    monkeypatch.setattr(chat.journal, "flush", fail)
    event, fed = recalled_by(chat, "Henrietta?")
    assert event is None
    assert fed == chat.conversation.template.next_turn("Henrietta?")


def test_recall_by_hand_is_told_with_the_next_turn_alone(loaded, disk):
    """`/recall` shows what it found; the next turn has it, the one after has not; /regen has."""
    console = Console(file=io.StringIO(), width=200)
    chat, _ = disk.chat(loaded, cache=CacheConfig(sink_size=4, window_size=320))
    say(chat, FACT)
    fill(chat, 12)
    commands = Commands(console)
    commands.run("/recall violins", chat)
    shown = console.file.getvalue()
    assert FACT in shown
    event, fed = recalled_by(chat, "So?")
    assert all(line in shown for line in event.text.splitlines())
    assert FACT in chat.conversation.loaded.tokenizer.decode(fed)
    question = commands.run("/regen", chat).ask
    assert recalled_by(chat, question)[0] == event
    assert recalled_by(chat, "And?")[0] is None
    commands.run("/recall nothing-of-the-kind", chat)
    assert "nothing that has left matches" in console.file.getvalue()
    assert recalled_by(chat, "Well?")[0] is None


def test_a_log_that_cannot_be_searched_does_not_stop_the_chat(loaded, disk, monkeypatch):
    """The question is asked without, and the reason is said."""

    def broken(*_args, **_kwargs):
        raise SessionError("cannot use the log")

    chat, _ = disk.chat(loaded, recalls=True)
    monkeypatch.setattr(session_module, "search", broken)
    assert say(chat, "Hello")
    assert chat.take_errors() == ["cannot use the log"]


def test_a_rebuilt_turn_has_what_it_was_told(loaded, disk):
    """A turn that is fed again is the one that was fed: with what had been recalled in it."""
    options = {"recalls": True, "cache": CacheConfig(sink_size=4, window_size=320)}
    chat, _ = disk.chat(loaded, **options)
    say(chat, FACT)
    fill(chat, 12)
    event, _ = recalled_by(chat, "Henrietta?")
    chat.close()
    (disk.folder() / STATE_NAME).unlink()
    again, notices = disk.chat(loaded, **options)
    assert again.conversation.turns[-1].told == event.text
    assert_rebuilt(again, notices, "no saved state")


def test_recall_needs_a_log(loaded):
    """Said at once, and by the commands that need one, too."""
    conversation = Conversation(loaded, cache=SMALL)
    with pytest.raises(UsageError, match="not logged"):
        ChatSession(conversation, None, recalls=True)
    chat = ChatSession(conversation)
    for command in ("/recall ship", "/save", "/save other", "/load other"):
        with pytest.raises(UsageError, match=r"not logged \(--no-log\)"):
            Commands(Console(file=io.StringIO())).run(command, chat)


def test_references_that_make_no_sense_refer_to_nothing(tmp_path):
    """What a damaged log says of its own passages raises nothing."""
    with Log(tmp_path / "log.sqlite") as log:
        [id_] = log.append([Passage(role="user", text="words", created=0.0)])
        for text in ("", "{}", "[1]", "[[1]]", '[["a", 0, 1]]', "[[99, 0, 3]]", "[" * 99_999):
            assert recalled.referred(log, text) == []
        [piece] = recalled.referred(log, f"[[{id_}, 1, 4]]")
    assert piece.text == "ord"


def test_where_a_passage_comes_from():
    """Of turns and of what was heard: as much as the log knows."""
    heard = Passage(
        role="input", text="x", created=0.0, first_line=3, start_time=65.5, speaker="Ann"
    )
    assert recalled.whence(heard).startswith("line 3, ")
    assert recalled.whence(heard).endswith(", at 0:01:05, Ann")
    assert recalled.told([]) == ""
    two = recalled.told([Recalled(heard, "a\nb", 0.0)])
    assert two.splitlines()[1].endswith("] a b")


# What others have heard


def test_a_chat_goes_on_from_what_was_listened_to(loaded, disk):
    """A stream of lines with its own sizes, and keys of its own: asked about, and recalled."""
    config = CacheConfig(sink_size=4, window_size=80)
    stream = Stream(loaded, config)
    with disk.sessions.open("tea") as session, Log(session.log_path) as log:
        for number, line in enumerate([FACT, *(f"line {n} of the talk" for n in range(9))], 1):
            start = stream.position
            stream.feed(loaded.tokenizer.encode(f"{line}\n"))
            place = {"first_position": start, "last_position": stream.position - 1}
            passage = Passage(role="input", text=line, created=0.0, first_line=number, **place)
            (last_id,) = log.append([passage])
        own = {"mode": "listen", "last_id": last_id, "format": "plain", "other": [1]}
        save_state(session.state_path, pack(loaded, config, stream.snapshot(), own))
    chat, notices = disk.chat(loaded, recalls=True)
    assert notices == []
    assert torch.equal(chat.conversation.stream.logits, stream.logits)
    assert chat.conversation.cache_config.holds_like(config)
    event, fed = recalled_by(chat, "Henrietta?")
    assert event is None or "line 1" in event.text
    assert fed == chat.conversation.template.next_turn(f"{event.text if event else ''}Henrietta?")
    fill(chat, 2)
    assert chat.conversation.num_turns == 3
    chat.clear()
    assert chat.conversation.cache_config.sink_size == SMALL.pin(6).sink_size
    chat.close()


def test_what_was_listened_to_is_rebuilt_from_its_lines(loaded, disk):
    """Without a state: the newest lines that fit, behind the chat's own header, which is pinned."""
    with disk.sessions.open("tea") as session, Log(session.log_path) as log:
        for n in range(40):
            place = {"first_position": 10 * n, "last_position": 10 * n + 9}
            log.append([Passage(role="input", text=f"line {n:02}", created=0.0, **place)])
    chat, notices = disk.chat(loaded)
    assert "was rebuilt: 15 lines fed" in notices[-1]
    conversation = chat.conversation
    ids = list(conversation.stream.recent_ids)
    lines = "".join(f"line {n:02}\n" for n in range(25, 40))
    assert ids == [*conversation.template.pinned_ids(), *loaded.tokenizer.encode(lines)]


# Sessions as wholes


def test_two_chats_in_one_session_are_refused(loaded, disk):
    """The second one, and it harms nothing."""
    chat, _ = disk.chat(loaded)
    say(chat, "Hello")
    with pytest.raises(SessionInUseError, match="session tea is in use by another process"):
        Journal(disk.sessions, "tea")
    say(chat, "still here")
    chat.close()
    assert len(disk.chat(loaded)[0].conversation.turns) == 2


def test_a_session_in_which_nothing_was_said_is_removed(loaded, disk):
    """Opened and left: no folder stays. One whose turn was taken back has a state, and stays."""
    disk.chat(loaded, "empty")[0].close()
    assert disk.sessions.names() == []
    chat, _ = disk.chat(loaded)
    say(chat, "one")
    chat.undo()
    chat.close()
    assert disk.sessions.names() == ["tea"]


def test_save_keeps_a_copy_and_load_goes_there(loaded, disk):
    """`/save NAME` and `/load NAME`: the copy is where it was, the other one has gone on."""
    console = Console(file=io.StringIO(), width=200)
    commands = Commands(console)
    chat, _ = disk.chat(loaded)
    fill(chat, 4)
    commands.run("/save", chat)
    commands.run("/save other", chat)
    expected, logits = where(chat), chat.conversation.stream.logits
    say(chat, "after it")
    with pytest.raises(UsageError, match="there is a session 'other' already"):
        commands.run("/save other", chat)
    with pytest.raises(UsageError, match="there is no session 'missing'"):
        commands.run("/load missing", chat)
    with pytest.raises(UsageError, match="usage: /load NAME"):
        commands.run("/load", chat)
    with pytest.raises(UsageError, match="this is session 'tea'"):
        commands.run("/load tea", chat)
    commands.run("/load other", chat)
    assert chat.name == "other"
    assert where(chat) == expected
    assert torch.equal(chat.conversation.stream.logits, logits)
    assert "session other, 4 turns" in console.file.getvalue()
    say(chat, "in the copy")
    held = Journal(disk.sessions, "tea")  # the first one was let go
    with pytest.raises(SessionInUseError):
        commands.run("/load tea", chat)
    held.close()
    assert chat.name == "other"
    commands.run("/load tea", chat)
    assert [turn.question for turn in chat.conversation.turns][-1] == "after it"


def test_settings_are_kept(loaded, disk):
    """`/set` changes what the next process finds."""
    chat, _ = disk.chat(loaded)
    commands = Commands(Console(file=io.StringIO()))
    commands.run("/set temperature 0.5", chat)
    commands.run("/set max_new 17", chat)
    commands.run("/set repetition_penalty 1.2", chat)
    say(chat, "Hello")
    chat.close()
    with disk.log() as log:
        settings = log.settings()
    assert (settings["temperature"], settings["max_new"]) == (0.5, 17)
    assert settings["repeat_penalty"] == 1.2


@needs_permissions
def test_all_of_it_is_the_owners_alone(loaded, disk):
    """0600 and 0700, the copy and what was put aside included."""
    before = os.umask(0)
    try:
        chat, _ = disk.chat(loaded)
        fill(chat, 3)
        chat.save_as("other")
        chat.close()
        (disk.folder("other") / STATE_NAME).write_bytes(b"nonsense")
        chat, _ = disk.chat(loaded, "other")
        modes = {path: path.stat().st_mode & 0o777 for path in disk.root.rglob("*")}
    finally:
        os.umask(before)
    assert any("damaged" in path.name for path in modes)
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items())


# Without an end


@pytest.mark.slow
def test_two_thousand_turns_are_kept_flat(loaded, disk, monkeypatch):
    """The state stays as large as it was, the log grows by the turn, and nothing else grows."""
    answers = deque()
    monkeypatch.setattr(Sampler, "choose", lambda *_args: answers.popleft())
    chat, _ = disk.chat(loaded)
    sizes, logs, resident = [], [], []
    for index in range(2000):
        answers.extend([*loaded.tokenizer.encode(f"answer {index % 10}")[:MAX_NEW]])
        say(chat, f"question {index:04}")
        if (index + 1) % 250 == 0:
            chat.journal.flush()
            sizes.append((disk.folder() / STATE_NAME).stat().st_size)
            with disk.log() as log:
                logs.append((log.num_passages(), text_bytes(log)))
            resident.append(resident_bytes())
    assert max(sizes) - min(sizes) <= 64  # digits of the counters
    assert [count for count, _ in logs] == [500 * (n + 1) for n in range(8)]
    steps = [b - a for (_, a), (_, b) in itertools.pairwise(logs)]
    assert max(steps) <= 2 * min(steps)
    # The texts of 1,000 turns for /evicted are there after half of them.
    assert resident[-1] - resident[3] <= 8e6
    chat.close()
    again, notices = disk.chat(loaded)
    assert notices == []
    assert again.conversation.num_turns == 2000
    assert again.conversation.stream.position == chat.conversation.stream.position
    assert torch.equal(again.conversation.stream.logits, chat.conversation.stream.logits)


def text_bytes(log):
    """Bytes of a log's pages that are in use."""
    with log.using() as connection:
        numbers = [
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        ]
    return (numbers[0] - numbers[1]) * numbers[2]


def resident_bytes():
    import psutil

    return psutil.Process().memory_info().rss
