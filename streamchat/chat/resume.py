"""Going on with a session: exactly from its state, or else from its log, and never silently.

A state goes on where the model, its sizes, device and dtype are the same. If the log has turns that
the state has not seen, a crash came between the two, and they are fed to it. Where there is no such
state, the newest turns of the log that fit into the window are fed to a new stream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from streamchat.chat import recalled
from streamchat.chat.conversation import Conversation, Turn
from streamchat.chat.journal import Journal
from streamchat.chat.saved import unpack, why_not
from streamchat.config import CacheConfig
from streamchat.errors import DamagedError
from streamchat.model.families import geometry_from_config, trained_length
from streamchat.store.files import put_aside
from streamchat.store.recall import Recalled
from streamchat.store.state import SavedState, load

OTHER_BYTES = 1 << 26
"""Of a state, beside what its cache holds, at most: logits and newest ids."""

NUMBERS = ("last_id", "position_offset", "begin", "num_turns", "num_pinned")
"""Keys of a state whose values are integers."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user has asked for explicitly.

    Attributes:
        sizes: Policy and sizes of the cache.
        system: The system prompt.
        seed: The seed of the sampler.
    """

    sizes: bool = False
    system: bool = False
    seed: bool = False


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a session stands.

    Attributes:
        offset: Position in the log less position in the stream.
        begin: Position in the log at which the stream's text begins.
        recalled: What the model was told again, by number of the turn.
        notices: What the user must know.
    """

    offset: int = 0
    begin: int = 0
    recalled: Mapping[int, Sequence[Recalled]] = field(default_factory=dict)
    notices: Sequence[str] = ()


@dataclass(slots=True)
class _Said:
    """A turn, or a line that was heard.

    Attributes:
        id: Of its first passage.
        what: The turn with its positions in the log, or the line.
    """

    id: int
    what: Turn | str


def resume(conversation: Conversation, journal: Journal, asked: Asked) -> Resumed:
    """Bring a fresh conversation to where its session stands.

    Raises:
        SessionError: If the log cannot be read, or a damaged state not be put aside.
    """
    found = journal.log.metadata().get("begin", 0)
    begin = found if isinstance(found, int) else 0
    notices: list[str] = []
    saved = _load(conversation, journal, notices)
    if saved is not None and saved.meta["own"].get("begin", 0) < begin:
        saved = None  # from before the user began anew
    if saved is not None:
        begin = saved.meta["own"].get("begin", 0)
    said, told = _said(journal, begin)
    if saved is not None:
        reasons = _why_not(saved, conversation, journal, asked, has_log=bool(said))
        if reasons:
            notices.append(f"the saved state cannot be gone on from: {'; '.join(reasons)}")
        elif _restore(saved, conversation, journal, asked, said, notices):
            offset = saved.meta["own"].get("position_offset", 0)
            return _catch_up(
                saved, conversation, journal, said, Resumed(offset, begin, told, notices)
            )
    end = max(begin, journal.log.next_position())
    offset = _rebuild(conversation, said, end, notices)
    return Resumed(offset, begin, told, notices)


def _load(conversation: Conversation, journal: Journal, notices: list[str]) -> SavedState | None:
    """The saved state, if there is one that can be read."""
    path = journal.state_path
    if not path.exists():
        if journal.log.num_passages():
            notices.append("there is no saved state")
        return None
    # Of a cache as large as any that this model could have.
    config, length = conversation.cache_config, trained_length(conversation.loaded.model.config)
    model = conversation.loaded.model
    per_token = geometry_from_config(model.config, model.dtype).bytes_per_token()
    largest = 2 * per_token * max(config.cache_size, length) + OTHER_BYTES if length else None
    try:
        saved = load(path, largest)
        own = saved.meta.get("own")
        if not isinstance(own, dict) or not all(isinstance(own.get(n, 0), int) for n in NUMBERS):
            raise DamagedError(f"{path} is no state of a stream")
    except DamagedError as error:
        notices.append(_put_aside(journal, error))
        return None
    return saved


def _put_aside(journal: Journal, error: DamagedError) -> str:
    return f"{error}; put aside as {put_aside(journal.state_path).name}"


def _said(journal: Journal, begin: int) -> tuple[list[_Said], dict[int, list[Recalled]]]:
    """What was said from position `begin` of the log on, and what the model was told again."""
    said: list[_Said] = []
    told: dict[int, list[Recalled]] = {}
    turn: Turn | None = None
    for passage in journal.newest():
        is_of_turn = turn is not None and passage.turn == turn.number
        if passage.role == recalled.ROLE:
            if turn is not None and is_of_turn:
                told[turn.number] = recalled.referred(journal.log, passage.text)
                turn.told = recalled.told(told[turn.number])
            continue
        first, last = passage.first_position, passage.last_position
        if first is None or last is None or first < begin:
            continue
        if passage.turn is None:
            turn = None
            said.append(_Said(passage.id, passage.text))
        elif passage.role == "user":
            turn = Turn(passage.turn, passage.text, first, last + 1, last + 1)
            said.append(_Said(passage.id, turn))
        elif turn is not None and is_of_turn:
            turn.answer, turn.end = passage.text, last + 1
    return said, told


