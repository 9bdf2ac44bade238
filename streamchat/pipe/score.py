"""Score lines as they come: nats per token, before the end of the input.

Lines that wait are fed together, in one chunk, which is several times faster than one by one and
gives the same numbers. From files, the batches depend on the input only; from a live input, on what
has arrived, so that the last digits of a score may differ from run to run.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from streamchat.engine.stream import Stream
from streamchat.errors import InputError
from streamchat.events import LineScored, Progress
from streamchat.model.tokenizer import Tokenizer
from streamchat.pipe.lines import Piece
from streamchat.pipe.place import Place
from streamchat.pipe.reader import Reader

POLL_SECONDS = 0.1
"""How long to wait for input before the caller gets control again."""


@dataclass(slots=True)
class Batch:
    """Pieces that are fed together, with their ids.

    Attributes:
        pieces: In order.
        ids: Of each.
        arrived: When the first arrived, on the monotonic clock, if the input is live.
    """

    pieces: list[Piece] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    arrived: float | None = None

    @property
    def lag_seconds(self) -> float | None:
        """How long ago the first piece arrived, if the input is live."""
        return None if self.arrived is None else time.monotonic() - self.arrived


def score(
    stream: Stream, reader: Reader, should_stop: Callable[[], bool], place: Place | None = None
) -> Iterator[LineScored | Progress]:
    """Feed a reader's lines to a stream.

    Args:
        stream: Fed with BOS first where the tokenizer wants one.
        reader: Where the lines come from.
        should_stop: Asked between batches; true ends the stream as though the input had ended.
        place: Where the stream stands in the input; moved on.

    Yields:
        A `LineScored` for each piece, and a `Progress` after each batch, while nothing comes, and
        at the end.
    """
    if stream.position == 0:
        stream.feed(stream.loaded.tokenizer.bos_ids())
    place = place or Place()
    for batch in batches(reader, stream.loaded.tokenizer, stream.chunk_size, should_stop):
        if batch.pieces:
            started = time.perf_counter()
            scored = _score_batch(stream, batch)
            place.busy_seconds += time.perf_counter() - started
            place.num_lines += sum(piece.ends_line for piece in batch.pieces)
            place.add(batch.pieces)
            yield from scored
        yield Progress(
            stream.stats(), place.num_lines, place.busy_seconds, lag_seconds=batch.lag_seconds
        )
    yield Progress(stream.stats(), place.num_lines, place.busy_seconds, is_last=True)


def _score_batch(stream: Stream, batch: Batch) -> list[LineScored]:
    position = stream.position
    losses = stream.score([i for ids in batch.ids for i in ids])
    scored, begin = [], 0
    for piece, ids in zip(batch.pieces, batch.ids, strict=True):
        own = [loss for loss in losses[begin : begin + len(ids)] if loss is not None]
        scored.append(
            LineScored(
                line=piece.line,
                part=piece.part,
                ends_line=piece.ends_line,
                text=piece.text,
                position=position + begin,
                num_tokens=len(ids),
                num_scored=len(own),
                nats=sum(own),
                origin=piece.origin,
            )
        )
        begin += len(ids)
    return scored


def batches(
    reader: Reader, tokenizer: Tokenizer, num_tokens: int, should_stop: Callable[[], bool]
) -> Iterator[Batch]:
    """Group pieces into batches of `num_tokens` tokens at most, or of what has arrived.

    A longer piece makes a batch of its own. An empty batch means that nothing came for a while.
    A batch that is cut short, by a stop or a failure, is not given if its lines can be read again:
    going on from a checkpoint then makes the same batches as a run that was not disturbed.

    Raises:
        InputError: If the input cannot be read, after what came before.
    """
    batch, total = Batch(), 0
    failure: InputError | None = None
    try:
        for item in _encoded(reader, tokenizer, should_stop):
            is_full = item is not None and total + len(item[1]) > num_tokens
            if batch.pieces and (is_full or (item is None and reader.is_live)):
                yield batch
                batch, total = Batch(), 0
            if item is not None:
                if not batch.pieces and reader.is_live:
                    batch.arrived = reader.arrived
                batch.pieces.append(item[0])
                batch.ids.append(item[1])
                total += len(item[1])
            elif not batch.pieces:
                yield batch
    except InputError as error:
        failure = error
    is_cut_short = should_stop() or failure is not None
    if batch.pieces and not (is_cut_short and reader.is_replayed):
        yield batch
    if failure is not None:
        raise failure


def _encoded(
    reader: Reader, tokenizer: Tokenizer, should_stop: Callable[[], bool]
) -> Iterator[tuple[Piece, list[int]] | None]:
    """Pieces with their ids; None when nothing is there at the moment."""
    while not should_stop():
        pieces = reader.get(0)
        if not pieces and not reader.at_end:
            yield None
            pieces = reader.get(POLL_SECONDS)
        if not pieces and reader.at_end:
            return
        for piece in pieces:
            if should_stop():
                return
            yield piece, encode_piece(tokenizer, piece)


def encode_piece(tokenizer: Tokenizer, piece: Piece) -> list[int]:
    """Ids of a piece, with who speaks and its line end."""
    text = piece.lead + piece.text + ("\n" if piece.ends_line else "")
    return tokenizer.encode(text) if piece.part == 1 else tokenizer.encode_continuation(text)
