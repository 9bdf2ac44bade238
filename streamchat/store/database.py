"""The database of one session: its tables, and how it is opened without trusting the file.

Whatever is wrong ends in an error of ours. What comes from elsewhere is refused: another
application's file, one with other tables, and above all one with triggers or views, which are code.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamchat.errors import DamagedError, SessionError
from streamchat.store.files import make_private_file, told

APPLICATION_ID = 0x73747263
"""Tells our databases from others', see SQLite's `application_id`: "strc"."""

VERSION = 1
"""Of the tables; SQLite's `user_version`."""

TABLES = {
    "passages": """CREATE TABLE passages (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        role TEXT NOT NULL,
        text TEXT NOT NULL,
        created REAL NOT NULL,
        turn INTEGER,
        first_position INTEGER,
        last_position INTEGER,
        first_line INTEGER,
        last_line INTEGER,
        start_time REAL,
        end_time REAL,
        speaker TEXT
    )""",
    "pieces": """CREATE TABLE pieces (
        id INTEGER PRIMARY KEY,
        passage INTEGER NOT NULL,
        first_char INTEGER NOT NULL,
        end_char INTEGER NOT NULL,
        first_position INTEGER,
        last_position INTEGER
    )""",
    # Words alone: the text is in `passages`, and is not stored twice.
    "words": """CREATE VIRTUAL TABLE words USING fts5(
        text, content='', tokenize='porter unicode61 remove_diacritics 2'
    )""",
    "evictions": """CREATE TABLE evictions (
        first_position INTEGER NOT NULL,
        last_position INTEGER NOT NULL,
        created REAL NOT NULL
    )""",
    "settings": "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "metadata": "CREATE TABLE metadata (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
}
INDEXES = {"pieces_of": "CREATE INDEX pieces_of ON pieces (passage)"}
OBJECTS = TABLES | INDEXES

OWN_TO_SQLITE = ("sqlite_", "words_")
"""How the names of tables begin that SQLite makes itself."""

# For one connection only, and in memory: how often words occur, and what a question's words are.
TEMPORARY = (
    "CREATE VIRTUAL TABLE temp.frequencies USING fts5vocab('main', 'words', 'row')",
    """CREATE VIRTUAL TABLE temp.asked USING fts5(
        text, tokenize='porter unicode61 remove_diacritics 2'
    )""",
    "CREATE VIRTUAL TABLE temp.asked_terms USING fts5vocab('temp', 'asked', 'instance')",
)

# What SQLite says where the file is not to blame.
_OUTER_REASONS = (
    *("disk is full", "disk I/O error", "readonly", "unable to open", "locked", "out of memory"),
    "no such module",
)

CHECKED_BYTES = 1 << 26
"""Files up to this size are checked whole when they are opened."""

BUSY_SECONDS = 10.0


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a session's database; make it if it is not there.

    Args:
        path: The file.
        read_only: Write nothing; then it may be open in another process, and must be there.

    Raises:
        DamagedError: If the file is not one of ours, or damaged: put it aside.
        SessionError: If it cannot be opened.
    """
    with told(f"cannot open the log {path}"):
        if read_only:
            path.stat()
        else:
            make_private_file(path)
    with translated(path):
        connection = _opened(path, read_only=read_only)
        try:
            if path.stat().st_size and not _number(connection, "page_count"):
                # SQLite would take what is shorter than its header for a new database.
                raise DamagedError(f"{path} is damaged: file is not a database")
            if not read_only:
                # A commit is on the disk when it returns, so that a power cut does not undo it.
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute("PRAGMA secure_delete = ON")
                _make_tables(connection)
            _check(connection, path)
            for statement in TEMPORARY:
                connection.execute(statement)
        except BaseException:
            connection.close()
            raise
        return connection


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as ours; those that only a fault of the program can cause stay.

    Raises:
        DamagedError: If the file is to blame.
        SessionError: If the disk, its permissions, or another process is.
    """
    try:
        yield
    except (sqlite3.ProgrammingError, sqlite3.InterfaceError):
        raise
    except (sqlite3.Error, UnicodeDecodeError) as error:  # Python decodes names and messages
        if any(reason in str(error) for reason in _OUTER_REASONS):
            raise SessionError(f"cannot use the log {path}: {error}") from error
        raise DamagedError(f"{path} is damaged: {error}") from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is done in the block, or nothing of it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # some errors have already rolled it back
            connection.execute("ROLLBACK")
        raise


def _opened(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """A connection that does not trust what it opens."""
    uri = path.absolute().as_uri()
    if read_only:
        # In a folder that cannot be written only a log without a journal beside it can be read.
        has_journal = path.with_name(f"{path.name}-wal").exists()
        uri += "?mode=ro" if has_journal or _is_writable(path.parent) else "?mode=ro&immutable=1"
    connection = sqlite3.connect(
        uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "temp_store = MEMORY"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _is_writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _make_tables(connection: sqlite3.Connection) -> None:
    if _number(connection, "application_id") or _objects(connection):
        return
    with transaction(connection):
        for statement in OBJECTS.values():
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is not a database of ours."""
    if _number(connection, "application_id") != APPLICATION_ID:
        raise DamagedError(f"{path} is not a log of streamchat")
    version = _number(connection, "user_version")
    if version != VERSION:
        raise DamagedError(
            f"{path} has format {version}, this version of streamchat reads {VERSION}"
        )
    objects = _objects(connection)
    for name, (kind, sql) in objects.items():
        expected = OBJECTS.get(str(name))
        is_ours = sql == expected if expected else str(name).startswith(OWN_TO_SQLITE)
        if not is_ours or kind not in ("table", "index"):
            raise DamagedError(f"{path} is not a log of streamchat: it has a {kind} {name!r}")
    if missing := OBJECTS.keys() - objects.keys():
        raise DamagedError(f"{path} is not a log of streamchat: it has no {min(missing)}")
    if path.stat().st_size <= CHECKED_BYTES:
        (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if result != "ok":
            raise DamagedError(f"{path} is damaged: {' '.join(str(result).split())}")


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    (number,) = connection.execute(f"PRAGMA {pragma}").fetchone()
    return int(number)


def _objects(connection: sqlite3.Connection) -> dict[object, tuple[object, object]]:
    rows = connection.execute("SELECT name, type, sql FROM sqlite_master")
    return {name: (kind, sql) for name, kind, sql in rows}
