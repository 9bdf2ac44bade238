"""Modes and triggers of `pipe` on the command line; live input comes through a real pipe."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamchat.cli.app import run
from streamchat.engine.generate import Sampler
from streamchat.pipe import score as score_module
from streamchat.ui import typed as typed_module
from streamchat.ui.typed import Typed

pytestmark = pytest.mark.usefixtures("undisturbed")

MEETING = """WEBVTT

00:01.000 --> 00:02.000
<v Ann>hello

00:03.000 --> 00:04.000
<v Ann>all

01:05.000 --> 01:06.000
<v Bob>hello Ann

01:07.000 --> 01:08.000
<v Ann>bye
"""


@pytest.fixture
def pipe(command, tiny_folder):
    """`streamchat pipe` with the tiny model."""

    def call(*args, stdin=b""):
        return command("pipe", "-m", tiny_folder, *args, stdin=stdin)

    return call


@pytest.fixture
def live(undisturbed, capfd, monkeypatch, tiny_folder):
    """Runs `pipe` on a real pipe that another thread writes to: strings, or seconds to wait."""

    def call(*args, script):
        read_end, write_end = os.pipe()

        def write():
            for step in script:
                if isinstance(step, str):
                    os.write(write_end, step.encode())
                else:
                    time.sleep(step)
            os.close(write_end)

        capfd.readouterr()
        writer = threading.Thread(target=write)
        with open(read_end, "rb", buffering=0) as source:  # noqa: PTH123 - a descriptor
            monkeypatch.setattr(sys, "stdin", source)
            writer.start()
            code = run(["pipe", "-m", str(tiny_folder), *args])
        writer.join()
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return call


def events_of(done, *kinds):
    events = [json.loads(line) for line in done.out.splitlines()]
    return [event for event in events if event["event"] in kinds]


# What says nothing in a mode


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--mode", "score", "--by", "turn"], "--by is for --mode reply; this is score"),
        (["--mode", "filter", "--every", "5s"], "--every is for --mode notes; this is filter"),
        (["--mode", "notes", "--min", "3"], "--min is for --mode filter; this is notes"),
        (["--mode", "reply", "--roll-up", "3"], "--roll-up is for --mode notes; this is reply"),
        (["--mode", "reply", "--ask"], "--ask is for --mode notes and listen; this is reply"),
        (["--mode", "score", "--prompt", "x"], "--prompt is for --mode notes and reply and listen"),
        (["--mode", "score", "--when-behind", "skip-notes"], "skip-notes is for --mode notes"),
        (["--roll-up", "1"], "--roll-up must be a number of notes from 2 on"),
        (["--every", "often"], "--every must be like 600tok, 60s, 5m or 1h, got 'often'"),
        (["--idle", "5"], "--idle must be a time like 5s, 5m or 1h, got '5'"),
        (["--mode", "filter", "--min", "high"], "--min must be nats per token, as 4.5, or"),
        (["--when-behind", "drop", "--max-lag", "x"], "--max-lag must be a time like 5s"),
        (["--max-lag", "5tok"], "--max-lag must be a time like 5s"),
        (["--roll-up", "1h,10m"], "--roll-up takes the shorter time first"),
        (["--prompt", "@nobody"], "--prompt: no recipe is called '@nobody'; there are @alert"),
        (["--ask"], "--ask needs a terminal"),
        (["--window", "100", "--carry", "2"], "window 100 is too small for notes"),
    ],
)
def test_what_cannot_be_meant_is_one_line(pipe, args, words):
    """Exit 2 (or 2 for sizes, too) and a line that says what is meant for what."""
    done = pipe(*args, "-q", stdin=b"text\n")
    assert done.code == 2
    assert words in done.err
    assert len(done.err.splitlines()) == 1
    assert done.out == ""


# Filter


def odd_log():
    lines = [f"line {n} is like all the others" for n in range(40)]
    lines[30] = "~~~ \x7f{[]}@@@ %%% ^^^ ~~~"
    return lines


def test_a_filter_passes_lines_as_they_are(pipe):
    """Only what stands out, and nothing else on standard output; the scores are those of score."""
    data = "\n".join(odd_log()).encode() + b"\n"
    scored = events_of(pipe("--mode", "score", "--json", stdin=data), "score")
    high = [s for s in scored if s["z_score"] is not None and s["z_score"] >= 1.5]
    assert 0 < len(high) < 15
    done = pipe("--mode", "filter", "--min", "1.5sd", stdin=data)
    assert done.code == 0
    assert done.out.splitlines() == [event["text"] for event in high]
    assert f", {len(high)} passed" in done.err
    done = pipe("--mode", "filter", "--min", "1.5sd", "--json", stdin=data)
    assert events_of(done, "score") == high
    assert events_of(done, "end")[0]["passed"] == len(high)
    least = sorted(event["nats_per_token"] for event in scored)[-5]
    done = pipe("--mode", "filter", "--min", str(least - 1e-4), stdin=data)
    assert len(done.out.splitlines()) == 5


# Units, recipes, triggers


def test_replies_by_turn(pipe):
    """One for what each speaker says at a time, with its times and its first line."""
    args = ["--mode", "reply", "--by", "turn", "--max-new", "2", "--json"]
    replies = events_of(pipe(*args, stdin=MEETING.encode()), "reply")
    assert [(r["line"], r["question"], r.get("last_line")) for r in replies] == [
        (4, "hello\nall", 7),
        (10, "hello Ann", None),
        (13, "bye", None),
    ]
    assert [(r["start"], r["end"], r["speaker"]) for r in replies] == [
        (1, 4, "Ann"),
        (65, 66, "Bob"),
        (67, 68, "Ann"),
    ]


def test_a_recipe_brings_its_mode(pipe, monkeypatch):
    """Unless the user names one, on the line or in the environment."""
    args = ["--max-new", "2", "--json", "--window", "900"]

    def mode(*more):
        return events_of(pipe(*args, *more, stdin=b"hello\n"), "start")[0]["mode"]

    assert mode("--prompt", "@tag") == "reply"
    assert mode("--prompt", "@minutes") == "notes"
    assert mode("--prompt", "@tag", "--mode", "notes") == "notes"
    assert mode("--prompt", "Tag it.") == "notes"
    monkeypatch.setenv("STREAMCHAT_MODE", "listen")
    assert "--mode listen needs --session" in pipe("--prompt", "@tag", stdin=b"x\n").err


def test_a_recipe_of_the_settings_file(command, tiny_folder, tmp_path, monkeypatch):
    """Its text is what the model is told: the same stream as with the text itself."""
    settings = tmp_path / "settings.toml"
    settings.write_text('[prompts]\npirate = "Answer like a {}."\n')
    monkeypatch.setenv("STREAMCHAT_CONFIG", str(settings))
    args = ["pipe", "-m", tiny_folder, "--mode", "reply", "--max-new", "3", "--json"]
    named = command(*args, "--prompt", "@pirate:pirate", stdin=b"hello\n")
    spelt = command(*args, "--prompt", "Answer like a pirate.", stdin=b"hello\n")
    assert named.code == 0
    assert named.out == spelt.out


def test_notes_by_the_recordings_own_minutes(pipe):
    """`--every 1m` is a minute of the meeting, however fast it is read; then the whole."""
    args = ["--every", "1m", "--roll-up", "2", "--max-new", "4", "--window", "900", "--json"]
    done = pipe(*args, stdin=MEETING.encode())
    found = events_of(done, "note", "summary")
    assert [(e["event"], e["first_line"], e["last_line"]) for e in found] == [
        ("note", 4, 7),
        ("note", 10, 13),
        ("summary", 4, 13),
    ]
    assert (found[2]["level"], found[2]["is_whole"], found[2]["first_note"]) == (1, False, 1)
    plain = pipe(*args[:-1], stdin=MEETING.encode()).out
    assert "[summary of notes, 1 to 2, lines 4 to 13, 0:00:01 to 0:01:08]\n" in plain


def test_notes_at_each_turn(pipe):
    """`--on-turn`: one for each time that another speaker begins, and one at the end."""
    args = ["--on-turn", "--max-new", "4", "--window", "900", "--json"]
    notes = events_of(pipe(*args, stdin=MEETING.encode()), "note")
    assert [(n["first_line"], n["speakers"]) for n in notes] == [
        (4, ["Ann"]),
        (10, ["Bob"]),
        (13, ["Ann"]),
    ]


# Live input


def test_a_silence_brings_a_note_while_the_input_is_open(live):
    """With `--idle`; and the lag of what came stands in the end."""
    args = ["--idle", "1s", "--max-new", "4", "--window", "900", "--json"]
    done = live(*args, script=["hello\nall\n", 2.5, "bye\n"])
    assert done.code == 0
    notes = events_of(done, "note")
    assert [(note["first_line"], note["last_line"]) for note in notes] == [(1, 2), (3, 3)]
    (end,) = events_of(done, "end")
    assert 0 < end["lag_p95"] <= end["lag_max"] < 60
    assert "95 % within " in done.err


def test_lines_that_waited_too_long_are_dropped_and_named(live, monkeypatch):
    """`--when-behind drop`: while one slow answer is written, too much has come."""

    def choose(*_):
        time.sleep(0.1)
        return 70

    monkeypatch.setattr(Sampler, "choose", choose)
    args = ["--mode", "reply", "--when-behind", "drop", "--max-lag", "1s", "--max-new", "20"]
    script = ["one\n", 0.3, *("again\n" for _ in range(5)), 4, "last\n"]
    done = live(*args, "--json", script=script)
    assert done.code == 0
    replies, gaps = events_of(done, "reply"), events_of(done, "lag")
    answered = [reply["line"] for reply in replies]
    dropped = [n for gap in gaps for n in range(gap["first_line"], gap["last_line"] + 1)]
    assert dropped
    assert sorted(answered + dropped) == list(range(1, 8))
    assert all(gap["skipped"] == "lines" and gap["lag_seconds"] > 1 for gap in gaps)
    assert "s behind: lines " in done.err
    assert events_of(done, "end")[0]["lines_dropped"] == len(dropped)
    assert f"{len(dropped)} lines dropped" in done.err


def test_a_burst_that_came_in_one_piece_is_dropped_too(live, monkeypatch):
    """Lines in one read are taken a few at a time: what waits is not in our hands already."""
    score_batch = score_module._score_batch

    def slow(stream, batch):
        time.sleep(0.4)
        return score_batch(stream, batch)

    monkeypatch.setattr(score_module, "_score_batch", slow)
    burst = "".join(f"line {n} of a burst that is much too fast for us\n" for n in range(100))
    args = ["--mode", "score", "--when-behind", "drop", "--max-lag", "1s", "--json"]
    done = live(*args, script=[burst, 4, "last\n"])
    scored = [event["line"] for event in events_of(done, "score")]
    gaps = events_of(done, "lag")
    dropped = [n for gap in gaps for n in range(gap["first_line"], gap["last_line"] + 1)]
    assert sorted(scored + dropped) == list(range(1, 102))
    assert len(dropped) > 40
    assert scored[-1] == 101


def test_notes_of_several_files_say_where_their_lines_stand(pipe, tmp_path):
    """Lines are numbered through, and by file."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("one\ntwo\nthree\n")
    args = ["--max-new", "4", "--window", "900", "--json"]
    (note,) = events_of(pipe(*args, tmp_path / "a.txt", tmp_path / "b.txt"), "note")
    assert (note["first_line"], note["last_line"]) == (1, 6)
    assert (note["first_file_line"], note["last_file_line"]) == (1, 3)
    assert [Path(name).name for name in note["files"]] == ["a.txt", "b.txt"]


