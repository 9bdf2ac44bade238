"""An answer for each line (or turn, or paragraph), in one conversation that never ends."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from streamchat.chat.conversation import Conversation, Turn
from streamchat.events import Finished, FinishReason, Progress, Reply, TextDelta, TurnsEvicted
from streamchat.pipe.lines import Piece
from streamchat.pipe.place import Place
from streamchat.pipe.reader import Reader
from streamchat.pipe.turns import IDLE_SECONDS, Unit, units


def reply(
    conversation: Conversation,
    reader: Reader,
    should_stop: Callable[[], bool],
    place: Place | None = None,
    *,
    unit: Unit = "line",
    idle_seconds: float = IDLE_SECONDS,
) -> Iterator[Reply | TurnsEvicted | Progress]:
    """Answer a reader's lines; what is white space alone is passed over.

    Args:
        conversation: Its system prompt is the instruction.
        reader: Where the lines come from.
        should_stop: Asked between tokens; true ends the answer under way. It is kept, unless its
            line can be read again: then the line is taken back, to be answered whole.
        place: Where the conversation stands in the input; moved on.
        unit: What is answered at once.
        idle_seconds: After so long without input, a live unit is taken for complete.

    Yields:
        A `Reply` for each line, `TurnsEvicted` as turns leave the memory, and a `Progress` after
        each line, while nothing comes, and at the end.
    """
    place = place or Place()
    before = replace(place)
    lines = units(reader, should_stop, place, unit=unit, idle_seconds=idle_seconds)
    for turn in lines:
        if turn is not None and turn.text.strip():
            started = time.perf_counter()
            is_kept = yield from _answer(conversation, turn, reader, should_stop)
            if not is_kept:
                place.num_pieces, place.num_lines = before.num_pieces, before.num_lines
                place.last_line, place.digest = before.last_line, before.digest
            place.busy_seconds += time.perf_counter() - started
        before = replace(place)
        yield Progress(
            conversation.stream.stats(),
            place.num_lines,
            place.busy_seconds,
            lag_seconds=None if turn is None else _lag(reader),
        )
    yield Progress(conversation.stream.stats(), place.num_lines, place.busy_seconds, is_last=True)


def pack(conversation: Conversation) -> dict[str, Any]:
    """What a checkpoint needs beside the stream and the sampler, as JSON can say it.

    Of turns only where they stand: that is what their leaving is told by.
    """
    start = conversation.window_start()
    held = [replace(turn, question="", answer="", told="") for turn in conversation.turns]
    return {
        "num_turns": conversation.num_turns,
        "turns": [asdict(turn) for turn in held if turn.end > start],
    }


def unpack(conversation: Conversation, packed: Mapping[str, Any]) -> None:
    """Go on from what `pack` gave; the caller restores stream and sampler."""
    conversation.num_turns = packed["num_turns"]
    conversation.turns.extend(Turn(**turn) for turn in packed["turns"])


def _lag(reader: Reader) -> float | None:
    return time.monotonic() - reader.arrived if reader.is_live else None


def _answer(
    conversation: Conversation, turn: Piece, reader: Reader, should_stop: Callable[[], bool]
) -> Generator[Reply | TurnsEvicted, None, bool]:
    """Answer a line; returns whether it has become part of the conversation."""
    position, text = conversation.stream.position, ""
    num_turns, random = conversation.num_turns, conversation.sampler.random_state()
    reason: FinishReason | None = None
    events = conversation.say(turn.lead + turn.text)
    try:
        for event in events:
            if isinstance(event, TextDelta):
                text += event.text
            elif isinstance(event, TurnsEvicted):
                yield event
            elif isinstance(event, Finished):
                reason = event.reason
            if should_stop():
                break
    finally:
        events.close()
    if reason is None and reader.is_replayed:
        if conversation.num_turns > num_turns:  # else stopped while the line was being fed
            conversation.undo()
        conversation.sampler.set_random_state(random)
        return False
    yield Reply(turn.line, turn.text, text.strip(), position, reason, turn.origin)
    return True
