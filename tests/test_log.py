"""The log of a session: what goes in comes out, or an error of ours says why not.

The oracle for what is held is a plain list of passages.
"""

import os
import sqlite3
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from damage import EDITS, damaged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_folder import needs_permissions, unprivileged  # noqa: F401 - a fixture

import streamchat
from streamchat.errors import DamagedError, SessionError
from streamchat.store import database
from streamchat.store.files import put_aside
from streamchat.store.log import Eviction, Log, Passage
from streamchat.store.recall import search
from streamchat.store.words import PIECE_CHARS

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(streamchat.__file__).parents[1])}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.sqlite"


def said(text, position=0, **more):
    more = {"role": "user", "created": 1.5, **more}
    return Passage(text=text, first_position=position, last_position=position + 3, **more)


def contents(log):
    """All that a log can be asked for, by every method that reads."""
    found = [search(log, word) for word in ("ship", "harbour", "w1 w2")]
    return (
        *(list(log.passages()), log.num_passages(), log.next_position(), log.evictions()),
        *(log.settings(), log.metadata(), found),
    )


FULL = Passage(
    role="input",
    text="The ship left.\nIt was late.",
    created=1_800_000_000.25,
    turn=3,
    first_position=17,
    last_position=24,
    first_line=5,
    last_line=6,
    start_time=61.5,
    end_time=64.0,
    speaker="Zo\xeb",
)

NUMBERS = st.none() | st.integers(0, 2**62)
TIMES = st.none() | st.floats(0, 1e12)
PASSAGES = st.builds(
    Passage,
    role=st.sampled_from(["user", "assistant", "input"]),
    text=st.text(max_size=30) | st.text(min_size=1, max_size=5).map(lambda t: t * 400),
    created=st.floats(0, 1e12),
    turn=NUMBERS,
    first_line=NUMBERS,
    last_line=NUMBERS,
    start_time=TIMES,
    end_time=TIMES,
    speaker=st.none() | st.text(max_size=8),
)


# What goes in comes out


def test_a_passage_comes_back_with_all_that_was_known_of_it(path):
    """From the next process as well: all is in the file."""
    with Log(path) as log:
        (id_,) = log.append([FULL])
    with Log(path) as log:
        assert list(log.passages()) == [replace(FULL, id=id_)]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(PASSAGES, max_size=4), max_size=4), data=st.data())
def test_a_log_is_the_list_of_what_was_said_and_not_taken_back(tmp_path, batches, data):
    """Any text, NUL and surrogates included, whatever is taken back in between.

    A passage that was taken back is not found by its words either: the index is whole.
    """
    path = tmp_path / "any.sqlite"
    path.unlink(missing_ok=True)
    expected = {}
    with Log(path) as log:
        for batch in batches:
            ids = log.append(batch)
            assert all(id_ > max(expected, default=0) for id_ in ids)
            for id_, passage in zip(ids, batch, strict=True):
                expected[id_] = replace(passage, id=id_)
            if expected and data.draw(st.booleans()):
                begin = data.draw(st.sampled_from(sorted(expected)))
                log.remove(begin)
                expected = {id_: p for id_, p in expected.items() if id_ < begin}
        assert list(log.passages()) == list(expected.values())
        assert log.num_passages() == len(expected)
        with log.using() as connection:
            connection.execute("INSERT INTO words (words) VALUES ('integrity-check')")
            (indexed,) = connection.execute("SELECT count(*) FROM words").fetchone()
            (pieces,) = connection.execute("SELECT count(*) FROM pieces").fetchone()
            assert indexed == pieces >= len(expected)


def test_what_is_no_character_is_stored_as_the_replacement(path):
    """A lone surrogate, from bytes on a command line, has no UTF-8."""
    with Log(path) as log:
        log.append([said("a\udcffb", speaker="\ud800")])
        (passage,) = log.passages()
        assert (passage.text, passage.speaker) == ("a?b", "?")


def test_passages_are_read_in_pages_from_any_one_on(path, monkeypatch):
    """The same list at every page size, also where a page ends exactly at the end."""
    with Log(path) as log:
        ids = log.append([said(f"line {n}") for n in range(12)])
        for rows in (1, 5, 6, 12, 256):
            monkeypatch.setattr("streamchat.store.log.PAGE_ROWS", rows)
            assert [p.text for p in log.passages()] == [f"line {n}" for n in range(12)]
            assert [p.id for p in log.passages(begin=ids[7])] == ids[7:]
        assert [p.id for p in log.get([ids[4], 999, ids[2]])] == [ids[4], ids[2]]


