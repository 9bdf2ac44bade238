"""A conversation that is kept: each turn is logged and saved, found again, and gone on from.

Positions in a log never run back. Where a stream begins anew, or what it has retained is fed again,
its position and the log's differ by an offset, which is saved with the state.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from streamchat.chat import recalled
from streamchat.chat.conversation import Conversation
from streamchat.chat.journal import Journal
from streamchat.chat.resume import Asked, Resumed, resume
from streamchat.chat.saved import pack
from streamchat.errors import SessionError, UsageError
from streamchat.events import Event, PassagesRecalled
from streamchat.store.log import Passage
from streamchat.store.recall import Recalled, search
from streamchat.store.words import query_words

if TYPE_CHECKING:
    from streamchat.store.vectors import Embedder, Vectors

RECALL_BUDGET = 256
"""Tokens of what is recalled in one turn."""

MAX_RECALLED = 3
"""Pieces recalled in one turn."""

MAX_FOUND = 12
"""Pieces that these are taken from: some say nothing new."""

MODE = "chat"

NOT_LOGGED = "this chat is not logged (--no-log)"


@dataclass(frozen=True, slots=True)
class _Copy:
    """A piece that was told again, and the position in the stream before which it was."""

    passage: int
    text: str
    end: int


class ChatSession:
    """A conversation and the session it is kept in.

    Args:
        conversation: A fresh one.
        journal: Where it is kept; None keeps nothing.
        recalls: Whether each turn is looked for in what has left the model's memory.
        recall_budget: Tokens of what is recalled in a turn; at most half the window is.
        embedder: Finds by meaning, too; None finds by words alone.
    """

    def __init__(
        self,
        conversation: Conversation,
        journal: Journal | None = None,
        *,
        recalls: bool = False,
        recall_budget: int = RECALL_BUDGET,
        embedder: "Embedder | None" = None,
    ) -> None:
        if recalls and journal is None:
            raise UsageError(f"what has left cannot be recalled: {NOT_LOGGED}")
        self.conversation = conversation
        self.journal = journal
        self.recalls = recalls
        self._recall_budget = recall_budget
        self._embedder = embedder
        self._errors: list[str] = []
        if journal is not None:
            # Now: a tokenizer is in one thread at a time, and states are packed in the background.
            conversation.loaded.fingerprint()
        self._set(Resumed())

    def _set(self, where: Resumed) -> None:
        self._vectors = self._open_vectors()
        self._offset = where.offset
        self._begin = where.begin
        self._next: list[Recalled] = []  # what `recall` found for the next turn
        self._last: list[Recalled] = []  # what the last turn was told again
        turns = {turn.number: turn for turn in self.conversation.turns}
        self._copies = [
            _Copy(piece.passage.id, piece.text, turns[number].answer_start)
            for number, pieces in where.recalled.items()
            if number in turns
            for piece in pieces
        ]
        self._evicted_end = self._window_start()

    def _open_vectors(self) -> "Vectors | None":
        """Those of the session, if it is searched by meaning."""
        if self._embedder is None or self.journal is None:
            return None
        # Imported late: who does not ask for it does without.
        from streamchat.store.vectors import FILE_NAME, Vectors

        return Vectors(self.journal.session.folder / FILE_NAME, self._embedder)

    def _window_start(self) -> int:
        """Position in the log of the oldest token that is held and not a sink."""
        return self.conversation.window_start() + self._offset

    def resume(self, asked: Asked | None = None) -> list[str]:
        """Go on where the session stands.

        Args:
            asked: What the user has asked for explicitly, and what is therefore not taken from it.

        Returns:
            What the user must know: what was lost, what was rebuilt and why.
        """
        if self.journal is None:
            return []
        where = resume(self.conversation, self.journal, asked or Asked())
        self._set(where)
        notices, self.journal.notices = [*self.journal.notices, *where.notices], []
        return notices

    @property
    def name(self) -> str | None:
        """The session's name; None if nothing is kept."""
        return None if self.journal is None else self.journal.name

    # Turns

    def say(self, question: str) -> Generator[Event, None, None]:
        """Ask, as `Conversation.say`, and keep the turn, however it ends."""
        before, asked_at = self.conversation.num_turns, time.time()
        pieces, self._next = self._next or self._find_for(question), []
        told = recalled.told(pieces)
        if pieces:
            yield PassagesRecalled(told, len(pieces))
        events = self.conversation.say(question, told)
        try:
            yield from events
        finally:
            events.close()
            if self.conversation.num_turns > before:
                self._record(pieces, asked_at)

    def _find_for(self, question: str) -> list[Recalled]:
        """What a turn is told again; it is asked even if the log cannot be read."""
        if not self.recalls:
            return []
        try:
            return self._find(question)
        except SessionError as error:
            self._errors.append(str(error))
            return []

    def _record(self, pieces: Sequence[Recalled], asked_at: float) -> None:
        """Keep the newest turn."""
        turn, offset, self._last = self.conversation.turns[-1], self._offset, list(pieces)
        self._copies += [_Copy(p.passage.id, p.text, turn.answer_start) for p in pieces]
        if self.journal is None:
            return
        said = [
            Passage(
                role="user",
                text=turn.question,
                created=asked_at,
                turn=turn.number,
                first_position=turn.start + offset,
                last_position=turn.answer_start + offset - 1,
            )
        ]
        if pieces:
            text = recalled.references(pieces)
            said.append(Passage(role=recalled.ROLE, text=text, created=asked_at, turn=turn.number))
        said.append(
            Passage(
                role="assistant",
                text=turn.answer,
                created=time.time(),
                turn=turn.number,
                first_position=turn.answer_start + offset,
                last_position=turn.end + offset - 1,
            )
        )
        self.journal.add(said)
        begin, self._evicted_end = self._evicted_end, max(self._evicted_end, self._window_start())
        if self._evicted_end > begin:
            self.journal.add_eviction(begin, self._evicted_end - 1)
        self._save()

    def undo(self, *, asks_again: bool = False) -> bool:
        """Take the last turn back, as `Conversation.undo`, from the log as well.

        Args:
            asks_again: Tell the model in the next turn what it was told again in this one.
        """
        turn = self.conversation.turns[-1] if self.conversation.turns else None
        is_exact = self.conversation.undo()
        if turn is not None:
            # Where the stream ends now the log has the turn's beginning.
            shift = turn.start - self.conversation.stream.position
            self._offset += shift
            self._copies = [
                replace(copy, end=copy.end - shift)
                for copy in self._copies
                if copy.end < turn.answer_start
            ]
            self._next = self._last if asks_again else []
            if self.journal is not None:
                self.journal.take_back(turn.number, self._begin)
                self._save()
        return is_exact

    def clear(self) -> None:
        """Start anew, as `Conversation.clear`; the log keeps what was said."""
        position = self.conversation.stream.position + self._offset
        self.conversation.clear()
        self._set(Resumed(offset=position, begin=position))
        if self.journal is not None:
            self.journal.set_metadata({"begin": position})
            self._save()

    def _save(self) -> None:
        """Save the state as it is now, in the background."""
        if self.journal is None:
            return
        conversation = self.conversation
        loaded, config = conversation.loaded, conversation.cache_config
        state = conversation.snapshot()
        random = conversation.sampler.random_state()
        own = {
            "mode": MODE,
            "position_offset": self._offset,
            "begin": self._begin,
            "num_turns": conversation.num_turns,
            "num_pinned": conversation.num_pinned,
            "system": conversation.template.system,
        }
        self.journal.save(
            lambda last_id: pack(
                loaded, config, state, {**own, "last_id": last_id}, {"random": random}
            )
        )

    # Recall

    def recall(self, query: str) -> str:
        """Find what matches a query in what has left, and tell it to the model in the next turn.

        Returns:
            What it will be told; empty if nothing was found.

        Raises:
            UsageError: If nothing is logged.
            SessionError: If the log cannot be read.
        """
        if self.journal is None:
            raise UsageError(f"nothing can be recalled: {NOT_LOGGED}")
        self._next = self._find(query)
        return recalled.told(self._next)

    def _find(self, query: str) -> list[Recalled]:
        """What matches and has wholly left, within the budget."""
        if self.journal is None:
            return []
        self.journal.flush()
        conversation = self.conversation
        start, config = conversation.window_start(), conversation.cache_config
        self._copies = [copy for copy in self._copies if copy.end > start]
        is_held = {(copy.passage, copy.text) for copy in self._copies}
        # Sinks are the stream's first tokens, and in the log unless these were fed again.
        is_first = self._offset == self._begin
        find = search if self._vectors is None else self._vectors.search
        found = find(
            self.journal.log,
            query,
            before=start + self._offset,
            pinned=range(self._begin, self._begin + config.sink_size) if is_first else range(0),
            limit=MAX_FOUND + len(is_held),
        )
        # An earlier question of the same words would take the place of what answers it.
        known = _words(query)
        fresh = [
            piece
            for piece in found
            if (piece.passage.id, piece.text) not in is_held and _words(piece.text) - known
        ]
        encode = conversation.loaded.tokenizer.encode
        return recalled.choose(
            fresh[:MAX_RECALLED],
            min(self._recall_budget, config.window_size // 2),
            lambda text: len(encode(text)),
        )

    # The session as a whole

    def save_as(self, name: str | None) -> None:
        """Wait until all is written; then keep a copy under another name, if there is one.

        Raises:
            UsageError: If nothing is kept, or there is a session of that name.
            SessionError: If it cannot be written.
        """
        if self.journal is None:
            raise UsageError(NOT_LOGGED)
        self.journal.flush()
        if name is not None:
            self.journal.copy(name)

    def open(self, name: str) -> list[str]:
        """Leave this session, and go on with another one; what `resume` returns.

        Raises:
            UsageError: If there is none of that name.
            SessionInUseError: If another process has it open: then nothing has changed.
        """
        if self.journal is None:
            raise UsageError(NOT_LOGGED)
        if name == self.journal.name:
            raise UsageError(f"this is session '{name}'")
        other = self.journal.open_other(name)
        self.journal.close()
        self.journal = other
        system = other.log.settings().get("system")
        self.conversation.set_system(system if isinstance(system, str) else None)
        return self.resume()

    def remember(self, settings: dict[str, object]) -> None:
        """Keep settings with the session."""
        if self.journal is not None:
            self.journal.set_settings(settings)

    def take_errors(self) -> list[str]:
        """What could not be written since this was asked last."""
        errors, self._errors = self._errors, []
        return errors + ([] if self.journal is None else self.journal.take_errors())

    def close(self) -> None:
        """Write all that waits, and let others in; `take_errors` may still be asked."""
        if self.journal is not None:
            self.journal.close()


def _words(text: str) -> set[str]:
    return set(query_words(text.casefold()))
