"""An answer for each line, in one conversation that never ends."""

import time
from collections.abc import Callable, Iterator

from streamchat.chat.conversation import Conversation
from streamchat.events import Finished, FinishReason, Progress, Reply, TextDelta, TurnsEvicted
from streamchat.pipe.lines import Piece
from streamchat.pipe.reader import Reader
from streamchat.pipe.turns import whole_lines


def reply(
    conversation: Conversation, reader: Reader, should_stop: Callable[[], bool]
) -> Iterator[Reply | TurnsEvicted | Progress]:
    """Answer a reader's lines; lines of white space are passed over.

    Args:
        conversation: Its system prompt is the instruction.
        reader: Where the lines come from.
        should_stop: Asked between tokens; true ends the answer under way, which is kept.

    Yields:
        A `Reply` for each line, `TurnsEvicted` as turns leave the memory, and a `Progress` after
        each line, while nothing comes, and at the end.
    """
    num_lines, busy_seconds = 0, 0.0
    for turn in whole_lines(reader, should_stop):
        if turn is not None:
            num_lines += 1
            if turn.text.strip():
                started = time.perf_counter()
                yield from _answer(conversation, turn, should_stop)
                busy_seconds += time.perf_counter() - started
        yield Progress(conversation.stream.stats(), num_lines, busy_seconds)
    yield Progress(conversation.stream.stats(), num_lines, busy_seconds)


def _answer(
    conversation: Conversation, turn: Piece, should_stop: Callable[[], bool]
) -> Iterator[Reply | TurnsEvicted]:
    position, text = conversation.stream.position, ""
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
    yield Reply(turn.line, turn.text, text.strip(), position, reason, turn.origin)
