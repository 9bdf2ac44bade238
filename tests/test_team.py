"""Threads that share the pieces of a region: each piece once, nobody waits for a late one.

The team also runs plain Python functions, so that a test can hold a thread at any point.
"""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from numba import njit

from streamchat.ops.compiled import team
from streamchat.ops.compiled.team import MAX_SHARES, claim, finish, new_progress, run, wait

PATIENCE_SECONDS = 20


@pytest.fixture(autouse=True)
def same_number_of_threads():
    """Tests that change torch's number of threads leave it as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@njit(nogil=True)
def wait_outside(progress, region, num_pieces):
    """Without the interpreter, which the thread that is waited for needs."""
    wait(progress, region, num_pieces)


@njit(nogil=True)
def count_pieces(thread, progress, sizes, counts, faults):
    """Count each piece of each region, and how often one was not done when its region was left."""
    for region in range(sizes.size):
        piece = claim(progress, region, thread, sizes[region])
        while piece >= 0:
            counts[region, piece] += 1
            finish(progress, region)
            piece = claim(progress, region, thread, sizes[region])
        wait(progress, region, sizes[region])
        for piece in range(sizes[region]):
            faults[thread] += counts[region, piece] != 1


def claimed_pieces(progress, region, thread, num_pieces):
    """Pieces that a thread gets until none is left, each finished at once."""
    while (piece := claim(progress, region, thread, num_pieces)) >= 0:
        yield piece
        finish(progress, region)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5, MAX_SHARES + 3])
def test_each_piece_is_done_once(num_threads):
    """In regions of none, one, few and many pieces, and all are done when a region is left."""
    torch.set_num_threads(num_threads)
    sizes = np.array([0, 1, 2, 3, 7, 16, 17, 64, 1000, 0, 1])
    expected = np.arange(1000) < sizes[:, None]
    for _ in range(100):
        counts = np.zeros((sizes.size, 1000), np.int64)
        faults = np.zeros(num_threads, np.int64)
        run(count_pieces, new_progress(sizes.size), sizes, counts, faults)
        assert np.array_equal(counts, expected)
        assert not faults.any()


@pytest.mark.parametrize("num_shares", [1, 2, 3, 16])
@pytest.mark.parametrize("thread", [0, 1, 2, 17, 40])
@pytest.mark.parametrize("num_pieces", [1, 2, 5, 64])
def test_one_thread_can_do_everything(num_shares, thread, num_pieces):
    """Whatever its number, it finds all pieces, its own share first and side by side."""
    torch.set_num_threads(num_shares)
    progress = new_progress(2)
    pieces = list(claimed_pieces(progress, 1, thread, num_pieces))
    assert sorted(pieces) == list(range(num_pieces))
    share = thread % num_shares
    own = range(num_pieces * share // num_shares, num_pieces * (share + 1) // num_shares)
    assert pieces[: len(own)] == list(own)
    wait_outside(progress, 1, num_pieces)
    assert claim(progress, 1, thread, num_pieces) == -1
    assert not progress[0].any()  # the other region is untouched


def test_there_are_no_more_shares_than_the_limit():
    """However many threads there are; some then start in the same share."""
    for num_threads, expected in ((2, 2), (MAX_SHARES, MAX_SHARES), (MAX_SHARES + 9, MAX_SHARES)):
        torch.set_num_threads(num_threads)
        assert new_progress(3).shape[:2] == (3, 1 + expected)


def test_a_late_thread_holds_nobody_up():
    """A run ends while a helper has not begun; what it finds later is that nothing is left."""
    torch.set_num_threads(2)
    may_begin, has_ended = threading.Event(), threading.Event()
    done = {0: [], 1: []}

    def work(thread, progress):
        if thread:
            may_begin.wait(PATIENCE_SECONDS)
        for region in range(3):
            done[thread] += claimed_pieces(progress, region, thread, 10)
            wait_outside(progress, region, 10)
        if thread:
            has_ended.set()

    run(work, new_progress(3))
    assert not has_ended.is_set()
    assert sorted(done[0]) == sorted([*range(10)] * 3)
    may_begin.set()
    assert has_ended.wait(PATIENCE_SECONDS)
    assert done[1] == []


def test_a_thread_that_holds_a_piece_is_waited_for():
    """The run does not end before a claimed piece is done."""
    torch.set_num_threads(2)
    has_claimed, events = threading.Event(), []

    def work(thread, progress):
        if thread:
            assert claim(progress, 0, thread, 4) >= 0
            has_claimed.set()
            time.sleep(0.2)
            events.append("the helper is done")
            finish(progress, 0)
            return
        assert has_claimed.wait(PATIENCE_SECONDS)
        assert len(list(claimed_pieces(progress, 0, thread, 4))) == 3
        wait_outside(progress, 0, 4)
        events.append("the run is over")

    run(work, new_progress(1))
    assert events == ["the helper is done", "the run is over"]


def test_runs_from_two_threads_do_not_mix():
    """Two callers at once, each with work of its own."""
    torch.set_num_threads(3)
    results = {}

    def call(name):
        torch.set_num_threads(3)
        for _ in range(50):
            done = []

            def work(thread, progress, done):
                for piece in claimed_pieces(progress, 0, thread, 20):
                    done.append(piece)
                wait_outside(progress, 0, 20)

            run(work, new_progress(1), done)
            results.setdefault(name, []).append(sorted(done))

    callers = [threading.Thread(target=call, args=(name,)) for name in "ab"]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(PATIENCE_SECONDS)
    assert results == {name: [list(range(20))] * 50 for name in "ab"}


def test_threads_sleep_between_runs():
    """Half a second without work costs next to no CPU time."""
    torch.set_num_threads(3)
    run(lambda thread: None)
    time.sleep(0.05)
    process = psutil.Process()
    before = process.cpu_times()
    time.sleep(0.5)
    after = process.cpu_times()
    assert (after.user + after.system) - (before.user + before.system) < 0.1


def test_the_arrays_of_a_run_do_not_outlive_it():
    """A helper that waits for its next run holds nothing of the last."""
    torch.set_num_threads(2)
    array = np.zeros(3)
    references = sys.getrefcount(array)
    run(lambda thread, array: None, array)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while sys.getrefcount(array) > references and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sys.getrefcount(array) == references


def test_ctrl_c_ends_a_function_that_is_being_compiled():
    """It is called once, alone: not again to finish a step that has not begun, nor by helpers."""
    calls = []

    def compiling(thread):
        calls.append(thread)
        raise KeyboardInterrupt

    compiling.is_ready = False
    torch.set_num_threads(3)
    with pytest.raises(KeyboardInterrupt):
        run(compiling)
    assert calls == [0]


def test_a_helper_outlives_an_error():
    """What a function raises in one run does not cost the team its helper."""
    torch.set_num_threads(2)
    own, has_helped = team._Team(), threading.Event()

    def fail(thread):
        if thread:
            raise MemoryError

    own.run(fail)
    own.run(lambda thread: has_helped.set() if thread else None)
    assert has_helped.wait(1)


FORK = """
import os, sys, threading
import torch
from streamchat.ops.compiled.team import run

def has_help():
    has_helped = threading.Event()
    run(lambda thread: has_helped.set() if thread else None)
    return has_helped.wait(10)

torch.set_num_threads(2)
if not has_help():
    sys.exit("no help in the parent")
child = os.fork()
if child == 0:
    os._exit(0 if has_help() else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_hires_its_own_helpers():
    """Threads do not survive a fork: the child's first run has help all the same."""
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    subprocess.run(command, timeout=60, check=True)
