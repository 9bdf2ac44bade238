"""What was said in a session, in SQLite: passages, evictions, settings and metadata.

One database for each session: deleting one leaves nothing of it in another's file, a damaged one
costs one session, and two sessions never wait for each other.

Positions in a log never run back. A stream that begins anew within a session counts from 0 again:
its passages are logged with `next_position` of that moment added.
"""

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from streamchat.errors import DamagedError
from streamchat.store.database import connect, transaction, translated
from streamchat.store.words import pieces, spaced

PAGE_ROWS = 256
"""Passages read at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Something that was said, read or answered.

    Attributes:
        role: Who: `user`, `assistant`, `input`, `note`, ….
        text: What.
        created: When it was logged, in seconds since 1970.
        turn: Number of its turn.
        first_position: Position of its first token; None for what is not part of the stream.
        last_position: Position of its last token; one below `first_position` if it has none.
        first_line: Number of its first line in the input.
        last_line: Number of its last line.
        start_time: When it begins in the recording, in seconds.
        end_time: When it ends there.
        speaker: Who speaks, where the input says it.
        id: Given by the log, rising; 0 before.
    """

    role: str
    text: str
    created: float
    turn: int | None = None
    first_position: int | None = None
    last_position: int | None = None
    first_line: int | None = None
    last_line: int | None = None
    start_time: float | None = None
    end_time: float | None = None
    speaker: str | None = None
    id: int = 0


@dataclass(frozen=True, slots=True)
class Eviction:
    """Positions `first_position` to `last_position`, both included, left the window.

    Attributes:
        created: When, in seconds since 1970.
    """

    first_position: int
    last_position: int
    created: float


_COLUMNS = [field.name for field in fields(Passage)]
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM passages"
_NUMBERS: tuple[type, ...] = (int, float)
_KINDS: dict[str, tuple[type, ...]] = {
    "role": (str,),
    "text": (str,),
    "speaker": (str,),
    "created": _NUMBERS,
    "start_time": _NUMBERS,
    "end_time": _NUMBERS,
}
_REQUIRED = ("id", "role", "text", "created")


