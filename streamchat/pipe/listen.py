"""Only listen: feed what comes, and log it, so that a chat can go on from there.

The transcript streams behind the pinned system prompt, inside a user turn that stays open; the next
question of a chat closes it. What has left the window is in the log, where recall finds it.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from streamchat.chat.template import ChatTemplate
from streamchat.config import CacheConfig
from streamchat.engine.stream import Stream
from streamchat.events import Answer, Origin, Progress
from streamchat.model.families import check_fits
from streamchat.model.load import LoadedModel
from streamchat.pipe.aside import Aside
from streamchat.pipe.lines import Piece
from streamchat.pipe.place import Place
from streamchat.pipe.reader import Reader
from streamchat.pipe.score import Batch, batches, encode_piece
from streamchat.store.log import Log, Passage

ROLE = "input"


class Listener:
    """Listens with one stream.

    Args:
        loaded: The model.
        cache: Sizes; the sinks are raised to the length of the system prompt and chat header.
        system: System prompt, or None for the template's own.
        log: Where what is heard is kept.

    Raises:
        UnsupportedModelError: If the pinned ids and the window exceed the trained length.
        SessionError: If the log cannot be read.
    """

    def __init__(
        self, loaded: LoadedModel, cache: CacheConfig, system: str | None, log: Log
    ) -> None:
        self.template = ChatTemplate(loaded.tokenizer, system)
        pinned = self.template.pinned_ids()
        self.cache_config = cache.pin(len(pinned))
        check_fits(loaded.model.config, self.cache_config)
        self.stream = Stream(loaded, self.cache_config)
        self.stream.feed(pinned)
        self._system = system
        self._num_pinned = len(pinned) if cache.pins else 0
        self._log = log
        self._last_id = log.last_id()
        # Positions of a log never run back: an earlier stream's come before.
        self._offset = self._begin = log.next_position()

    def listen(
        self,
        reader: Reader,
        should_stop: Callable[[], bool],
        place: Place | None = None,
        *,
        aside: Aside | None = None,
        asked: Callable[[], str | None] = lambda: None,
    ) -> Iterator[Answer | Progress]:
        """Feed and log a reader's lines.

        Args:
            reader: Where the lines come from.
            should_stop: Asked between batches.
            place: Where the stream stands in the input; moved on.
            aside: Answers questions.
            asked: Gives the next one that a user has asked meanwhile, if any.

        Yields:
            A `Progress` after each batch, while nothing comes, and at the end; and answers.

        Raises:
            SessionError: If the log cannot be written.
        """
        place = place or Place()
        tokenizer = self.stream.loaded.tokenizer
        for batch in batches(reader, tokenizer, self.stream.chunk_size, should_stop):
            if batch.pieces:
                self._hear(batch, place)
            yield Progress(
                self.stream.stats(),
                place.num_lines,
                place.busy_seconds,
                lag_seconds=batch.lag_seconds,
            )
            while aside is not None and (question := asked()) is not None:
                yield aside.answer_about(self.stream, question, place.last_line)
        yield Progress(self.stream.stats(), place.num_lines, place.busy_seconds, is_last=True)

    def pack(self) -> dict[str, Any]:
        """What a checkpoint needs beside the stream, and a chat that goes on from there."""
        return {
            "last_id": self._last_id,
            "position_offset": self._offset,
            "begin": self._begin,
            "num_turns": 0,
            "num_pinned": self._num_pinned,
            "system": self._system,
        }

    def unpack(self, packed: Mapping[str, Any]) -> None:
        """Go on from what `pack` gave; the caller restores the stream, and then asks `catch_up`."""
        self._last_id = packed["last_id"]
        self._offset, self._begin = packed["position_offset"], packed["begin"]

    def catch_up(self, place: Place, *, is_live: bool) -> None:
        """Deal with what was logged after the checkpoint.

        From a file it comes again, and is taken back. From a live input it does not: it is fed from
        the log.
        """
        ahead = list(self._log.passages(begin=self._last_id + 1))
        if ahead:
            self._log.remove(ahead[0].id)
        if ahead and is_live:
            pieces = [_piece(passage) for passage in ahead]
            tokenizer = self.stream.loaded.tokenizer
            self._hear(Batch(pieces, [encode_piece(tokenizer, piece) for piece in pieces]), place)

    def _hear(self, batch: Batch, place: Place) -> None:
        """Log a batch, then feed it: what is in the model's memory is in the log."""
        started, now = time.perf_counter(), time.time()
        passages, position = [], self._offset + self.stream.position
        for piece, ids in zip(batch.pieces, batch.ids, strict=True):
            passages.append(_passage(piece, position, len(ids), now))
            position += len(ids)
        self._last_id = self._log.append(passages)[-1]
        self.stream.feed([i for ids in batch.ids for i in ids])
        place.busy_seconds += time.perf_counter() - started
        place.num_lines += sum(piece.ends_line for piece in batch.pieces)
        place.add(batch.pieces)


def _passage(piece: Piece, position: int, num_tokens: int, now: float) -> Passage:
    origin = piece.origin
    return Passage(
        role=ROLE,
        text=piece.text,
        created=now,
        first_position=position,
        last_position=position + num_tokens - 1,
        first_line=piece.line,
        last_line=origin.last_line or piece.line,
        start_time=origin.start,
        end_time=origin.end,
        speaker=origin.speaker,
    )


def _piece(passage: Passage) -> Piece:
    """A passage as something to hear; a part of a long line becomes a line."""
    line, last_line, speaker = passage.first_line or 0, passage.last_line, passage.speaker
    names = speaker is None or passage.text.startswith(speaker)
    return Piece(
        passage.text,
        line,
        part=1,
        ends_line=True,
        origin=Origin(
            last_line=None if last_line == line else last_line,
            start=passage.start_time,
            end=passage.end_time,
            speaker=speaker,
        ),
        lead="" if names else f"{speaker}: ",
    )