def _why_not(
    saved: SavedState, conversation: Conversation, journal: Journal, asked: Asked, *, has_log: bool
) -> list[str]:
    """Why the state cannot be gone on from exactly."""
    own = saved.meta["own"]
    config = conversation.cache_config if asked.sizes else None
    reasons = why_not(saved, conversation.loaded, config or _config(saved, conversation))
    if asked.system and own.get("system") != conversation.template.system:
        reasons.append("it has another system prompt")
    last_id = own.get("last_id")
    if has_log and last_id and not journal.log.get([last_id]):
        reasons.append("its last turn was taken back")
    return reasons


def _config(saved: SavedState, conversation: Conversation) -> CacheConfig:
    """Policy and sizes that a state was saved with."""
    names = ("policy", "sink_size", "window_size")
    sizes: dict[str, Any] = {n: saved.fingerprint[n] for n in names if n in saved.fingerprint}
    own = conversation.cache_config
    return own if not sizes else CacheConfig(**sizes)


def _restore(
    saved: SavedState,
    conversation: Conversation,
    journal: Journal,
    asked: Asked,
    said: Sequence[_Said],
    notices: list[str],
) -> bool:
    """Bring the conversation to a saved state; false if that is no state of a chat after all."""
    own = saved.meta["own"]
    offset = own.get("position_offset", 0)
    turns = [
        replace(item.what)  # a copy: what cannot be restored is rebuilt from the log's positions
        for item in said
        if isinstance(item.what, Turn) and not _is_newer(item, saved)
    ]
    for turn in turns:
        turn.move(-offset)
    try:
        config = conversation.cache_config if asked.sizes else _config(saved, conversation)
        state, _, tensors = unpack(saved, config)
        if own.get("system") != conversation.template.system:
            conversation.set_system(own.get("system"))
        conversation.resume(state, config, own.get("num_pinned", 0), turns)
        conversation.num_turns = max(conversation.num_turns, own.get("num_turns", 0))
        if not asked.seed and "random" in tensors:
            conversation.sampler.set_random_state(tensors["random"])
    except Exception as error:  # whatever a file that was made up leads to
        conversation.clear()
        wrong = DamagedError(f"{journal.state_path} is no state of this chat: {error}")
        notices.append(_put_aside(journal, wrong))
        return False
    return True


def _is_newer(item: _Said, saved: SavedState) -> bool:
    """Whether the state has not seen it: a crash came between log and state."""
    last_id = saved.meta["own"].get("last_id")
    return last_id is not None and item.id > last_id


def _catch_up(
    saved: SavedState,
    conversation: Conversation,
    journal: Journal,
    said: Sequence[_Said],
    where: Resumed,
) -> Resumed:
    """Feed what the log has and the state has not seen."""
    notices = list(where.notices)
    if not said and conversation.stream.position:
        notices.append(
            f"the log of session {journal.name} is empty: the model remembers "
            f"{conversation.stream.stats().num_held:,} tokens, whose text is lost"
        )
    newer = [item for item in said if _is_newer(item, saved)]
    if not newer:
        return replace(where, notices=notices)
    _feed(conversation, newer)
    notices.append(f"{_count(newer)} that the saved state had not seen: fed from the log")
    offset = journal.log.next_position() - conversation.stream.position
    return replace(where, offset=offset, notices=notices)


def _rebuild(
    conversation: Conversation, said: Sequence[_Said], end: int, notices: list[str]
) -> int:
    """Feed to a new stream what fits into its window, the newest first.

    Args:
        conversation: A fresh one.
        said: What there is to feed.
        end: Position of the log after it.
        notices: What the user must know, added to.

    Returns:
        Position in the log less position in the stream.
    """
    if not said:
        return end
    config = conversation.cache_config
    room = config.window_size
    if config.policy == "dense":
        room -= len(conversation.template.pinned_ids())
    first = len(said)
    while first and (room := room - conversation.num_tokens(said[first - 1].what)) >= 0:
        first -= 1
    if first == len(said) and config.policy != "dense":
        first -= 1  # one that is larger than the window leaves it as it did
    older = [item.what for item in said[:first] if isinstance(item.what, Turn)]
    conversation.remember(older)
    _feed(conversation, said[first:])
    offset = end - conversation.stream.position
    for turn in older:
        turn.move(-offset)
    notices.append(
        f"the model's memory was rebuilt: {_count(said[first:])} fed from the log, "
        "older text is forgotten"
    )
    return offset


def _feed(conversation: Conversation, said: Sequence[_Said]) -> None:
    for item in said:
        if isinstance(item.what, Turn):
            conversation.replay(item.what)
        else:
            conversation.hear(item.what)


def _count(said: Sequence[_Said]) -> str:
    """How many turns and lines, in words."""
    turns = sum(isinstance(item.what, Turn) for item in said)
    lines = len(said) - turns
    words = [f"{n:,} {what}{'s' * (n != 1)}" for n, what in ((turns, "turn"), (lines, "line")) if n]
    return " and ".join(words) or "no turn"
