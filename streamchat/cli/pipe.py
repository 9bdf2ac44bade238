"""`streamchat pipe`: standard input or files, for ever."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from enum import Enum
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamchat.cli.expand import expand
from streamchat.cli.options import (
    CacheOptions,
    JsonOption,
    LoadOptions,
    ModelChoice,
    SamplingOptions,
)
from streamchat.cli.pipe_options import (
    MODES_OF,
    LiveOptions,
    NotesOptions,
    TriggerOptions,
    check_mode,
)
from streamchat.cli.program import ProgramOptions, is_default, program_of, was_given
from streamchat.cli.recipes import RECIPES
from streamchat.cli.recipes import find as find_recipe
from streamchat.cli.settings import Checked
from streamchat.errors import UsageError
from streamchat.pipe.interval import Interval
from streamchat.ui.console import is_tty
from streamchat.ui.typed import Typed

if TYPE_CHECKING:
    from streamchat.cli.pipe_saving import Saving

EPILOG = """
Examples:

    whisper-stream -m base.en.bin | streamchat pipe --every 60s

    streamchat pipe lecture.vtt --every 5m --json

    streamchat pipe --mode reply --prompt "Translate to French." < lines.txt

    journalctl -f | streamchat pipe --mode score --json

    streamchat pipe --mode score big.log --session log --resume >> scores.txt

    streamchat pipe --mode score server.log | sort -rn | head

    journalctl -f | streamchat pipe --mode filter --min 3sd

    streamchat pipe --prompt @translate:French --by turn --json film.vtt

    streamchat pipe standup.vtt --prompt @minutes --every 5m --roll-up 1h
