"""Options that several commands share, and what they make of them."""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamchat.cli.signals import start_interrupt
from streamchat.config import DEFAULT_SINK_SIZE, DEFAULT_WINDOW_SIZE, CacheConfig, Policy
from streamchat.errors import UsageError
from streamchat.ui.console import Messages

if TYPE_CHECKING:
    from streamchat.model.load import LoadedModel


class ColorChoice(str, Enum):
    """Values of --color."""

    auto = "auto"
    always = "always"
    never = "never"


MODEL_HELP = (
    "Hub id, model folder or .gguf file. Default: the built-in SmolLM2-135M-Instruct, fetched once."
)
ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", envvar="STREAMCHAT_MODEL", help=MODEL_HELP)
]
DeviceOption = Annotated[
    str, typer.Option(envvar="STREAMCHAT_DEVICE", help="auto, cpu, cuda, cuda:N or mps.")
]
DeviceMapOption = Annotated[
    str,
    typer.Option(
        "--device-map",
        envvar="STREAMCHAT_DEVICE_MAP",
        help="For a model larger than one device: auto puts its layers on all GPUs, then in main "
        "memory, then on disk; also balanced, sequential; none.",
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        envvar="STREAMCHAT_DTYPE",
        help="auto (float32 on a CPU, else 16-bit), float32, bfloat16 or float16.",
    ),
]
QuantizeOption = Annotated[
    str,
    typer.Option(
        envvar="STREAMCHAT_QUANTIZE",
        help="Weights in int8, int4 or none (as --dtype says); auto: int8 on a CPU.",
    ),
]
SinksOption = Annotated[
    str,
    typer.Option(
        envvar="STREAMCHAT_SINKS",
        metavar="N|auto",
        help="First tokens that are kept for ever; 0 makes a plain sliding window. auto: 4, or "
        "none beyond the system prompt if the model has learned sinks of its own.",
    ),
]
WindowOption = Annotated[
    str,
    typer.Option(
        envvar="STREAMCHAT_WINDOW",
        metavar="N|auto",
        help="Newest tokens that are kept, sinks apart; auto: as many as the model was trained for "
        "and memory has room for.",
    ),
]
PolicyOption = Annotated[
    Policy,
    typer.Option(
        envvar="STREAMCHAT_POLICY",
        help="Which tokens stay: the first and the newest (sink), the newest (window), the newest, "
        "computed anew at each step (recompute), all until the trained length or memory ends "
        "(dense), or those that draw most attention (h2o, snapkv). Sinks and window together are "
        "the size of the cache, whatever the policy.",
    ),
]
RemoteCodeOption = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Let code from the model's repository run."),
]
NoSelfCheckOption = Annotated[
    bool,
    typer.Option(
        "--no-self-check",
        help="Load without checking that the model streams exactly: what it says may be rubbish.",
    ),
]
TemperatureOption = Annotated[
    float,
    typer.Option(envvar="STREAMCHAT_TEMPERATURE", help="0 takes the most likely token each time."),
]
TopPOption = Annotated[
    float,
    typer.Option(envvar="STREAMCHAT_TOP_P", help="Smallest set of tokens with this probability."),
]
TopKOption = Annotated[
    int, typer.Option(envvar="STREAMCHAT_TOP_K", help="The k most likely tokens; 0 takes all.")
]
MinPOption = Annotated[
    float,
    typer.Option(envvar="STREAMCHAT_MIN_P", help="Tokens this likely relative to the most likely."),
]
RepeatPenaltyOption = Annotated[
    float,
    typer.Option(
        envvar="STREAMCHAT_REPEAT_PENALTY",
        help="Above 1 makes the newest 256 tokens less likely to come again.",
    ),
]
MaxNewOption = Annotated[
    int, typer.Option(min=1, envvar="STREAMCHAT_MAX_NEW", help="Tokens of an answer at most.")
]
StopOption = Annotated[
    list[str] | None, typer.Option(help="Text that ends an answer; may be given several times.")
]
SeedOption = Annotated[
    int | None, typer.Option(envvar="STREAMCHAT_SEED", help="Seed of the sampler.")
]
DebugOption = Annotated[
    bool, typer.Option("--debug", envvar="STREAMCHAT_DEBUG", help="Show the traceback of an error.")
]
QuietOption = Annotated[
    bool,
    typer.Option("--quiet", "-q", envvar="STREAMCHAT_QUIET", help="Nothing on stderr but errors."),
]
ColorOption = Annotated[
    ColorChoice,
    typer.Option(envvar="STREAMCHAT_COLOR", help="Colours on the terminal."),
]

