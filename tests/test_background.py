"""Jobs on another thread: in order, the newest of each kind, and no error lost."""

import threading

import pytest

from streamchat.errors import SessionError
from streamchat.store.background import Background


@pytest.fixture
def background():
    background = Background()
    yield background
    background.close()


@pytest.fixture
def gate(background):
    """Holds the thread up, so that jobs wait, until it is set."""
    event = threading.Event()
    background.submit(lambda: event.wait(30))
    yield event
    event.set()


def test_jobs_are_done_in_order_and_elsewhere(background):
    """One after the other, on one thread that is not the caller's."""
    done = []
    for number in range(50):
        background.submit(lambda n=number: done.append((n, threading.get_ident())))
    background.flush()
    assert [n for n, _ in done] == list(range(50))
    assert len({ident for _, ident in done}) == 1
    assert done[0][1] != threading.get_ident()


def test_of_jobs_that_replace_each_other_only_the_newest_is_done(background, gate):
    """At its own place in the order, and other jobs are not touched."""
    done = []
    for name in ("state 1", "log 1", "state 2", "log 2", "state 3"):
        kind = "state" if name.startswith("state") else None
        background.submit(lambda n=name: done.append(n), replaces=kind)
    gate.set()
    background.flush()
    assert done == ["log 1", "log 2", "state 3"]


def test_a_failure_is_told_once_and_ends_nothing(background):
    """The jobs after it are done; the error is there for whoever asks."""
    done = []

    def fail():
        raise SessionError("disk full")

    background.submit(fail)
    background.submit(lambda: done.append(1))
    background.flush()
    assert [str(error) for error in background.take_errors()] == ["disk full"]
    assert background.take_errors() == []
    assert done == [1]


@pytest.mark.parametrize("wait", ["flush", "close"])
def test_a_fault_of_the_program_is_raised_where_somebody_waits(wait):
    """Not swallowed with the thread, and not twice."""
    background = Background()
    background.submit(lambda: [][0])
    with pytest.raises(IndexError):
        getattr(background, wait)()
    background.close()


def test_closing_waits_for_all_that_was_submitted(background, gate):
    """And takes nothing more."""
    done = []
    background.submit(lambda: done.append(1))
    gate.set()
    background.close()
    assert done == [1]
    background.close()
    with pytest.raises(RuntimeError):
        background.submit(lambda: None)
    assert done == [1]
