"""The Typer application, and the one place where errors become exit codes."""

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.models import CommandInfo

import streamchat
from streamchat.cli import bench, chat, config, info, pipe, sessions
from streamchat.cli.expand import expand
from streamchat.cli.program import Program, ProgramOptions
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
129 hung up, 130 interrupted, 143 terminated.
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
app.add_typer(sessions.app)
app.command("info", epilog=info.EPILOG)(info.info)
app.add_typer(config.app)


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
    state: Program = ctx.obj
    state.start(ctx, program)
    if ctx.invoked_subcommand is None:
        sys.stdout.write(ctx.get_help() + "\n")
    return 0


def run(args: Sequence[str]) -> int:
    """Run the command line.

    Returns:
        The exit code.
    """
    program = Program(table=table())
    try:
        result = app(args=list(args), standalone_mode=False, obj=program, prog_name="streamchat")
        return result if isinstance(result, int) else 0
    except ReaderGone:
        return 0
    except SystemExit as request:
        # help leaves like this where its reader has had enough (--help | head).
        return 0 if isinstance(request.__context__, BrokenPipeError) else _exit_code(request)
    except StreamchatError as error:
        return _fail(program, str(error), error.exit_code)
    except ClickUsageError as error:
        message = error.format_message().replace("Value error, ", "")
        return _fail(program, f"{message} (see --help)", UsageError.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(program, "interrupted", INTERRUPTED)
    except Exception as error:  # a bug of ours; still no traceback for a user who did not ask
        if start_interrupt.has_come:  # or what an interrupted import left half done
            return _fail(program, "interrupted", INTERRUPTED)
        return _fail(program, f"internal error: {type(error).__name__}: {error} (see --debug)", 1)


def commands() -> dict[str, CommandInfo]:
    """Every command, those in groups included, by what is typed to call it."""
    found = {str(command.name): command for command in app.registered_commands}
    for group in app.registered_groups:
        if group.typer_instance is not None:
            for command in group.typer_instance.registered_commands:
                found[f"{group.typer_instance.info.name} {command.name}"] = command
    return found


def table() -> dict[str, list[Setting]]:
    """The settings of each command, by what is typed to call it."""
    return {
        name: settings_of(command.callback)
        for name, command in commands().items()
        if command.callback is not None
    }


def _exit_code(request: SystemExit) -> int:
    return request.code if isinstance(request.code, int) else int(request.code is not None)


def _fail(program: Program, message: str, code: int) -> int:
    if program.debug:
        traceback.print_exc()
    program.messages().error(message)
    return code