"""


class Mode(str, Enum):
    """Values of --mode."""

    notes = "notes"
    reply = "reply"
    score = "score"
    filter = "filter"
    listen = "listen"


class InputFormat(str, Enum):
    """Values of --format: auto, and the names of `pipe.formats.table`."""

    auto = "auto"
    plain = "plain"
    srt = "srt"
    webvtt = "webvtt"
    whisper_cpp = "whisper.cpp"
    whisper = "whisper"
    whisper_streaming = "whisper-streaming"
    jsonl = "jsonl"


@expand(max_new=128)
def pipe(
    ctx: typer.Context,
    files: Annotated[
        list[str] | None, typer.Argument(help="Read these instead of standard input (- is it).")
    ] = None,
    mode: Annotated[
        Mode,
        typer.Option(
            envvar="STREAMCHAT_MODE",
            metavar="MODE",
            help="notes: running notes, each before its text leaves the memory. "
            "reply: an answer for each line. "
            "score: how surprising each line is, in nats per token. "
            "filter: the surprising lines alone. "
            "listen: only remember, for chat --session.",
        ),
    ] = Mode.notes,
    prompt: Annotated[
        str | None,
        typer.Option(
            envvar="STREAMCHAT_PROMPT",
            metavar="TEXT",
            help="notes, reply, listen: the instruction. It never leaves the model's memory. "
            "@NAME is a recipe, from the settings' [prompts] or one of "
            f"{', '.join(f'@{name}' for name in RECIPES)}.",
        ),
    ] = None,
    input_format: Annotated[
        InputFormat,
        typer.Option(
            "--format",
            envvar="STREAMCHAT_FORMAT",
            metavar="FORMAT",
            help=f"What the input is: {', '.join(f.value for f in InputFormat if f != 'auto')}; "
            "auto finds out from its first lines.",
        ),
    ] = InputFormat.auto,
    json: JsonOption = False,
    session: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Save how far it is under this name, now and then."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from where --session was saved last.")
    ] = False,
    save_every: Annotated[
        str,
        typer.Option(
            envvar="STREAMCHAT_SAVE_EVERY",
            metavar="TIME",
            help="--session: how often, as 600tok, 60s or 5m.",
        ),
        Checked(lambda text: Interval.parse(text, "--save-every")),
    ] = "60s",
    *,
    triggers: TriggerOptions,
    notes: NotesOptions,
    live: LiveOptions,
    model: LoadOptions,
    sizes: CacheOptions,
    sampling: SamplingOptions,
    program: ProgramOptions,
) -> int:
    """Read text that never ends, and answer before its end.

    Results are written as soon as they are there. Data goes to standard output, everything else to
    standard error. Ctrl-C stops reading and finishes what is in hand; a second one stops at once.
    """
    messages = program_of(ctx).start(ctx, program)
    cache, sampling_config = sizes.config(sizes.policy), sampling.config()
    max_new, stop = sampling.max_new, sampling.stop or []
    interval = Interval.parse(save_every, "--save-every")
    recipe = find_recipe(prompt, program_of(ctx).config.prompts)
    if recipe.mode is not None and is_default(ctx, "mode"):
        mode = Mode(recipe.mode)
    check_mode(mode.value, [name for name in MODES_OF if was_given(ctx, name)], live.when_behind)
    instruction = recipe.text or None
    # All of these before anything slow: they may be wrong.
    every, idle_seconds, levels = triggers.interval, triggers.idle_seconds, notes.levels
    threshold = triggers.threshold if mode is Mode.filter else None
    drops_at, skips_at = live.max_lag_for("drop"), live.max_lag_for("skip-notes")
    if session is None and (resume or mode is Mode.listen):
        raise UsageError(f"{'--resume' if resume else '--mode listen'} needs --session NAME")
    with ExitStack() as stack:
        inputs = open_inputs(files or [], stack)
        saving = None
        if session is not None:
            options = {
                "--format": input_format.value,
                "--json": json,
                "--prompt": instruction,
                "--every": triggers.every,
                "--idle": triggers.idle,
                "--on-turn": triggers.on_turn,
                "--by": triggers.by,
                "--min": triggers.minimum,
                "--carry": notes.carry,
                "--roll-up": notes.roll_up,
                "--max-new": max_new,
                "--stop": sampling.stop,
                **asdict(sampling_config),
            }
            saving = open_session(session, options, interval, inputs, stack, resume=resume)
            cache = saving.sized(cache)
        typed = stack.enter_context(Typed()) if live.ask else None
        choice = ModelChoice(model, cache)
        # A snapshot on its way to the disk takes as much as a fork.
        forks = session is not None or mode not in (Mode.score, Mode.filter)
        loaded, cache = choice.load(messages, forks=forks)

        from streamchat.chat.conversation import Conversation
        from streamchat.cli import pipe_modes
        from streamchat.pipe.notes import INSTRUCTION, NotesConfig
        from streamchat.pipe.turns import IDLE_SECONDS

        run = pipe_modes.Run(
            mode=mode.value,
            loaded=loaded,
            cache=cache,
            inputs=inputs,
            names=files or ["-"],
            input_format=input_format.value,
            messages=messages,
            as_json=json,
            saving=saving,
            typed=typed,
            max_lag=drops_at,
        )
        if mode in (Mode.score, Mode.filter):
            return pipe_modes.score(run, threshold)
        if mode is Mode.listen:
            return pipe_modes.listen(run, instruction, sampling_config, max_new, stop)
        if mode is Mode.reply:
            conversation = Conversation(
                loaded,
                system=instruction,
                cache=cache,
                sampling=sampling_config,
                max_new_tokens=max_new,
                stop=stop,
            )
            return pipe_modes.reply(run, conversation, triggers.by, idle_seconds or IDLE_SECONDS)
        config = NotesConfig(
            instruction=instruction or INSTRUCTION,
            max_new_tokens=max_new,
            every=every,
            idle_seconds=idle_seconds,
            on_turn=triggers.on_turn,
            carry=notes.carry,
            roll_up=levels,
            max_lag=skips_at,
            sampling=sampling_config,
            stop=tuple(stop),
        )
        return pipe_modes.notes(run, config)


def open_session(
    name: str,
    options: Mapping[str, Any],
    interval: Interval,
    inputs: Sequence[RawIOBase],
    stack: ExitStack,
    *,
    resume: bool,
) -> "Saving":
    """Open a session, and read its checkpoint, before the model is loaded.

    Raises:
        UsageError: If there is a checkpoint and the user does not want to go on from it, or some
            inputs are files and some are not.
        SessionError: If another process has the session open, or it is damaged.
    """
    from streamchat.cli.pipe_saving import Saving
    from streamchat.pipe.checkpoint import find as find_checkpoint
    from streamchat.pipe.reader import is_file
    from streamchat.store.folder import Sessions

    kinds = {is_file(file) for file in inputs}
    if len(kinds) > 1:
        raise UsageError("--session takes files, or what comes through a pipe, but not both")
    session = stack.enter_context(Sessions().open(name))
    saved = find_checkpoint(session, resume=resume)
    return Saving(session, saved, dict(options), interval, is_live=kinds == {False})


def open_inputs(names: list[str], stack: ExitStack) -> list[RawIOBase]:
    """Open the inputs before anything slow happens.

    Raises:
        UsageError: If one is missing, or standard input is a terminal or closed.
    """
    opened: list[RawIOBase] = []
    for name in names or ["-"]:
        if name == "-":
            opened.append(_open_stdin())
            continue
        path = Path(name)
        if path.is_dir():
            raise UsageError(f"{name} is a folder; expected a file")
        try:
            opened.append(stack.enter_context(path.open("rb", buffering=0)))
        except OSError as error:
            raise UsageError(f"cannot read {name}: {error.strerror}") from error
    return opened


def _open_stdin() -> RawIOBase:
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError("standard input is closed: pipe text in, or name a FILE")
    if is_tty(sys.stdin):
        raise UsageError(
            "nothing to read: pipe text in (COMMAND | streamchat pipe), or name a FILE; "
            "streamchat pipe --help shows more"
        )
    # A second, unbuffered file on the same descriptor: what has arrived is read at once.
    return open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
