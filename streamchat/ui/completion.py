"""What Tab completes: commands, and what comes after them."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document


class SlashCompleter(Completer):
    """Completes slash commands; a question is left alone.

    Args:
        commands: Their names.
        words: For a command, what may come after it.
        takes_path: The commands that take a file's name.
    """

    def __init__(
        self,
        commands: Sequence[str],
        words: Mapping[str, Callable[[], Iterable[str]]],
        takes_path: Sequence[str] = (),
    ) -> None:
        self._commands = commands
        self._words = words
        self._takes_path = takes_path
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        """What may stand where the cursor is."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, rest = text.partition(" ")
        if not space:
            yield from _beginning(name, self._commands)
        elif name in self._takes_path:
            rest = rest.lstrip()
            yield from self._paths.get_completions(Document(rest, len(rest)), complete_event)
        elif name in self._words and " " not in rest.lstrip():
            yield from _beginning(rest.lstrip(), self._words[name]())


def _beginning(begin: str, words: Iterable[str]) -> Iterable[Completion]:
    return (Completion(word, -len(begin)) for word in words if word.startswith(begin))
