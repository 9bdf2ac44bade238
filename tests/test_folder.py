"""Where sessions live: names, permissions, one process at a time, and nothing left behind."""

import os
import stat
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamchat
from streamchat.errors import SessionError, SessionInUseError, UsageError
from streamchat.store import files
from streamchat.store.folder import FOLDER_VARIABLE, MAX_NAME_BYTES, Sessions, checked_name

needs_permissions = pytest.mark.skipif(os.name == "nt", reason="Windows has no permission bits")

HOLDER = """
import sys
from pathlib import Path
from streamchat.store.folder import Sessions
with Sessions(Path(sys.argv[1])).open(sys.argv[2]):
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def sessions(tmp_path):
    return Sessions(tmp_path / "data")


@pytest.fixture
def holder(tmp_path):
    """Starts another process that holds a session open until its input ends."""
    held = []

    def hold(name):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path / "data"), name],
            env={**os.environ, "PYTHONPATH": str(Path(streamchat.__file__).parents[1])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        held.append(process)
        assert process.stdout.readline() == "open\n"
        return process

    yield hold
    for process in held:
        process.kill()
        process.communicate()


@pytest.fixture
def unprivileged(tmp_path_factory):
    """A folder, and no right to write where its mode forbids it: root could."""
    folder = tmp_path_factory.mktemp("unprivileged")
    if os.name == "nt":
        pytest.skip("Windows has no permission bits")
    if os.geteuid():
        yield folder
        return
    nobody = 65534
    above = [folder.parent, folder.parent.parent]
    modes = [path.stat().st_mode for path in above]
    for path in above:
        path.chmod(0o755)
    os.chown(folder, nobody, nobody)
    os.seteuid(nobody)
    yield folder
    os.seteuid(0)
    for path, mode in zip(above, modes, strict=True):
        path.chmod(mode)


def everything(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# Names


@pytest.mark.parametrize("name", ["tea", "T-1_b.c", "2026-11-30-1118", "caf\xe9", "会議", "a" * 64])
def test_ordinary_names_are_names(name):
    """Letters of any script and digits; a dot, hyphen or underscore inside."""
    assert checked_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *["", ".", "..", ".hidden", "-x", "a/b", "../a", "/etc", "a\\b", "C:", "a\0b", "a\nb"],
        *["a b", "~", "CON", "con.txt", "nul", "COM1", "lpt9.x", "end.", "\udcff", "a" * 65],
        *["\u4f1a" * 22, "a\u202eb", "\u2024\u2024"],
    ],
)
def test_names_that_could_lead_elsewhere_are_refused(name, sessions):
    """No path, device, hidden file or control character; and nothing is written for one."""
    with pytest.raises(UsageError, match="a session's name"):
        sessions.open(name)
    with pytest.raises(UsageError, match="a session's name"):
        sessions.find(name)
    assert not sessions.folder.exists()


@given(st.text(max_size=70))
def test_whatever_is_a_name_is_one_file_name(name):
    """A name is one component of a path, short enough for every file system; or it is refused."""
    try:
        checked = checked_name(name)
    except UsageError:
        return
    assert Path(checked).parts == (checked,)
    assert not checked.startswith(".")
    assert len(checked.encode()) <= MAX_NAME_BYTES
    assert checked_name(checked) == checked


def test_two_spellings_of_one_name_are_one_session(sessions):
    """A letter with its accent apart is the same letter."""
    with sessions.open("cafe\u0301") as session:
        assert session.name == "caf\xe9"
    assert sessions.names() == ["caf\xe9"]


def test_a_new_name_is_one_that_nobody_has(sessions):
    """Date and time, and a number from the second of a minute on."""
    now = datetime(2026, 11, 30, 9, 5)
    names = []
    for _ in range(3):
        names.append(sessions.new_name(now))
        sessions.open(names[-1]).close()
    assert names == ["2026-11-30-0905", "2026-11-30-0905-2", "2026-11-30-0905-3"]


# Places


def test_the_environment_chooses_another_place(tmp_path, monkeypatch):
    """STREAMCHAT_DATA wins over the user's data directory, and an empty one counts for nothing."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "here"))
    assert Sessions().folder == tmp_path / "here" / "sessions"
    monkeypatch.setenv(FOLDER_VARIABLE, "~/there")
    assert Sessions().folder == Path.home() / "there" / "sessions"
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    monkeypatch.setattr(
        "streamchat.store.folder.user_data_path", lambda name, appauthor: tmp_path / name
    )
    assert Sessions().folder == tmp_path / "streamchat" / "sessions"


