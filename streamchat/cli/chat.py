"""`streamchat chat`: a conversation without an end."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, replace
from io import RawIOBase
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from streamchat.cli.expand import expand
from streamchat.cli.options import (
    AUTO,
    NO_END_TOKEN,
    CacheOptions,
    LoadOptions,
    ModelChoice,
    SamplingOptions,
    say_if_slow,
)
from streamchat.cli.pipe import open_inputs
from streamchat.cli.program import ColorChoice, ProgramOptions, program_of, was_given
from streamchat.cli.session_options import (
    ContinueOption,
    NoLogOption,
    RecallBudgetOption,
    RecallModelOption,
    RecallOption,
    SessionOption,
    open_journal,
    remembered,
)
from streamchat.cli.signals import ENDS, HANG_UP, StopRequest
from streamchat.events import PassagesRecalled, TextDelta, TurnsEvicted
from streamchat.ui.console import Messages, is_tty, make_console
from streamchat.ui.lines import turns_evicted

if TYPE_CHECKING:
    from streamchat.chat.conversation import Conversation
    from streamchat.chat.session import ChatSession
    from streamchat.ui.output import Output

EPILOG = """
Examples:

    streamchat chat

    streamchat chat -s "You answer in one short sentence." --window 4092

    streamchat chat --continue --recall

    printf 'Hello\\nWhat is the capital of France?\\n' | streamchat chat
"""

# Ctrl-C belongs to whoever reads the keys.
HANG_UPS = () if HANG_UP is None else (HANG_UP,)
LEAVES = (signal.SIGTERM, *HANG_UPS)

DEFAULT_TEMPERATURE = 0.7
DEFAULT_TOP_P = 0.9

Options = TypeVar("Options", LoadOptions, CacheOptions, SamplingOptions)

SAID_EACH_TIME = ("trust_remote_code", "no_self_check")
"""Options that no session remembers."""


@expand(temperature=DEFAULT_TEMPERATURE, top_p=DEFAULT_TOP_P)
def chat(
    ctx: typer.Context,
    system: Annotated[
        str | None,
        typer.Option(
            "--system",
            "-s",
            envvar="STREAMCHAT_SYSTEM",
            metavar="TEXT",
            help="System prompt; it never leaves the cache.",
        ),
    ] = None,
    show_thinking: Annotated[
        bool,
        typer.Option(
            "--show-thinking/--no-show-thinking",
            envvar="STREAMCHAT_SHOW_THINKING",
            show_default=False,
            help="Show what the model thinks, dimmed.",
        ),
    ] = False,
    markdown: Annotated[
        bool,
        typer.Option(
            "--markdown/--no-markdown",
            envvar="STREAMCHAT_MARKDOWN",
            help="Style answers as Markdown; only on a terminal, and not with --plain.",
        ),
    ] = True,
    session: SessionOption = None,
    continues: ContinueOption = False,
    no_log: NoLogOption = False,
    recall: RecallOption = False,
    recall_budget: RecallBudgetOption = 256,
    recall_model: RecallModelOption = None,
    *,
    model: LoadOptions,
    sizes: CacheOptions,
    sampling: SamplingOptions,
    program: ProgramOptions,
) -> int:
    """Talk to a model for as long as you like.

    The newest tokens and the whole system prompt are in the model's memory; what leaves it is said.
    What is said is kept in a session, which a later chat can go on with.
    Standard input that is no terminal is read as turns, one a line.
    """
    state = program_of(ctx)
    messages = state.start(ctx, program)
    options: dict[str, Any] = {
        "system": system,
        "recall": recall,
        "recall_budget": recall_budget,
        "recall_model": recall_model,
        **asdict(model),
        **asdict(sizes),
        **asdict(sampling),
    }
    options = {name: value for name, value in options.items() if name not in SAID_EACH_TIME}
    # What is wrong with the options is told before anything is written.
    sampling.config()
    sizes.config(sizes.policy)
    if recall_model:
        from streamchat.chat.embedder import check_library

        check_library()
    with ExitStack() as stack:
        inputs = [] if is_tty(sys.stdin) else open_inputs([], stack)
        journal = open_journal(session, continues=continues, no_log=no_log, messages=messages)
        if journal is not None:
            stack.callback(journal.close)
        options = remembered(ctx, journal, options)
        given = [value for name, value in asdict(sizes).items() if was_given(ctx, name)]
        # What is chosen for the model may be another size today.
        asked = (
            bool(given) and AUTO not in given,
            was_given(ctx, "system"),
            was_given(ctx, "seed"),
        )

        def load(where: Messages) -> "tuple[ChatSession, list[str]]":
            sampled, chosen = _with(sampling, options), _with(sizes, options)
            embedder = None
            if options["recall_model"] and journal is not None:
                from streamchat.chat.embedder import load_embedder

                embedder = load_embedder(options["recall_model"])
            choice = ModelChoice(_with(model, options), chosen.config(chosen.policy))
            loaded, cache = choice.load(where)
            from streamchat.chat.conversation import Conversation
            from streamchat.chat.resume import Asked
            from streamchat.chat.session import ChatSession

            conversation = Conversation(
                loaded,
                system=options["system"],
                cache=cache,
                sampling=sampled.config(),
                max_new_tokens=sampled.max_new,
                stop=sampled.stop or (),
            )
            kept = ChatSession(
                conversation,
                journal,
                recalls=options["recall"],
                recall_budget=options["recall_budget"],
                embedder=embedder,
            )
            return kept, kept.resume(Asked(*asked))

        if is_tty(sys.stdin):
            silent = Messages(state.color.value, quiet=True)
            return _interactive(
                lambda: load(silent),
                messages,
                state.color,
                show_thinking=show_thinking,
                markdown=markdown,
                keeps=journal is not None,
            )
        return _from_lines(lambda: load(messages), inputs, messages)


def _with(group: Options, options: dict[str, Any]) -> Options:
    """A group of options with what a session remembers."""
    return replace(group, **{f.name: options[f.name] for f in fields(group) if f.name in options})


def announce(chat: "ChatSession", notices: list[str], messages: Messages) -> None:
    """Say what is loaded, which session it is, and what was lost of it."""
    messages.say(f"{header(chat.conversation)}; {_session(chat)}")
    for notice in notices:
        messages.error(notice)


def _session(chat: "ChatSession") -> str:
    """Which session a chat is kept in, in words."""
    if chat.journal is None:
        return "not logged"
    number = chat.journal.log.num_passages("user")
    turns = f"{number:,} turn{'s' * (number != 1)}"
    if not number:  # what was listened to has no turns
        heard = chat.journal.log.num_passages()
        turns = f"{heard:,} passages heard" if heard else "new"
    return f"session {chat.name} ({turns})"


def header(conversation: "Conversation") -> str:
    """What is loaded, and what the model's memory is."""
    config = conversation.cache_config
    folded = conversation.template.segments.folds_system
    note = "; the template has no system role: the system prompt opens the first turn"
    if config.policy == "dense":
        note = ""
    elif not config.pins:
        note = "; no sinks: the system prompt leaves the memory like anything else"
    elif not folded:
        note = (
            "" if conversation.template.has_template else "; no chat template: plain User/Assistant"
        )
    if not conversation.loaded.end_ids:
        note += NO_END_TOKEN
    return (
        f"{conversation.loaded.source.name} on {conversation.loaded.device.type}, "
        f"{config.describe()}{note}"
    )


