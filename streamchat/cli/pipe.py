"""`streamchat pipe`: standard input or files, for ever."""

import re
import sys
from contextlib import ExitStack
from enum import Enum
from io import RawIOBase
from pathlib import Path
from typing import Annotated

import typer

from streamchat.cli.expand import expand
from streamchat.cli.options import (
    CacheOptions,
    JsonOption,
    LoadOptions,
    ModelChoice,
    SamplingOptions,
)
from streamchat.cli.session import ProgramOptions, session_of
from streamchat.cli.settings import Checked
from streamchat.errors import UsageError
from streamchat.ui.console import is_tty

EPILOG = """
Examples:

    whisper-stream -m base.en.bin | streamchat pipe --every 60s

    streamchat pipe lecture.vtt --every 5m --json

    streamchat pipe --mode reply --prompt "Translate to French." < lines.txt

    journalctl -f | streamchat pipe --mode score --json

    streamchat pipe --mode score server.log | sort -rn | head
"""

EVERY = re.compile(r"(\d+)\s*(tok|s|m)")


class Mode(str, Enum):
    """Values of --mode."""

    notes = "notes"
    reply = "reply"
    score = "score"


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
            "score: how surprising each line is, in nats per token.",
        ),
    ] = Mode.notes,
    prompt: Annotated[
        str | None,
        typer.Option(
            envvar="STREAMCHAT_PROMPT",
            metavar="TEXT",
            help="notes, reply: the instruction. It never leaves the model's memory.",
        ),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            envvar="STREAMCHAT_EVERY",
            metavar="N",
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
    messages = session_of(ctx).start(ctx, program)
    sampling_config = sampling.config()
    every_tokens, every_seconds = parse_every(every)
    choice = ModelChoice(model, sizes.config(sizes.policy))
    with ExitStack() as stack:
        inputs = open_inputs(files or [], stack)
        loaded, cache = choice.load(messages, forks=mode is not Mode.score)

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
        )
        if mode is Mode.score:
            return pipe_modes.score(run)
        if mode is Mode.reply:
            return pipe_modes.reply(
                run, prompt, sampling_config, sampling.max_new, sampling.stop or ()
            )
        notes = NotesConfig(
            instruction=prompt or INSTRUCTION,
            max_new_tokens=sampling.max_new,
            every_tokens=every_tokens,
            every_seconds=every_seconds,
            sampling=sampling_config,
            stop=tuple(sampling.stop or ()),
        )
        return pipe_modes.notes(run, notes)


def parse_every(text: str | None) -> tuple[int | None, float | None]:
    """Tokens and seconds of `--every`; one of them, or neither.

    Raises:
        UsageError: If it is neither.
    """
    if text is None:
        return None, None
    match = EVERY.fullmatch(text.strip())
    if match is None or int(match[1]) < 1:
        raise UsageError(f"--every must be like 600tok, 60s or 5m, got '{text}'")
    number = int(match[1])
    if match[2] == "tok":
        return number, None
    return None, number * (60.0 if match[2] == "m" else 1.0)


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