AUTO = "auto"
SINKS_DEFAULT, WINDOW_DEFAULT = AUTO, str(DEFAULT_WINDOW_SIZE)

NO_END_TOKEN = "; it names no end token: answers end at --max-new"

REPEAT_PENALTY_DEFAULT = 1.1
"""Small models fall into loops without one."""


@dataclass(slots=True)
class Session:
    """What holds for one run of the program, wherever on the command line it was said."""

    debug: bool = False
    quiet: bool = False
    color: ColorChoice = ColorChoice.auto

    def also(self, *, debug: bool, quiet: bool, color: ColorChoice) -> Messages:
        """Add what a command was told itself; returns where to write messages."""
        self.debug |= debug
        self.quiet |= quiet
        if color is not ColorChoice.auto:
            self.color = color
        return self.messages()

    def messages(self) -> Messages:
        """Messages by these rules."""
        return Messages(self.color.value, quiet=self.quiet)


def parse_cache(sinks: str, window: str, policy: Policy = "sink") -> CacheConfig:
    """Policy and sizes of the cache; with auto the default ones, until the model is known.

    Raises:
        UsageError: If one is neither a number of tokens nor auto.
    """
    sink_size, window_size = _size("--sinks", sinks, 0), _size("--window", window, 1)
    return CacheConfig(
        sink_size=DEFAULT_SINK_SIZE if sink_size is None else sink_size,
        window_size=DEFAULT_WINDOW_SIZE if window_size is None else window_size,
        is_auto=window_size is None,
        has_auto_sinks=sink_size is None,
        policy=policy,
    )


def _size(option: str, text: str, least: int) -> int | None:
    """A number of tokens; None for auto."""
    stripped = text.strip()
    if stripped == AUTO:
        return None
    if stripped.isascii() and stripped.isdigit() and int(stripped) >= least:
        return int(stripped)
    raise UsageError(f"{option} must be auto or a number of tokens from {least} on, got '{text}'")


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model options of a command."""

    model: str | None
    cache: CacheConfig
    device: str
    dtype: str
    quantize: str
    trust_remote_code: bool
    no_self_check: bool
    device_map: str = "none"

    def load(
        self, messages: Messages, *, forks: bool = True, batch_size: int = 1
    ) -> "tuple[LoadedModel, CacheConfig]":
        """Load the model, saying what takes time.

        Args:
            messages: Where to say it.
            forks: Whether the command forks its stream, or goes back in it.
            batch_size: Rows of its caches.

        Returns:
            The model, and the sizes of its cache.

        Raises:
            ModelError: If it cannot be found, loaded or streamed.
        """
        with messages.working() as working:
            from streamchat.model import compat
            from streamchat.model.families import has_learned_sinks
            from streamchat.model.fit import CACHES_WITH_A_FORK, PEAK_WITH_A_FORK, choose_window
            from streamchat.model.launch import is_one_of_several
            from streamchat.model.load import load_planned
            from streamchat.model.plan import plan

            compat.quiet(show_downloads=messages.console.is_terminal and not messages.quiet)
            planned = plan(
                self.model,
                device=self.device,
                dtype=self.dtype,
                quantize=self.quantize,
                trust_remote_code=self.trust_remote_code,
                device_map=self.device_map,
                tensor_parallel=is_one_of_several(),
                policy=self.cache.policy,
                progress=working,
            )
            held, peak = (CACHES_WITH_A_FORK, PEAK_WITH_A_FORK) if forks else (1, 1)
            cache = self.cache.settle(has_learned_sinks=has_learned_sinks(planned.config))
            cache = choose_window(planned, cache, batch_size * peak)
            loaded = load_planned(
                planned,
                cache,
                num_caches=batch_size * held,
                check=not self.no_self_check,
                progress=working,
            )
        start_interrupt.check()
        say_if_slow(loaded, messages)
        return loaded, cache


def say_if_slow(loaded: "LoadedModel", messages: Messages) -> None:
    """Why tokens will come slower than they could, if so."""
    if loaded.slow_reason:
        messages.say(f"each token goes through PyTorch, which is slower: {loaded.slow_reason}")


def session_of(ctx: typer.Context) -> Session:
    """The session that the top-level callback made."""
    found: Any = ctx.obj
    return found if isinstance(found, Session) else Session()
