"""Recall by meaning: vectors of what was said, and the ranking that they and words make together.

What makes a vector of a text is given, see `Embedder`; here are numbers and a file. The file holds
nothing that the log does not: one that is missing, damaged or of another model is made again.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from streamchat.errors import SessionError
from streamchat.store.files import replacing, told
from streamchat.store.log import Log, storable
from streamchat.store.recall import FINDABLE, Recalled, search

FILE_NAME = "vectors.safetensors"
FORMAT = "streamchat-vectors"
VERSION = "1"

MAX_NEW = 2048
"""Pieces that are embedded in one search, oldest first; the next search goes on."""

SAVE_EVERY = 256
"""New vectors that are worth writing the file; fewer are made again by the next run."""

DEPTH = 60
"""Pieces of each ranking that are merged."""

RANK_OFFSET = 60
"""The constant k of reciprocal rank fusion, as in the paper."""

MIN_COSINE = 0.3
"""What is less alike is not found: something is always nearest, if only by chance."""


class Embedder(Protocol):
    """Makes vectors of texts; those of like meaning point the same way."""

    @property
    def fingerprint(self) -> str:
        """Differs between models whose vectors cannot be compared."""

    def embed(self, texts: Sequence[str]) -> NDArray[Any]:
        """Vectors of some texts, of any length.

        Returns:
            Floats, shape [len(texts), dim].
        """


# Passage, its first character, when it was logged: a log that was begun anew counts its passages
# from 1 again, but not at the same time.
_Key = tuple[int, int, float]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of the log, and whether it may be found."""

    key: _Key
    end: int
    is_findable: bool


class Vectors:
    """The vectors of a session. The file is read at the first search.

    Args:
        path: Its file; need not be there.
        embedder: Makes them.
    """

    def __init__(self, path: Path, embedder: Embedder) -> None:
        self._path = path
        self._embedder = embedder
        self._known: dict[_Key, NDArray[np.float16]] | None = None
        self._num_unsaved = 0

    def search(
        self,
        log: Log,
        question: str,
        *,
        before: int | None = None,
        pinned: range = range(0),
        limit: int = 3,
    ) -> list[Recalled]:
        """Find what matches a question by its words or by its meaning, best first.

        Arguments and errors are those of `recall.search`.
        """
        by_words = search(log, question, before=before, pinned=pinned, limit=DEPTH)
        by_meaning = self._by_meaning(log, question, before, pinned)
        return fused([by_words, by_meaning])[:limit]

    def _by_meaning(
        self, log: Log, question: str, before: int | None, pinned: range
    ) -> list[Recalled]:
        if not question.strip():
            return []
        pieces = _pieces(log, before, pinned)
        known = self._update(log, pieces)
        findable = [piece for piece in pieces if piece.is_findable and piece.key in known]
        if not findable:
            return []
        matrix = np.stack([known[piece.key] for piece in findable]).astype(np.float32)
        [asked] = _units(self._embedder.embed([storable(question)])).astype(np.float32)
        cosines = matrix @ asked
        best = np.argsort(-cosines, kind="stable")[:DEPTH]
        return [
            Recalled(passage, passage.text[findable[n].key[1] : findable[n].end], float(cosines[n]))
            for n in best
            if cosines[n] >= MIN_COSINE
            for passage in log.get([findable[n].key[0]])
        ]

    def _update(self, log: Log, pieces: Sequence[_Piece]) -> dict[_Key, NDArray[np.float16]]:
        """The vectors of what is in the log, with those that were missing, up to `MAX_NEW`."""
        if self._known is None:
            self._known = load(self._path, self._embedder.fingerprint)
        there = {piece.key for piece in pieces}
        gone = self._known.keys() - there
        for key in gone:
            del self._known[key]
        missing = [p for p in pieces if p.is_findable and p.key not in self._known][:MAX_NEW]
        if missing:
            units = _units(self._embedder.embed([_text(log, piece) for piece in missing]))
            self._known.update(zip([piece.key for piece in missing], units, strict=True))
        self._num_unsaved += len(missing)
        if gone or self._num_unsaved >= SAVE_EVERY:
            # The disk's refusal is told where the log is written; here it costs time alone.
            with contextlib.suppress(SessionError):
                save(self._path, self._embedder.fingerprint, self._known)
                self._num_unsaved = 0
        return self._known