def test_ids_of_passages_that_were_taken_back_are_not_given_again(path):
    """What has been told about one must not become true of another."""
    with Log(path) as log:
        first, second = log.append([said("one"), said("two")])
        log.remove(second)
    with Log(path) as log:
        (third,) = log.append([said("three")])
        assert third > second
        assert [p.id for p in log.passages()] == [first, third]


def test_a_batch_is_there_whole_or_not_at_all(path):
    """A passage that cannot be stored takes its batch with it, and nothing before."""
    with Log(path) as log:
        log.append([said("kept")])
        # Which of the two depends on the version of Python.
        with pytest.raises((sqlite3.ProgrammingError, sqlite3.InterfaceError)):
            log.append([said("lost"), said("bad", turn=[])])
        assert [p.text for p in log.passages()] == ["kept"]
        assert search(log, "lost") == []
        log.append([said("after")])
        assert [p.text for p in log.passages()] == ["kept", "after"]


def test_positions_run_on(path):
    """The next free one is behind all that are logged, also behind a passage without tokens."""
    with Log(path) as log:
        assert log.next_position() == 0
        log.append([said("note", turn=1), Passage(role="note", text="aside", created=0.0)])
        assert log.next_position() == 4
        log.append([Passage(role="a", text="", created=0, first_position=4, last_position=3)])
        assert log.next_position() == 4


def test_settings_metadata_and_evictions(path):
    """Later values replace earlier ones, name by name; the two tables are apart."""
    with Log(path) as log:
        log.set_settings({"temperature": 0.5, "stop": ["\n", "\xe9"]})
        log.set_settings({"temperature": None})
        log.set_metadata({"temperature": {"deep": [1, 2]}})
        log.add_eviction(Eviction(4, 90, 1.0))
        log.add_eviction(Eviction(91, 91, 2.5))
    with Log(path) as log:
        assert log.settings() == {"temperature": None, "stop": ["\n", "\xe9"]}
        assert log.metadata() == {"temperature": {"deep": [1, 2]}}
        assert log.evictions() == [Eviction(4, 90, 1.0), Eviction(91, 91, 2.5)]


# Threads and processes


def test_several_threads_may_use_one_log(path):
    """One writes while another searches: nothing is lost, mixed or refused."""
    with Log(path) as log:
        failures = []

        def write(name):
            try:
                for n in range(30):
                    log.append([said(f"{name} ship {n}")])
                    search(log, "ship")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        texts = [p.text for p in log.passages()]
        for name in "abc":
            assert [t for t in texts if t.startswith(name)] == [
                f"{name} ship {n}" for n in range(30)
            ]


def test_a_log_can_be_read_while_another_writes_it(path):
    """A reader sees what has been committed, and cannot write."""
    with Log(path) as writer:
        writer.append([said("the ship")])
        with Log(path, read_only=True) as reader:
            writer.append([said("the harbour")])
            assert contents(reader) == contents(writer)
            with pytest.raises(SessionError, match="readonly"):
                reader.append([said("mine")])


def test_reading_makes_no_log(path):
    """A log that is not there is an error for a reader."""
    with pytest.raises(SessionError, match="cannot open the log"):
        Log(path, read_only=True)
    assert not path.exists()


WRITER = """
import itertools, sys
from pathlib import Path
from streamchat.store.log import Log, Passage
with Log(Path(sys.argv[1])) as log:
    for n in itertools.count(log.num_passages() // 2):
        log.append(Passage(role="user", text=f"w{n} {half}", created=0.0) for half in (1, 2))
        print(n, flush=True)
"""