class Log:
    """The log of a session. May be used from several threads, one at a time gets in.

    Args:
        path: Its file; made if it is not there.
        read_only: Write nothing; the log may then be another process's at the same time.

    Raises:
        DamagedError: If the file is damaged or not one of ours: put it aside. Every method may
            find that out later, too.
        SessionError: If it cannot be opened; and by each method, if the disk does not let it.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._connection = connect(path, read_only=read_only)

    def close(self) -> None:
        """Close the file. Closing twice does nothing."""
        with self.using() as connection:
            connection.close()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def using(self) -> Iterator[sqlite3.Connection]:
        """The connection, for this thread alone; its errors are raised as ours."""
        with self._lock, translated(self.path):
            yield self._connection

    # Passages

    def append(self, passages: Iterable[Passage]) -> list[int]:
        """Add passages, all or none. They are on the disk when this returns.

        Args:
            passages: In the order in which they were said; their `id` is not looked at.

        Returns:
            Their ids.
        """
        with self.using() as connection, transaction(connection):
            return [_insert(connection, passage) for passage in passages]

    def passages(self, *, begin: int = 0) -> Iterator[Passage]:
        """All passages, oldest first.

        Args:
            begin: Id of the first one.
        """
        while True:
            with self.using() as connection:
                query = f"{_SELECT} WHERE id >= ? ORDER BY id LIMIT {PAGE_ROWS}"
                page = [self.passage(row) for row in connection.execute(query, (begin,))]
            yield from page
            if len(page) < PAGE_ROWS:
                return
            begin = page[-1].id + 1

    def get(self, ids: Iterable[int]) -> list[Passage]:
        """Passages by id, in this order; those that are not there are left out."""
        with self.using() as connection:
            rows = (connection.execute(f"{_SELECT} WHERE id = ?", (id_,)).fetchone() for id_ in ids)
            return [self.passage(row) for row in rows if row is not None]

    def newest(self, number: int) -> list[Passage]:
        """The newest passages, so many at most, oldest first."""
        with self.using() as connection:
            query = f"{_SELECT} ORDER BY id DESC LIMIT ?"
            rows = connection.execute(query, (number,)).fetchall()
        return [self.passage(row) for row in reversed(rows)]

    def num_passages(self, role: str | None = None) -> int:
        """How many passages there are, of one role or of all."""
        with self.using() as connection:
            query = "SELECT count(*) FROM passages WHERE ? IS NULL OR role = ?"
            (number,) = connection.execute(query, (role, role)).fetchone()
            return int(number)

    def last_id(self) -> int:
        """Id of the newest passage; 0 if there is none."""
        with self.using() as connection:
            (last,) = connection.execute("SELECT max(id) FROM passages").fetchone()
            return 0 if last is None else int(last)

    def first_of_turn(self, turn: int, begin: int) -> int | None:
        """Id of the first passage of a turn from position `begin` on; None if there is none."""
        with self.using() as connection:
            query = "SELECT min(id) FROM passages WHERE turn = ? AND first_position >= ?"
            (first,) = connection.execute(query, (turn, begin)).fetchone()
            return None if first is None else int(first)

    def next_position(self) -> int:
        """The position after all that are logged."""
        with self.using() as connection:
            (last,) = connection.execute("SELECT max(last_position) FROM passages").fetchone()
            return 0 if last is None else self.checked("last_position", last, int) + 1

    def remove(self, begin: int) -> None:
        """Take back the passages from this id on, as though they had never been said."""
        with self.using() as connection, transaction(connection):
            removed = [
                self.passage(row)
                for row in connection.execute(f"{_SELECT} WHERE id >= ?", (begin,))
            ]
            for passage in removed:
                for piece, chars in self._pieces(connection, passage.id):
                    connection.execute(
                        "INSERT INTO words (words, rowid, text) VALUES ('delete', ?, ?)",
                        (piece, _indexed(passage, chars)),
                    )
            connection.execute("DELETE FROM pieces WHERE passage >= ?", (begin,))
            connection.execute("DELETE FROM passages WHERE id >= ?", (begin,))

    def _pieces(self, connection: sqlite3.Connection, passage: int) -> list[tuple[int, range]]:
        query = "SELECT id, first_char, end_char FROM pieces WHERE passage = ?"
        return [
            (id_, range(self.checked("first_char", a, int), self.checked("end_char", b, int)))
            for id_, a, b in connection.execute(query, (passage,))
        ]

    def passage(self, row: tuple[Any, ...]) -> Passage:
        """A row of `passages` whose columns are a `Passage`'s, checked: SQLite checks no types.

        Raises:
            DamagedError: If a value has another type.
        """
        values = dict(zip(_COLUMNS, row, strict=True))
        for name, value in values.items():
            if value is not None or name in _REQUIRED:
                self.checked(name, value, *_KINDS.get(name, (int,)))
        return Passage(**values)

    def checked(self, name: str, value: Any, *kinds: type) -> Any:
        """A value that was read, if it has one of these types.

        Raises:
            DamagedError: If not.
        """
        if not isinstance(value, kinds):
            raise DamagedError(f"{self.path} is damaged: {name} is {type(value).__name__}")
        return value

    def copy_to(self, path: Path) -> None:
        """Write all of it to a file that is not there yet."""
        with self.using() as connection, closing(connect(path)) as other, translated(path):
            connection.backup(other)

    # What has left the window

    def add_eviction(self, eviction: Eviction) -> None:
        """Note that positions have left the window."""
        row = (eviction.first_position, eviction.last_position, eviction.created)
        with self.using() as connection, transaction(connection):
            connection.execute("INSERT INTO evictions VALUES (?, ?, ?)", row)

    def evictions(self) -> list[Eviction]:
        """All of them, oldest first."""
        with self.using() as connection:
            rows = connection.execute("SELECT * FROM evictions ORDER BY rowid").fetchall()
        return [
            Eviction(
                self.checked("first_position", first, int),
                self.checked("last_position", last, int),
                self.checked("created", created, *_NUMBERS),
            )
            for first, last, created in rows
        ]

    # Settings and metadata

    def settings(self) -> dict[str, Any]:
        """Settings of the session."""
        return self._read("settings")

    def set_settings(self, values: Mapping[str, Any]) -> None:
        """Set some of them; values are whatever JSON can say."""
        self._write("settings", values)

    def metadata(self) -> dict[str, Any]:
        """What else is known of the session: model, system prompt, format of the input, …."""
        return self._read("metadata")

    def set_metadata(self, values: Mapping[str, Any]) -> None:
        """Set some of it; values are whatever JSON can say."""
        self._write("metadata", values)

    def _read(self, table: str) -> dict[str, Any]:
        with self.using() as connection:
            rows = connection.execute(f"SELECT name, value FROM {table}").fetchall()
        try:
            return {
                self.checked("name", name, str): json.loads(self.checked("value", value, str))
                for name, value in rows
            }
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{self.path} is damaged: {table}: {error}") from error

    def _write(self, table: str, values: Mapping[str, Any]) -> None:
        rows = [(name, json.dumps(value)) for name, value in values.items()]
        with self.using() as connection, transaction(connection):
            connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", rows)


def _insert(connection: sqlite3.Connection, passage: Passage) -> int:
    """Add one passage and the pieces that it is found by."""
    passage = replace(
        passage,
        text=storable(passage.text),
        speaker=None if passage.speaker is None else storable(passage.speaker),
    )
    names = [name for name in _COLUMNS if name != "id"]
    marks = ", ".join("?" for _ in names)
    done = connection.execute(
        f"INSERT INTO passages ({', '.join(names)}) VALUES ({marks})",
        [getattr(passage, name) for name in names],
    )
    id_ = int(done.lastrowid or 0)
    for chars in pieces(passage.text):
        done = connection.execute(
            "INSERT INTO pieces (passage, first_char, end_char, first_position, last_position)"
            " VALUES (?, ?, ?, ?, ?)",
            (id_, chars.start, chars.stop, *_positions(passage, chars)),
        )
        connection.execute(
            "INSERT INTO words (rowid, text) VALUES (?, ?)",
            (done.lastrowid, _indexed(passage, chars)),
        )
    return id_


def _positions(passage: Passage, chars: range) -> tuple[int | None, int | None]:
    """Positions of a piece's tokens, as though all its passage's were equally long."""
    first, last = passage.first_position, passage.last_position
    if first is None or last is None or not passage.text:
        return first, last
    num_tokens, num_chars = last + 1 - first, len(passage.text)
    begin = first + num_tokens * chars.start // num_chars
    end = first + -(-num_tokens * chars.stop // num_chars)
    return begin, end - 1


def _indexed(passage: Passage, chars: range) -> str:
    """What a piece is found by: its words, and who says them."""
    text = passage.text[chars.start : chars.stop]
    return spaced(f"{passage.speaker} {text}" if passage.speaker else text)


def storable(text: str) -> str:
    """Without lone surrogates, which are no characters: UTF-8 has no bytes for them."""
    return text.encode("utf-8", "replace").decode("utf-8")