def test_looking_writes_nothing(sessions, tmp_path):
    """Without a session opened, no folder is made."""
    assert sessions.names() == []
    assert sessions.infos() == []
    sessions.new_name(datetime(2026, 1, 1))
    with pytest.raises(UsageError, match="there is no session 'tea'"):
        sessions.find("tea")
    with pytest.raises(UsageError, match="there is no session 'tea'"):
        sessions.delete("tea")
    assert everything(tmp_path) == []


@needs_permissions
def test_folders_and_locks_are_the_owners_alone(sessions):
    """0700 and 0600, whatever the umask; also where a folder was there before."""
    before = os.umask(0)
    try:
        sessions.folder.mkdir(parents=True, mode=0o755)
        with sessions.open("tea") as session:
            modes = {
                path: stat.S_IMODE(path.stat().st_mode)
                for path in (sessions.folder, *sessions.folder.rglob("*"))
            }
    finally:
        os.umask(before)
    assert session.folder in modes
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items())


def test_the_last_used_session_is_listed_first(sessions):
    """By when log or state were written, not by when somebody looked in."""
    for name, used in (("old", 1000), ("new", 3000), ("middle", 2000)):
        with sessions.open(name) as session:
            session.state_path.write_bytes(b"12345")
            os.utime(session.state_path, (used, used))
    sessions.open("old").close()
    assert [(i.name, i.used) for i in sessions.infos()] == [
        ("new", 3000),
        ("middle", 2000),
        ("old", 1000),
    ]
    assert all(info.num_bytes >= 5 for info in sessions.infos())


# One at a time


def test_a_second_process_is_refused(sessions, holder):
    """In one line with the name, for opening and deleting; other sessions stay free."""
    other = holder("tea")
    for refused in (sessions.open, sessions.delete):
        with pytest.raises(SessionInUseError, match="session tea is in use by another process"):
            refused("tea")
    with sessions.open("coffee"):
        pass
    assert sessions.find("tea").is_dir()
    other.communicate("")
    with sessions.open("tea"):
        pass


def test_a_killed_process_locks_nobody_out(sessions, holder):
    """The lock goes with the process, not with a file that it left."""
    other = holder("tea")
    other.kill()
    other.wait()
    with sessions.open("tea") as session:
        assert session.folder.is_dir()


def test_the_same_process_is_refused_too(sessions):
    """Two chats in one interpreter do not share a session; a closed one is free again."""
    session = sessions.open("tea")
    with pytest.raises(SessionInUseError):
        sessions.open("tea")
    session.close()
    session.close()
    sessions.open("tea").close()


# Deleting and cleaning


def test_a_deleted_session_is_wholly_gone(sessions):
    """Nothing with its name or contents is left, and a new one of that name starts empty."""
    with sessions.open("tea") as session:
        session.log_path.write_text("secret")
        session.log_path.with_name("log.sqlite.damaged-1").write_text("secret")
    sessions.delete("tea")
    assert everything(sessions.folder) == [".lock"]
    with sessions.open("tea") as session:
        assert everything(session.folder) == ["lock"]


