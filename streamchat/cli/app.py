"""The Typer application, and the one place where errors become exit codes."""

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import streamchat
from streamchat.cli import bench, chat, info, pipe
from streamchat.cli.options import ColorChoice, ColorOption, DebugOption, QuietOption, Session
from streamchat.cli.signals import start_interrupt
from streamchat.errors import StreamchatError, UsageError
from streamchat.ui.output import ReaderGone

INTERRUPTED = 130
"""128 + SIGINT."""

# Typer ships its own copy of click since 0.27: reach the base class through a public name.
ClickUsageError: Any = typer.BadParameter.__base__

EPILOG = """
Examples:

    streamchat chat

    streamchat pipe < meeting.txt

    tail -f app.log | streamchat pipe --mode score --json

    streamchat bench

    streamchat info

Exit codes: 0 done, 1 failed while running, 2 usage, 3 model cannot be loaded or streamed,
129 hung up, 130 interrupted, 143 terminated.
"""

app = typer.Typer(
    name="streamchat",
    help="Conversations and streams that never end, in constant memory.",
    epilog=EPILOG,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("chat", epilog=chat.EPILOG)(chat.chat)
app.command("pipe", epilog=pipe.EPILOG)(pipe.pipe)
app.command("bench", epilog=bench.EPILOG)(bench.bench)
app.command("info", epilog=info.EPILOG)(info.info)


def _print_version(value: bool) -> None:
    if value:
        sys.stdout.write(f"streamchat {streamchat.__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def top(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback does the work
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="The version.")
    ] = False,
    debug: DebugOption = False,
    quiet: QuietOption = False,
    color: ColorOption = ColorChoice.auto,
) -> None:
    """Conversations and streams that never end, in constant memory."""
    session: Session = ctx.obj
    session.also(debug=debug, quiet=quiet, color=color)
    if ctx.invoked_subcommand is None:
        sys.stdout.write(ctx.get_help() + "\n")


def run(args: Sequence[str]) -> int:
    """Run the command line.

    Returns:
        The exit code.
    """
    session = Session()
    try:
        result = app(args=list(args), standalone_mode=False, obj=session, prog_name="streamchat")
        return result if isinstance(result, int) else 0
    except ReaderGone:
        return 0
    except SystemExit as request:
        # rich's help leaves like this where its reader has had enough (--help | head).
        return 0 if isinstance(request.__context__, BrokenPipeError) else _exit_code(request)
    except StreamchatError as error:
        return _fail(session, str(error), error.exit_code)
    except ClickUsageError as error:
        message = error.format_message().replace("Value error, ", "")
        return _fail(session, f"{message} (see --help)", UsageError.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(session, "interrupted", INTERRUPTED)
    except Exception as error:  # a bug of ours; still no traceback for a user who did not ask
        if start_interrupt.has_come:  # or what an interrupted import left half done
            return _fail(session, "interrupted", INTERRUPTED)
        return _fail(session, f"internal error: {type(error).__name__}: {error} (see --debug)", 1)


def _exit_code(request: SystemExit) -> int:
    return request.code if isinstance(request.code, int) else int(request.code is not None)


def _fail(session: Session, message: str, code: int) -> int:
    if session.debug:
        traceback.print_exc()
    session.messages().error(message)
    return code
