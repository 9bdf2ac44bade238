"""`streamchat pipe`: standard input or files, for ever."""

import re
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
from streamchat.cli.program import ProgramOptions, program_of
from streamchat.cli.settings import Checked
from streamchat.errors import UsageError
from streamchat.ui.console import is_tty

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
"""

EVERY = re.compile(r"(\d+)\s*(tok|s|m)")


class Mode(str, Enum):
    """Values of --mode."""

    notes = "notes"
    reply = "reply"
    score = "score"
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
            "listen: only remember, for chat --session.",
        ),
    ] = Mode.notes,
    prompt: Annotated[
        str | None,
        typer.Option(
            envvar="STREAMCHAT_PROMPT",
            metavar="TEXT",
            help="notes, reply, listen: the instruction. It never leaves the model's memory.",
        ),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            envvar="STREAMCHAT_EVERY",
            metavar="TIME",
            help="notes: how often, as 600tok, 60s or 5m. Always early enough.",
        ),
        Checked(lambda text: parse_every(text)),
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
        Checked(lambda text: parse_every(text, "--save-every")),
    ] = "60s",
    *,
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
    every_tokens, every_seconds = parse_every(every)
    interval = parse_every(save_every, "--save-every")
    if session is None and (resume or mode is Mode.listen):
        raise UsageError(f"{'--resume' if resume else '--mode listen'} needs --session NAME")
    with ExitStack() as stack:
        inputs = open_inputs(files or [], stack)
        saving = None
        if session is not None:
            options = {
                "--format": input_format.value,
                "--json": json,
                "--prompt": prompt,
                "--every": every,
                "--max-new": max_new,
                "--stop": sampling.stop,
                **asdict(sampling_config),
            }
            saving = open_session(session, options, interval, inputs, stack, resume=resume)
            cache = saving.sized(cache)
        choice = ModelChoice(model, cache)
        # A snapshot on its way to the disk takes as much as a fork.
        forks = session is not None or mode is not Mode.score
        loaded, cache = choice.load(messages, forks=forks)

        from streamchat.cli import pipe_modes
        from streamchat.pipe.notes import INSTRUCTION, NotesConfig

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
        )
        if mode is Mode.score:
            return pipe_modes.score(run)
        if mode is Mode.listen:
            return pipe_modes.listen(run, prompt)
        if mode is Mode.reply:
            return pipe_modes.reply(run, prompt, sampling_config, max_new, stop)
        notes = NotesConfig(
            instruction=prompt or INSTRUCTION,
            max_new_tokens=max_new,
            every_tokens=every_tokens,
            every_seconds=every_seconds,
            sampling=sampling_config,
            stop=tuple(stop),
        )
        return pipe_modes.notes(run, notes)


def parse_every(text: str | None, option: str = "--every") -> tuple[int | None, float | None]:
    """Tokens and seconds of an interval; one of them, or neither.

    Raises:
        UsageError: If it is neither.
    """
    if text is None:
        return None, None
    match = EVERY.fullmatch(text.strip())
    if match is None or int(match[1]) < 1:
        raise UsageError(f"{option} must be like 600tok, 60s or 5m, got '{text}'")
    number = int(match[1])
    if match[2] == "tok":
        return number, None
    return None, number * (60.0 if match[2] == "m" else 1.0)


def open_session(
    name: str,
    options: Mapping[str, Any],
    interval: tuple[int | None, float | None],
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
    from streamchat.pipe.checkpoint import Interval, find
    from streamchat.pipe.reader import is_file
    from streamchat.store.folder import Sessions

    kinds = {is_file(file) for file in inputs}
    if len(kinds) > 1:
        raise UsageError("--session takes files, or what comes through a pipe, but not both")
    session = stack.enter_context(Sessions().open(name))
    saved = find(session, resume=resume)
    return Saving(session, saved, dict(options), Interval(*interval), is_live=kinds == {False})


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