def test_what_a_killed_deletion_has_left_goes_with_the_next_opening(sessions):
    """A folder on its way out is no session, and is removed."""
    sessions.open("tea").close()
    left = sessions.folder / ".gone-abc" / "coffee"
    left.mkdir(parents=True)
    (left / "log.sqlite").write_text("secret")
    assert sessions.names() == ["tea"]
    sessions.open("tea").close()
    assert sorted(path.name for path in sessions.folder.iterdir()) == [".lock", "tea"]


def test_what_a_crash_has_left_half_written_goes_when_the_session_is_opened(sessions):
    """Temporary folders are removed; whole and damaged files stay."""
    with sessions.open("tea") as session:
        (session.folder / "state.safetensors.x1y2.tmp").mkdir()
        (session.folder / "state.safetensors.x1y2.tmp" / "half").write_text("half")
        session.state_path.write_text("whole")
        files.put_aside(session.state_path)
    sessions.open("tea").close()
    assert everything(session.folder) == ["lock", "state.safetensors.damaged-1"]


def test_a_folder_that_cannot_be_written_is_one_line(unprivileged):
    """The system's reason and the folder; sessions can still be listed and read."""
    with Sessions(unprivileged).open("tea"):
        pass
    folder = unprivileged / "sessions"
    folder.chmod(0o500)
    (folder / "tea").chmod(0o500)
    try:
        sessions = Sessions(unprivileged)
        with pytest.raises(SessionError, match=r"cannot open session coffee in .*Permission"):
            sessions.open("coffee")
        with pytest.raises(SessionError, match="cannot delete session tea: Permission"):
            sessions.delete("tea")
        assert sessions.names() == ["tea"]
        assert sessions.find("tea") == folder / "tea"
    finally:
        folder.chmod(0o700)
        (folder / "tea").chmod(0o700)


def test_a_file_where_the_folder_should_be_is_one_line(tmp_path):
    """As for any other place that nothing can be written to."""
    (tmp_path / "data").write_text("")
    with pytest.raises(SessionError, match="cannot open session tea"):
        Sessions(tmp_path / "data").open("tea")


# Files


def test_damaged_files_are_put_aside_under_the_next_free_number(tmp_path):
    """With a database go its journals, so that a new one never meets them."""
    path = tmp_path / "log.sqlite"
    for number in (1, 2):
        path.write_text(f"bad {number}")
        path.with_name("log.sqlite-wal").write_text("journal")
        assert files.put_aside(path) == tmp_path / f"log.sqlite.damaged-{number}"
    assert everything(tmp_path) == [
        "log.sqlite.damaged-1",
        "log.sqlite.damaged-1-wal",
        "log.sqlite.damaged-2",
        "log.sqlite.damaged-2-wal",
    ]
    assert (tmp_path / "log.sqlite.damaged-2").read_text() == "bad 2"


def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    """Write, flush the file, move it, flush the folder: any other order loses to a power cut."""
    steps = []
    original, replace = files.sync, Path.replace
    monkeypatch.setattr(
        files, "sync", lambda path: (steps.append(("sync", path.name)), original(path))
    )
    monkeypatch.setattr(
        Path, "replace", lambda p, to: (steps.append(("move", to.name)), replace(p, to))[1]
    )
    with files.replacing(tmp_path / "state") as draft:
        draft.write_text("new")
    assert steps == [("sync", "state"), ("move", "state"), ("sync", tmp_path.name)]
    assert everything(tmp_path) == ["state"]


@pytest.mark.parametrize("step", ["sync", "make_private"])
def test_a_failure_before_the_move_leaves_the_old_file(tmp_path, monkeypatch, step):
    """And no temporary one."""
    path = tmp_path / "state"
    path.write_text("old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, step, fail)
    with (
        pytest.raises(SessionError, match="cannot save: No space left on device"),
        files.told("cannot save"),
        files.replacing(path) as draft,
    ):
        draft.write_text("new")
    assert everything(tmp_path) == ["state"]
    assert path.read_text() == "old"
