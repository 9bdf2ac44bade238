"""Who speaks, as far as the input says: by a name, or by marks where speakers change."""

from dataclasses import dataclass

from streamchat.events import Origin


@dataclass(slots=True)
class Voice:
    """Who has spoken last; what names nobody is theirs.

    Attributes:
        speaker: Their name, if it was said.
        turn: Number of their turn, where turns are marked.
    """

    speaker: str | None = None
    turn: int = 1

    def changes(self, origin: Origin) -> bool:
        """Whether somebody else speaks there."""
        if origin.turn not in (None, self.turn):
            return True
        return None not in (self.speaker, origin.speaker) and self.speaker != origin.speaker

    def hear(self, origin: Origin) -> None:
        """Go on to what is said there."""
        if self.changes(origin):
            self.speaker = None
        self.speaker = origin.speaker or self.speaker
        self.turn = origin.turn or self.turn
