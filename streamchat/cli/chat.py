"""`streamchat chat`: a conversation without an end."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from streamchat.cli.expand import expand
from streamchat.cli.options import (
    NO_END_TOKEN,
    CacheOptions,
    LoadOptions,
    ModelChoice,
    SamplingOptions,
    say_if_slow,
)
from streamchat.cli.pipe import open_inputs
from streamchat.cli.session import ColorChoice, ProgramOptions, session_of
from streamchat.cli.signals import StopRequest
from streamchat.events import TextDelta, TurnsEvicted
from streamchat.ui.console import Messages, is_tty, make_console
from streamchat.ui.lines import turns_evicted

if TYPE_CHECKING:
    from streamchat.chat.conversation import Conversation
    from streamchat.ui.output import Output

EPILOG = """
Examples:

    streamchat chat

    streamchat chat -s "You answer in one short sentence." --window 4092

    printf 'Hello\\nWhat is the capital of France?\\n' | streamchat chat
"""

DEFAULT_TEMPERATURE = 0.7
DEFAULT_TOP_P = 0.9


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
            show_default=False,
            envvar="STREAMCHAT_SHOW_THINKING",
            help="Show what the model thinks, dimmed.",
        ),
    ] = False,
    *,
    model: LoadOptions,
    sizes: CacheOptions,
    sampling: SamplingOptions,
    program: ProgramOptions,
) -> int:
    """Talk to a model for as long as you like.

    The newest tokens and the whole system prompt are in the model's memory; what leaves it is said.
    Standard input that is no terminal is read as turns, one a line.
    """
    session = session_of(ctx)
    messages = session.start(ctx, program)
    sampling_config = sampling.config()
    choice = ModelChoice(model, sizes.config(sizes.policy))

    def load(where: Messages) -> "Conversation":
        loaded, chosen = choice.load(where)
        from streamchat.chat.conversation import Conversation

        return Conversation(
            loaded,
            system=system,
            cache=chosen,
            sampling=sampling_config,
            max_new_tokens=sampling.max_new,
            stop=sampling.stop or (),
        )

    if is_tty(sys.stdin):
        silent = Messages(session.color.value, quiet=True)
        return _interactive(lambda: load(silent), messages, session.color, show_thinking)
    return _from_lines(load, messages)


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
    load: "Callable[[], Conversation]", messages: Messages, color: ColorChoice, show_thinking: bool
) -> int:
    from streamchat.ui.output import Output
    from streamchat.ui.repl import Repl

    on_stdout = is_tty(sys.stdout)
    console = make_console(color.value, stderr=not on_stdout)

    def announce(conversation: "Conversation") -> None:
        messages.say(header(conversation))
        say_if_slow(conversation.loaded, messages)

    repl = Repl(
        load,
        console,
        answers=None if on_stdout else Output(),
        announce=announce,
        show_thinking=show_thinking,
        interruptible=interruptible,
    )
    repl.run()
    return 0


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


def _from_lines(load: "Callable[[Messages], Conversation]", messages: Messages) -> int:
    """Read turns from standard input, one a line; answers go to standard output as they come."""
    with ExitStack() as stack:
        inputs = open_inputs([], stack)
        conversation = load(messages)
        messages.say(header(conversation))

        from streamchat.pipe.reader import Reader
        from streamchat.pipe.turns import whole_lines
        from streamchat.ui.output import Output

        reader, output = Reader(inputs), Output()
        stop = StopRequest(reader.stop)
        try:
            for turn in whole_lines(reader, stop):
                if turn is None:
                    output.check_reader()
                elif turn.text.strip():
                    _write_answer(conversation, turn.text, output, messages, stop)
        finally:
            reader.stop()
    return stop.exit_code or 0


def _write_answer(
    conversation: "Conversation",
    question: str,
    output: "Output",
    messages: Messages,
    should_stop: Callable[[], bool],
) -> None:
    events = conversation.say(question)
    try:
        for event in events:
            if isinstance(event, TextDelta):
                output.write(event.text)
            elif isinstance(event, TurnsEvicted):
                messages.say(turns_evicted(event))
            if should_stop():
                break
    finally:
        events.close()
    output.line("")