def fused(rankings: Iterable[Sequence[Recalled]]) -> list[Recalled]:
    """Several rankings as one: reciprocal rank fusion (Cormack, Clarke and Buettcher 2009).

    Args:
        rankings: Each best first; their scores need not be comparable.

    Returns:
        Best first; a score is the sum of 1 / (60 + rank) over the rankings that have the piece.
    """
    pieces: dict[tuple[int, str], Recalled] = {}
    scores: dict[tuple[int, str], float] = {}
    for ranking in rankings:
        for rank, piece in enumerate(ranking, start=1):
            key = (piece.passage.id, piece.text)
            pieces.setdefault(key, piece)
            scores[key] = scores.get(key, 0.0) + 1 / (RANK_OFFSET + rank)
    # Stable: of equals, the one that the first ranking has.
    return [
        replace(pieces[key], score=scores[key]) for key in sorted(scores, key=lambda k: -scores[k])
    ]


# The file


def load(path: Path, fingerprint: str) -> dict[_Key, NDArray[np.float16]]:
    """The vectors in a file; none if it is missing, damaged, or of another model."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="np") as file:
            described = dict(file.metadata() or {})
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        checksum = described.pop("checksum", None)
        if described != _described(fingerprint) or checksum != _checksum(described, arrays):
            return {}
        columns = [arrays[name].tolist() for name in ("passage", "first_char", "created")]
        return dict(zip(zip(*columns, strict=True), arrays["vectors"], strict=True))
    except Exception:  # the reader raises whatever a broken file makes it stumble on
        return {}


def save(path: Path, fingerprint: str, vectors: dict[_Key, NDArray[np.float16]]) -> None:
    """Write vectors in place of those before.

    Raises:
        SessionError: If they cannot be written; those before stay.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    arrays: dict[str, NDArray[Any]] = {
        "passage": np.array([key[0] for key in vectors], np.int64),
        "first_char": np.array([key[1] for key in vectors], np.int64),
        "created": np.array([key[2] for key in vectors], np.float64),
        "vectors": np.array([*vectors.values()], np.float16),
    }
    described = _described(fingerprint)
    described["checksum"] = _checksum(described, arrays)
    with told(f"cannot save vectors to {path}"), replacing(path) as draft:
        try:
            save_file(arrays, draft, metadata=described)
        except SafetensorError as error:
            raise SessionError(f"cannot save vectors to {path}: {error}") from error


def _described(fingerprint: str) -> dict[str, str]:
    return {"format": FORMAT, "version": VERSION, "model": fingerprint}


def _checksum(described: dict[str, str], arrays: dict[str, NDArray[Any]]) -> str:
    """BLAKE2b over all that a file holds."""
    shapes = [[name, str(arrays[name].dtype), arrays[name].shape] for name in sorted(arrays)]
    digest = hashlib.blake2b(json.dumps([sorted(described.items()), shapes]).encode())
    for name in sorted(arrays):
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()


# The log


def _pieces(log: Log, before: int | None, pinned: range) -> list[_Piece]:
    """All pieces of the log, oldest first."""
    with log.using() as connection:
        rows = connection.execute(
            f"SELECT passage, first_char, created, end_char, {FINDABLE}"
            " FROM pieces JOIN passages ON passages.id = passage ORDER BY pieces.id",
            {"before": before, "pinned": pinned.start, "pinned_end": pinned.stop},
        ).fetchall()
    return [
        _Piece(
            (
                log.checked("passage", passage, int),
                log.checked("first_char", first, int),
                float(log.checked("created", created, int, float)),
            ),
            log.checked("end_char", end, int),
            bool(is_findable),
        )
        for passage, first, created, end, is_findable in rows
    ]


def _text(log: Log, piece: _Piece) -> str:
    """What a piece is embedded by: its text, and who says it."""
    passage_id, first, _ = piece.key
    [passage] = log.get([passage_id])
    text = passage.text[first : piece.end]
    return f"{passage.speaker}: {text}" if passage.speaker else text


def _units(vectors: NDArray[Any]) -> NDArray[np.float16]:
    """Vectors of length one, or zero where there is no direction: a text without known words."""
    vectors = vectors.astype(np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float16)
