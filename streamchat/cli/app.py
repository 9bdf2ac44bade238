"""The Typer application, and the one place where errors become exit codes."""

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import streamchat
from streamchat.cli import bench, chat, config, info, pipe
from streamchat.cli.expand import expand
from streamchat.cli.session import ProgramOptions, Session
from streamchat.cli.settings import Setting, settings_of
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

    streamchat config edit

Exit codes: 0 done, 1 failed while running, 2 usage, 3 model cannot be loaded or streamed,
130 interrupted, 143 terminated.
"""

app = typer.Typer(
    name="streamchat",
    help="Conversations and streams that never end, in constant memory.",
    epilog=EPILOG,
    # Rich's boxes leave no room for words in 80 columns, and cut names off.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("chat", epilog=chat.EPILOG)(chat.chat)
app.command("pipe", epilog=pipe.EPILOG)(pipe.pipe)
app.command("bench", epilog=bench.EPILOG)(bench.bench)
app.command("info", epilog=info.EPILOG)(info.info)
app.add_typer(config.app, name="config", epilog=config.EPILOG)


def _print_version(value: bool) -> None:
    if value:
        sys.stdout.write(f"streamchat {streamchat.__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
@expand()
def top(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback does the work
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="The version.")
    ] = False,
    *,
    program: ProgramOptions,
) -> int:
    """Conversations and streams that never end, in constant memory."""
    session: Session = ctx.obj
    session.start(ctx, program)
    if ctx.invoked_subcommand is None:
        sys.stdout.write(ctx.get_help() + "\n")
    return 0


def run(args: Sequence[str]) -> int:
    """Run the command line.

    Returns:
        The exit code.
    """
    session = Session(table=table())
    try:
        result = app(args=list(args), standalone_mode=False, obj=session, prog_name="streamchat")
        return result if isinstance(result, int) else 0
    except ReaderGone:
        return 0
    except SystemExit as request:
        # help leaves like this where its reader has had enough (--help | head).
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


def table() -> dict[str, list[Setting]]:
    """The settings of each command that reads the settings file."""
    return {
        command.name: settings_of(command.callback)
        for command in app.registered_commands
        if command.name and command.callback
    }


def _exit_code(request: SystemExit) -> int:
    return request.code if isinstance(request.code, int) else int(request.code is not None)


def _fail(session: Session, message: str, code: int) -> int:
    if session.debug:
        traceback.print_exc()
    session.messages().error(message)
    return code
