"""What a model thinks before it answers, told apart from the answer."""

from collections.abc import Iterable, Iterator

from streamchat.engine.stops import overlap
from streamchat.events import Event, TextDelta, ThinkingDelta

THINK, END_THINK = "<think>", "</think>"


def split_thinking(events: Iterable[Event], *, thinking: bool) -> Iterator[Event]:
    """The same events, with the text of a leading thinking block as `ThinkingDelta`s.

    Args:
        events: Of an answer.
        thinking: Whether the template has opened the block already.
    """
    splitter = _ThinkSplitter(thinking=thinking)
    for event in events:
        if isinstance(event, TextDelta):
            yield from splitter.push(event.text)
        else:
            yield event
    yield from splitter.flush()


class _ThinkSplitter:
    """Tells thinking from answer in text that arrives in pieces."""

    def __init__(self, *, thinking: bool) -> None:
        self._thinking = thinking
        self._pending = ""
        self._at_start = True

    def push(self, text: str) -> list[TextDelta | ThinkingDelta]:
        """Add text; returns the parts that are certain."""
        self._pending += text
        parts: list[TextDelta | ThinkingDelta] = []
        while True:
            if self._at_start:
                self._pending = self._pending.lstrip()
            mark = END_THINK if self._thinking else THINK
            before, found, after = self._pending.partition(mark)
            if found and (self._thinking or (self._at_start and not before)):
                parts += self._part(before)
                self._thinking, self._pending, self._at_start = not self._thinking, after, True
                continue
            # Thinking comes first: a mark inside an answer is text.
            is_answer = not self._thinking and not self._at_start
            keep = 0 if is_answer else overlap(self._pending, mark)
            cut = len(self._pending) - keep
            if cut:
                parts += self._part(self._pending[:cut])
                self._pending, self._at_start = self._pending[cut:], False
            return parts

    def flush(self) -> list[TextDelta | ThinkingDelta]:
        """The rest, at the end."""
        rest, self._pending = self._pending, ""
        return self._part(rest)

    def _part(self, text: str) -> list[TextDelta | ThinkingDelta]:
        if not text:
            return []
        return [ThinkingDelta(text) if self._thinking else TextDelta(text)]
