"""When notes are due, and how intervals are written. The clock is the test's own."""

import json
from types import SimpleNamespace

import pytest

from streamchat import UsageError
from streamchat.events import Origin
from streamchat.pipe import due as due_module
from streamchat.pipe.due import Due
from streamchat.pipe.interval import Interval, parse_seconds
from streamchat.pipe.lag import LagMeter
from streamchat.pipe.lines import Piece


@pytest.fixture
def clock(monkeypatch):
    """Moves when the test says so."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(due_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def piece(start=None, speaker=None):
    return Piece("words", 1, 1, ends_line=True, origin=Origin(start=start, speaker=speaker))


def due(seconds=None, tokens=None, idle=None, *, on_turn=False):
    return Due(Interval(tokens, seconds), idle, on_turn=on_turn)


def noted(due, pieces):
    """Which pieces a note is written before."""
    found = []
    for index, one in enumerate(pieces):
        if due.before(one):
            found.append(index)
            due.note()
        due.add(one)
    return found


# Intervals


@pytest.mark.parametrize(
    ("text", "tokens", "seconds"),
    [
        ("auto", None, None),
        ("600tok", 600, None),
        (" 60s ", None, 60),
        ("5m", None, 300),
        ("2 h", None, 7200),
        ("600tok, 5m", 600, 300),
        ("90s,40tok", 40, 90),
    ],
)
def test_intervals_as_users_write_them(text, tokens, seconds):
    """Tokens, a time, or both."""
    assert Interval.parse(text, "--every") == Interval(tokens, seconds)


@pytest.mark.parametrize("text", ["", "0s", "5", "s", "-5s", "1.5m", "5m,6m", "1tok,2tok", "5d"])
def test_other_intervals_are_refused(text):
    """With the option's name and what was got."""
    with pytest.raises(UsageError, match=r"--every .*, got '"):
        Interval.parse(text, "--every")


@pytest.mark.parametrize("text", ["5", "5tok", "0s", "auto", ""])
def test_a_time_is_no_number_of_tokens(text):
    """Where only a time makes sense, it must be one."""
    with pytest.raises(UsageError, match="--idle must be a time like 5s"):
        parse_seconds(text, "--idle")
    assert parse_seconds("5s", "--idle") == 5


# Reasons for a note


def test_after_so_many_tokens():
    """As soon as that many stand without a note."""
    assert not due(tokens=10).after(9, 0, is_live=False)
    assert due(tokens=10).after(10, 0, is_live=False)


def test_recordings_go_by_their_own_time(clock):
    """The clock does not matter for a file with times: a note before what begins too late."""
    starts = [0, 20, 59, 60, 70, 119, 121, 400]
    timed = due(seconds=60)
    assert noted(timed, [piece(start) for start in starts]) == [3, 6, 7]
    clock.now += 1e6
    assert not timed.after(5, 0, is_live=False)


def test_lines_without_a_time_do_not_stop_the_times_of_others():
    """A line that says no time belongs to those around it."""
    pieces = [piece(0), piece(), piece(50), piece(), piece(61), piece()]
    assert noted(due(seconds=60), pieces) == [4]


def test_a_time_that_runs_back_begins_another_recording():
    """After it, an interval is counted from there."""
    pieces = [piece(start) for start in (100, 130, 0, 30, 61)]
    assert noted(due(seconds=60), pieces) == [4]


def test_without_times_the_clock_counts(clock):
    """For a file, and for a live input with or without times of its own."""
    plain, live = due(seconds=60), due(seconds=60)
    plain.add(piece())
    live.add(piece(start=5))
    clock.now += 59
    assert not plain.after(1, 0, is_live=False)
    clock.now += 1
    assert plain.after(1, 0, is_live=False)
    assert live.after(1, 0, is_live=True)
    live.note()
    assert not live.after(1, 0, is_live=True)


def test_a_silence_of_a_live_input():
    """Once what has come stands without a note, and not for a file, which is never silent."""
    idle = due(idle=5)
    assert not idle.after(10, 4.9, is_live=True)
    assert idle.after(10, 5, is_live=True)
    assert not idle.after(0, 100, is_live=True)
    assert not idle.after(10, 100, is_live=False)


def test_another_speaker():
    """Lines that name nobody are the last speaker's; the first speaker follows no other."""
    said = [piece(speaker=name) for name in ("Ann", "Ann", None, "Bob", None, "Bob", "Ann")]
    assert noted(due(on_turn=True), said) == [3, 6]
    assert noted(due(), said) == []


def test_a_marked_turn():
    """Where the input marks turns, each is somebody else's, whoever that is."""
    turns = [Piece("x", 1, 1, True, Origin(turn=turn)) for turn in (None, None, 1, 2, 2, None, 3)]
    assert noted(due(on_turn=True), turns) == [3, 6]


def test_it_goes_on_from_what_was_packed(clock):
    """Times and speakers through JSON and back, and the clock's share too."""
    first = due(seconds=60, on_turn=True)
    first.add(piece(start=10, speaker="Ann"))
    clock.now += 40
    packed = json.loads(json.dumps(first.pack()))
    clock.now += 1e5
    second = due(seconds=60, on_turn=True)
    second.unpack(packed)
    assert second.before(piece(start=70))
    assert not second.before(piece(start=69))
    assert second.before(piece(speaker="Bob"))
    clock.now += 19
    assert not second.after(1, 0, is_live=True)
    clock.now += 1
    assert second.after(1, 0, is_live=True)


# Lag


def test_quantiles_of_lags_are_those_of_all_lines():
    """Within the width of a bucket, however many lines; the longest exactly."""
    meter = LagMeter()
    assert meter.quantile(0.95) is None
    lags = [0.0004 * 1.01**n for n in range(1500)]
    for lag in lags:
        meter.add(lag, num_lines=3)
    for share in (0.5, 0.9, 0.95, 1.0):
        exact = lags[int(share * len(lags)) - 1]
        assert exact * 0.999 <= meter.quantile(share) <= exact * 1.021
    assert meter.longest == lags[-1]
    assert meter.quantile(0.001) == pytest.approx(0.001)