def test_a_killed_process_loses_nothing_that_it_was_told_is_there(path, tmp_path):
    """`kill -9` while it writes, six times: no batch is halved, none that was acknowledged gone."""
    last = -1
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(20):
            last = int(process.stdout.readline())
        process.kill()
        rest, _ = process.communicate()
        last = max([last, *map(int, rest.splitlines()[:-1])])
        with Log(path, read_only=True) as log:
            numbers = [p.text for p in log.passages()]
        assert len(numbers) % 2 == 0
        assert len(numbers) // 2 > last
        assert numbers == [f"w{n} {half}" for n in range(len(numbers) // 2) for half in (1, 2)]
    with Log(path) as log:
        log.append([said("and on")])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


# Disks


@needs_permissions
def test_a_log_and_its_journals_are_the_owners_alone(path, tmp_path):
    """0600, whatever the umask."""
    before = os.umask(0)
    try:
        with Log(path) as log:
            log.append([said("secret")])
            modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(["log.sqlite", "log.sqlite-wal", "log.sqlite-shm"], 0o600)


def test_what_was_taken_back_is_overwritten(path):
    """Its text is not left in the free space of the file."""
    with Log(path) as log:
        (id_,) = log.append([said("xyzzyplugh " * 900)])
        log.remove(id_)
    assert b"xyzzyplugh xyzzyplugh" not in path.read_bytes()


def test_a_folder_that_cannot_be_written_can_be_read(unprivileged):  # noqa: F811 - the fixture
    """A log that was closed well is shown; writing to it is one line."""
    path = unprivileged / "log.sqlite"
    with Log(path) as log:
        log.append([said("the ship")])
        expected = contents(log)
    path.chmod(0o400)
    unprivileged.chmod(0o500)
    try:
        with Log(path, read_only=True) as log:
            assert contents(log) == expected
        with pytest.raises(
            SessionError, match=r"cannot open the log .*: Permission denied"
        ) as error:
            Log(path)
        assert not isinstance(error.value, DamagedError)
    finally:
        unprivileged.chmod(0o700)


@pytest.fixture
def small_disk():
    """Files cannot grow beyond so many bytes."""
    resource = pytest.importorskip("resource", reason="no limit on file sizes here")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_what_no_longer_fits_and_no_more(path, small_disk):
    """One line; what was there before is there still, and with room again it goes on."""
    with Log(path) as log:
        log.append([said("the ship")])
        num_written = 1

        def fill():
            nonlocal num_written
            while True:
                log.append([said("x " * 1000)])
                num_written += 1

        small_disk(200_000)
        with pytest.raises(SessionError, match=r"cannot use the log .*disk") as error:
            fill()
        assert not isinstance(error.value, DamagedError)
        small_disk(1 << 30)
        assert num_written > 1
        assert log.num_passages() == num_written
        log.append([said("the harbour")])
    with Log(path) as log:
        assert log.num_passages() == num_written + 1
        assert [r.passage.text for r in search(log, "harbour")] == ["the harbour"]


def test_a_disk_that_is_full_from_the_start_is_one_line(path, small_disk):
    """No table can be made; with room again, it can."""
    small_disk(100)
    with pytest.raises(SessionError, match="disk") as error:
        Log(path)
    assert not isinstance(error.value, DamagedError)
    small_disk(1 << 30)
    Log(path).close()


# Files that are not what they should be


@pytest.fixture
def whole(tmp_path):
    """A log with a little of everything."""
    path = tmp_path / "whole.sqlite"
    with Log(path) as log:
        log.append([FULL, said("w1 w2 harbour", 30), said("long ship " * PIECE_CHARS, 40)])
        log.set_settings({"seed": 1})
        log.set_metadata({"model": "tiny"})
        log.add_eviction(Eviction(1, 2, 3.0))
    return path


def other_database(path, *statements):
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[: len(data) // 2], "is damaged"),
        (lambda data: data[:50], "is damaged"),
        (lambda data: bytes(len(data)), "is damaged: file is not a database"),
        (lambda data: b"PK\x03\x04" + data[4:], "is damaged: file is not a database"),
        (lambda data: data[:4096] + bytes(4096) + data[8192:], "is damaged"),
    ],
    ids=["halved", "a stump", "zeroed", "another format", "a page zeroed"],
)
def test_damaged_files_are_refused_and_left_as_they_are(path, whole, damage, reason):
    """With the reason, for reading and writing; put aside, they make place for a new log."""
    data = damage(whole.read_bytes())
    path.write_bytes(data)
    for read_only in (True, False):
        with pytest.raises(DamagedError, match=reason):
            Log(path, read_only=read_only)
    assert put_aside(path).read_bytes() == data
    with Log(path) as log:
        assert log.num_passages() == 0


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("PRAGMA application_id = 7", "is not a log of streamchat"),
        ("PRAGMA user_version = 2", "has format 2, this version of streamchat reads 1"),
        ("CREATE TRIGGER t AFTER INSERT ON passages BEGIN DELETE FROM passages; END", "a trigger"),
        ("CREATE VIEW v AS SELECT * FROM passages", "it has a view 'v'"),
        ("CREATE TABLE more (x)", "it has a table 'more'"),
        ("ALTER TABLE passages ADD COLUMN more", "it has a table 'passages'"),
        ("DROP TABLE settings", "it has no settings"),
        ("CREATE TRIGGER words_t AFTER INSERT ON pieces BEGIN SELECT 1; END", "a trigger"),
    ],
)
def test_foreign_and_hostile_databases_are_refused(path, whole, statement, reason):
    """What has other tables is not ours, and triggers and views would be run by using it."""
    path.write_bytes(whole.read_bytes())
    other_database(path, statement)
    with pytest.raises(DamagedError, match=reason):
        Log(path)