def test_files_have_no_lag(pipe):
    """They wait for us."""
    (end,) = events_of(pipe("--mode", "score", "--json", stdin=b"one\n"), "end")
    assert "lag_p95" not in end


# Questions from the terminal


@pytest.fixture
def keyboard(monkeypatch):
    """A terminal in place of the user's; gives a function that types."""
    ours, theirs = os.openpty()
    monkeypatch.setattr(typed_module, "TERMINAL", os.ttyname(theirs))
    monkeypatch.setattr(typed_module, "can_animate", lambda: True)
    yield lambda text: os.write(ours, text.encode())
    os.close(ours)
    os.close(theirs)


def eventually(get, expected):
    deadline = time.monotonic() + 10
    while get() != expected:
        assert time.monotonic() < deadline, f"{get()!r} is not {expected!r}"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")
def test_questions_are_taken_key_by_key(keyboard):
    """Enter asks, Backspace and Ctrl-U take back, other keys and empty lines say nothing."""
    import termios

    with Typed() as typed:
        handle = typed._terminal
        assert not termios.tcgetattr(handle)[3] & (termios.ECHO | termios.ICANON)
        assert termios.tcgetattr(handle)[3] & termios.ISIG  # Ctrl-C still stops
        keyboard("who?")
        eventually(typed.draft, "who?")
        assert typed.take() is None
        keyboard("\x7f\x7f\x7f\x7f\x7f")
        eventually(typed.draft, "")
        keyboard("garbage\x15naïve 我")
        eventually(typed.draft, "naïve 我")
        keyboard("\x1b[A")
        keyboard("\n\n  \nmore\r")
        eventually(typed._questions.qsize, 2)
        assert (typed.take(), typed.take(), typed.take()) == ("naïve 我", "more", None)
    assert termios.tcgetattr(handle)[3] & termios.ECHO


@pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")
def test_after_a_stop_keys_are_asked_for_again(keyboard):
    """A shell gives the terminal its own settings when a job stops; `fg` sends SIGCONT.

    The quit key is none meanwhile, and in the end settings and handlers are those from before.
    """
    import signal
    import termios

    numbers = (signal.SIGCONT, signal.SIGTTIN, signal.SIGTTOU)
    handlers = [signal.getsignal(number) for number in numbers]
    with Typed() as typed:
        handle, cooked = typed._terminal, typed._before
        asked = termios.tcgetattr(handle)
        assert asked[6][termios.VQUIT] == b"\0" != cooked[6][termios.VQUIT]
        termios.tcsetattr(handle, termios.TCSANOW, cooked)
        os.kill(os.getpid(), signal.SIGCONT)
        eventually(lambda: termios.tcgetattr(handle), asked)
        keyboard("again")
        eventually(typed.draft, "again")
    assert termios.tcgetattr(handle) == cooked
    assert [signal.getsignal(number) for number in numbers] == handlers


def test_turns_that_leave_are_events_too(pipe):
    """Each turn once, in order, before the answer that pushed it out; and named on stderr."""
    lines = "".join(f"line {n} of a conversation\n" for n in range(12)).encode()
    args = ["--mode", "reply", "--max-new", "4", "--window", "200", "--json"]
    done = pipe(*args, stdin=lines)
    gone = events_of(done, "evicted")
    turns = [n for event in gone for n in range(event["first_turn"], event["last_turn"] + 1)]
    assert turns == list(range(1, len(turns) + 1))
    assert 4 < len(turns) < 12
    assert done.err.count("left the model's memory") == len(gone)