def _interactive(
    load: "Callable[[], tuple[ChatSession, list[str]]]",
    messages: Messages,
    color: ColorChoice,
    *,
    show_thinking: bool,
    markdown: bool,
    keeps: bool,
) -> int:
    from streamchat.ui.output import Output
    from streamchat.ui.repl import Repl

    on_stdout = is_tty(sys.stdout)
    console = make_console(color.value, stderr=not on_stdout)

    notices: list[str] = []

    def start() -> "ChatSession":
        chat, lost = load()
        notices.extend(lost)
        return chat

    def started(chat: "ChatSession") -> None:
        announce(chat, notices, messages)
        say_if_slow(chat.conversation.loaded, messages)

    repl = Repl(
        start,
        console,
        answers=None if on_stdout else Output(),
        announce=started,
        show_thinking=show_thinking,
        markdown=markdown,
        interruptible=interruptible,
        keeps_history=keeps,
    )
    end = StopRequest(repl.leave, LEAVES)
    try:
        repl.run()
    except OSError:
        if end.exit_code is None:  # else the terminal is gone
            raise
    finally:
        for error in repl.close():
            messages.error(error)
    return end.exit_code or 0


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """SIGINT sets a flag instead of raising: a token that has begun is finished."""
    happened = False

    def handle(*_: object) -> None:
        nonlocal happened
        happened = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: happened
    finally:
        signal.signal(signal.SIGINT, before)


def _from_lines(
    load: "Callable[[], tuple[ChatSession, list[str]]]",
    inputs: list[RawIOBase],
    messages: Messages,
) -> int:
    """Read turns from standard input, one a line; answers go to standard output as they come."""
    chat, notices = load()
    announce(chat, notices, messages)

    from streamchat.pipe.reader import Reader
    from streamchat.pipe.turns import units
    from streamchat.ui.output import Output

    reader, output = Reader(inputs), Output()
    stop = StopRequest(reader.stop, (*ENDS, *HANG_UPS))
    try:
        for turn in units(reader, stop):
            if turn is None:
                output.check_reader()
            elif turn.text.strip():
                _write_answer(chat, turn.text, output, messages, stop)
    finally:
        reader.stop()
        chat.close()
        for error in chat.take_errors():
            messages.error(error)
    return stop.exit_code or 0


def _write_answer(
    chat: "ChatSession",
    question: str,
    output: "Output",
    messages: Messages,
    should_stop: Callable[[], bool],
) -> None:
    events = chat.say(question)
    try:
        for event in events:
            if isinstance(event, TextDelta):
                output.write(event.text)
            elif isinstance(event, TurnsEvicted):
                messages.say(turns_evicted(event))
            elif isinstance(event, PassagesRecalled):
                messages.say(f"told again: {event.text}")
            if should_stop():
                break
    finally:
        events.close()
    output.line("")
    for error in chat.take_errors():
        messages.error(error)
