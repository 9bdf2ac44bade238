"""What holds for one run of the program, wherever it was said."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Any

import typer

from streamchat.cli.config_file import ConfigFile, load
from streamchat.cli.settings import Setting
from streamchat.ui import console, theme
from streamchat.ui.console import Messages


class ColorChoice(str, Enum):
    """Values of --color."""

    auto = "auto"
    always = "always"
    never = "never"


def was_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option was given on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def is_default(ctx: typer.Context, name: str) -> bool:
    """Whether nobody has said what an option is: not on the line, nor elsewhere."""
    source = ctx.get_parameter_source(name)
    return source is None or source.name == "DEFAULT"


def _debug(ctx: typer.Context, value: bool) -> bool:
    """Known before other options are looked at, so that an error in them has its traceback."""
    program_of(ctx).note_debug(value, is_given=was_given(ctx, "debug"))
    return value


def _config(ctx: typer.Context, value: bool) -> bool:
    """Before the other options of a command: what the settings file says holds where they do not.

    Not for the program itself, so that its other commands can mend a file that is wrong.
    """
    program = program_of(ctx)
    program.reads_config &= not value
    if ctx.parent is not None and program.reads_config and not ctx.resilient_parsing:
        program.config = load(program.table)
        _, *words = ctx.command_path.split()
        ctx.default_map = program.config.defaults.get(" ".join(words), {})
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOptions:
    """Options of every command, which may also stand in front of it."""

    # First, so that the file may set --debug.
    no_config: Annotated[
        bool,
        typer.Option("--no-config", is_eager=True, callback=_config, help="Read no settings file."),
    ] = False
    debug: Annotated[
        bool,
        typer.Option(
            "--debug/--no-debug",
            show_default=False,
            envvar="STREAMCHAT_DEBUG",
            is_eager=True,
            callback=_debug,
            help="Show the traceback of an error.",
        ),
    ] = False
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet/--no-quiet",
            "-q",
            show_default=False,
            envvar="STREAMCHAT_QUIET",
            help="Nothing on stderr but errors.",
        ),
    ] = False
    color: Annotated[
        ColorChoice,
        typer.Option(envvar="STREAMCHAT_COLOR", help="Colours on the terminal."),
    ] = ColorChoice.auto
    plain: Annotated[
        bool,
        typer.Option(
            "--plain/--no-plain",
            show_default=False,
            envvar="STREAMCHAT_PLAIN",
            help="Words only, as for a screen reader: nothing is redrawn, no boxes, no bars.",
        ),
    ] = False


@dataclass(slots=True)
class Program:
    """One run of the program.

    Attributes:
        table: The settings of each command, for the settings file.
        debug: Whether an error has its traceback.
        options: What holds.
        config: The settings file, once a command has read it.
        given: Flags, in front of the command or behind it.
        reads_config: Whether there may be one.
    """

    table: Mapping[str, Sequence[Setting]] = field(default_factory=dict)
    debug: bool = False
    options: ProgramOptions = field(default_factory=ProgramOptions)
    config: ConfigFile = field(default_factory=ConfigFile)
    reads_config: bool = True
    given: dict[str, Any] = field(default_factory=dict)

    def start(self, ctx: typer.Context, options: ProgramOptions) -> Messages:
        """Add what a command was told itself; returns where to write messages.

        A flag in front of the command is one like behind it; of both, the one behind it wins.
        """
        for name in ("quiet", "color", "plain"):
            if was_given(ctx, name):
                self.given[name] = getattr(options, name)
        self.options = replace(options, **self.given)
        console.set_plain(self.options.plain)
        theme.use(self.config.styles)
        return self.messages()

    def note_debug(self, debug: bool, *, is_given: bool) -> None:
        """Add what is said about --debug; a flag wins over the environment."""
        if is_given:
            self.given["debug"] = debug
        self.debug = self.given.get("debug", debug)

    @property
    def color(self) -> ColorChoice:
        """The colour rule."""
        return self.options.color

    def messages(self) -> Messages:
        """Messages by these rules."""
        return Messages(self.options.color.value, quiet=self.options.quiet)


def program_of(ctx: typer.Context) -> Program:
    """What holds for this run."""
    found: Any = ctx.obj
    return found if isinstance(found, Program) else Program()