def test_another_applications_database_is_refused_untouched(path):
    """It is not taken for an empty log, and gets no tables."""
    other_database(path, "CREATE TABLE bookmarks (url)")
    before = path.read_bytes()
    with pytest.raises(DamagedError, match="is not a log of streamchat"):
        Log(path)
    assert b"passages" not in path.read_bytes()
    assert len(path.read_bytes()) == len(before)


@pytest.mark.parametrize(
    ("statement", "read"),
    [
        ("UPDATE passages SET text = x'00ff'", lambda log: list(log.passages())),
        ("UPDATE passages SET turn = 'one'", lambda log: list(log.passages())),
        ("UPDATE passages SET text = CAST(x'ff' AS TEXT)", lambda log: list(log.passages())),
        ("UPDATE passages SET last_position = 'z'", lambda log: log.next_position()),
        ("UPDATE passages SET created = 'now'", lambda log: log.get([1])),
        ("UPDATE pieces SET first_char = 'z'", lambda log: search(log, "ship")),
        ("UPDATE pieces SET first_char = 'z'", lambda log: log.remove(1)),
        ("UPDATE settings SET value = '{'", lambda log: log.settings()),
        ("UPDATE settings SET value = x'7b7d'", lambda log: log.settings()),
        ("UPDATE metadata SET value = replace(hex(zeroblob(50000)), '00', '[')", Log.metadata),
        ("UPDATE evictions SET created = 'x'", lambda log: log.evictions()),
        ("DELETE FROM words_data", lambda log: search(log, "ship")),
        ("UPDATE words_data SET block = x'ffffffff'", lambda log: log.append([FULL])),
    ],
)
def test_values_that_no_log_of_ours_holds_are_damage(path, whole, statement, read):
    """SQLite lets any value into any column: what is read is checked."""
    path.write_bytes(whole.read_bytes())
    other_database(path, statement)
    with Log(path) as log, pytest.raises(DamagedError):
        read(log)


def test_a_fault_of_the_program_is_not_taken_for_a_damaged_file(path):
    """Using a closed log must not put a healthy file aside."""
    log = Log(path)
    log.close()
    log.close()
    with pytest.raises(sqlite3.ProgrammingError):
        log.num_passages()


def test_sqlite_without_full_text_search_is_no_damage(path, monkeypatch):
    """A Python whose SQLite lacks FTS5 is told so."""
    monkeypatch.setitem(database.OBJECTS, "words", "CREATE VIRTUAL TABLE words USING fts6(text)")
    with pytest.raises(SessionError, match="no such module") as error:
        Log(path)
    assert not isinstance(error.value, DamagedError)


def check_damaged_log(tmp_path, whole, edits):
    """Either all of it can be used, or one of our errors says why not. Nothing else happens."""
    path = tmp_path / "fuzzed.sqlite"
    for old in tmp_path.glob("fuzzed.sqlite*"):
        old.unlink()
    path.write_bytes(damaged(whole.read_bytes(), edits))
    for read_only in (True, False):
        try:
            with Log(path, read_only=read_only) as log:
                contents(log)
                if not read_only:
                    (id_,) = log.append([said("the ship again")])
                    log.remove(id_ - 1)
                    log.set_settings({"a": 1})
                    log.add_eviction(Eviction(1, 2, 3.0))
                    contents(log)
        except SessionError:
            pass


FUZZ = {"suppress_health_check": list(HealthCheck), "deadline": None}


@settings(max_examples=100, **FUZZ)
@given(edits=EDITS)
def test_a_damaged_log_raises_nothing_but_our_errors(tmp_path, whole, edits):
    """Flipped, zeroed, cut, stretched."""
    check_damaged_log(tmp_path, whole, edits)


@pytest.mark.slow
@settings(max_examples=2000, **FUZZ)
@given(edits=EDITS)
def test_a_damaged_log_raises_nothing_but_our_errors_at_length(tmp_path, whole, edits):
    """The same for a minute."""
    check_damaged_log(tmp_path, whole, edits)
