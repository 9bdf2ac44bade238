"""`streamchat chat`: a conversation without an end."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import RawIOBase
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamchat.cli.options import (
    AUTO,
    NO_END_TOKEN,
    REPEAT_PENALTY_DEFAULT,
    SINKS_DEFAULT,
    WINDOW_DEFAULT,
    ColorChoice,
    ColorOption,
    DebugOption,
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    MaxNewOption,
    MinPOption,
    ModelChoice,
    ModelOption,
    NoSelfCheckOption,
    PolicyOption,
    QuantizeOption,
    QuietOption,
    RemoteCodeOption,
    RepeatPenaltyOption,
    SeedOption,
    SinksOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    WindowOption,
    parse_cache,
    say_if_slow,
    session_of,
)
from streamchat.cli.pipe import open_inputs
from streamchat.cli.session_options import (
    ContinueOption,
    NoLogOption,
    RecallBudgetOption,
    RecallOption,
    SessionOption,
    is_given,
    open_journal,
    remembered,
)
from streamchat.cli.signals import ENDS, HANG_UP, StopRequest
from streamchat.config import SamplingConfig
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


def chat(
    ctx: typer.Context,
    system: Annotated[
        str | None, typer.Option("--system", "-s", help="System prompt; it never leaves the cache.")
    ] = None,
    show_thinking: Annotated[
        bool, typer.Option("--show-thinking", help="Show what the model thinks, dimmed.")
    ] = False,
    session: SessionOption = None,
    continues: ContinueOption = False,
    no_log: NoLogOption = False,
    recall: RecallOption = False,
    recall_budget: RecallBudgetOption = 256,
    model: ModelOption = None,
    sinks: SinksOption = SINKS_DEFAULT,
    window: WindowOption = WINDOW_DEFAULT,
    policy: PolicyOption = "sink",
    temperature: TemperatureOption = DEFAULT_TEMPERATURE,
    top_p: TopPOption = DEFAULT_TOP_P,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    repeat_penalty: RepeatPenaltyOption = REPEAT_PENALTY_DEFAULT,
    max_new: MaxNewOption = 1024,
    stop: StopOption = None,
    seed: SeedOption = None,
    device: DeviceOption = "auto",
    device_map: DeviceMapOption = "none",
    dtype: DtypeOption = "auto",
    quantize: QuantizeOption = "auto",
    trust_remote_code: RemoteCodeOption = False,
    no_self_check: NoSelfCheckOption = False,
    debug: DebugOption = False,
    quiet: QuietOption = False,
    color: ColorOption = ColorChoice.auto,
) -> int:
    """Talk to a model for as long as you like.

    The newest tokens and the whole system prompt are in the model's memory; what leaves it is said.
    What is said is kept in a session, which a later chat can go on with.
    Standard input that is no terminal is read as turns, one a line.
    """
    state = session_of(ctx)
    messages = state.also(debug=debug, quiet=quiet, color=color)
    options: dict[str, Any] = {
        "model": model,
        "system": system,
        "sinks": sinks,
        "window": window,
        "policy": policy,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repeat_penalty": repeat_penalty,
        "max_new": max_new,
        "stop": stop,
        "seed": seed,
        "device": device,
        "device_map": device_map,
        "dtype": dtype,
        "quantize": quantize,
        "recall": recall,
        "recall_budget": recall_budget,
    }
    sampling_of(options)  # what is wrong with the options is told before anything is written
    parse_cache(sinks, window, policy)
    with ExitStack() as stack:
        inputs = [] if is_tty(sys.stdin) else open_inputs([], stack)
        journal = open_journal(session, continues=continues, no_log=no_log, messages=messages)
        if journal is not None:
            stack.callback(journal.close)
        options = remembered(ctx, journal, options)
        sizes = {"sinks": sinks, "window": window, "policy": policy}
        given = [value for name, value in sizes.items() if is_given(ctx, name)]
        # What is chosen for the model may be another size today.
        asked = (bool(given) and AUTO not in given, is_given(ctx, "system"), is_given(ctx, "seed"))

        def load(where: Messages) -> "tuple[ChatSession, list[str]]":
            conversation = _load(
                options,
                where,
                trust_remote_code=trust_remote_code,
                no_self_check=no_self_check,
            )
            from streamchat.chat.resume import Asked
            from streamchat.chat.session import ChatSession

            kept = ChatSession(
                conversation,
                journal,
                recalls=options["recall"],
                recall_budget=options["recall_budget"],
            )
            return kept, kept.resume(Asked(*asked))

        if is_tty(sys.stdin):
            silent = Messages(state.color.value, quiet=True)
            return _interactive(
                lambda: load(silent),
                messages,
                state.color,
                show_thinking=show_thinking,
                keeps=journal is not None,
            )
        return _from_lines(lambda: load(messages), inputs, messages)


def sampling_of(options: dict[str, Any]) -> SamplingConfig:
    """How answers are sampled.

    Raises:
        ConfigError: If a value is out of range.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    return SamplingConfig(
        **{name: options[name] for name in names}, repetition_penalty=options["repeat_penalty"]
    )


def _load(
    options: dict[str, Any], messages: Messages, *, trust_remote_code: bool, no_self_check: bool
) -> "Conversation":
    sampling = sampling_of(options)
    cache = parse_cache(options["sinks"], options["window"], options["policy"])
    choice = ModelChoice(
        options["model"],
        cache,
        options["device"],
        options["dtype"],
        options["quantize"],
        trust_remote_code,
        no_self_check,
        options["device_map"],
    )
    loaded, cache = choice.load(messages)
    from streamchat.chat.conversation import Conversation

    return Conversation(
        loaded,
        system=options["system"],
        cache=cache,
        sampling=sampling,
        max_new_tokens=options["max_new"],
        stop=options["stop"] or (),
    )


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
    turns = f"{number:,} turn{'s' * (number != 1)}" if number else "new"
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
    from streamchat.pipe.turns import whole_lines
    from streamchat.ui.output import Output

    reader, output = Reader(inputs), Output()
    stop = StopRequest(reader.stop, (*ENDS, *HANG_UPS))
    try:
        for turn in whole_lines(reader, stop):
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
