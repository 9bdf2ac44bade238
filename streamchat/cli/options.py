"""Options that several commands share, declared once, and what they make of them."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from streamchat.cli.settings import Checked
from streamchat.cli.signals import start_interrupt
from streamchat.config import (
    DEFAULT_SINK_SIZE,
    DEFAULT_WINDOW_SIZE,
    CacheConfig,
    Policy,
    SamplingConfig,
)
from streamchat.errors import UsageError
from streamchat.ui.console import Messages

if TYPE_CHECKING:
    from streamchat.model.load import LoadedModel

AUTO: Final = "auto"

NO_END_TOKEN = "; it names no end token: answers end at --max-new"

REPEAT_PENALTY_DEFAULT = 1.1
"""Small models fall into loops without one."""

JsonOption = Annotated[
    bool,
    typer.Option(
        "--json/--no-json",
        envvar="STREAMCHAT_JSON",
        show_default=False,
        help="JSON, one object a line.",
    ),
]

DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")


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


def check_device(name: str) -> None:
    """Whether a device may have this name; whether it is there is seen later.

    Raises:
        UsageError: If not.
    """
    if not DEVICE.fullmatch(name):
        raise UsageError(f"must be auto, cpu, cuda, cuda:N or mps, got '{name}'")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, and where its weights go."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            envvar="STREAMCHAT_MODEL",
            metavar="NAME",
            help="Hub id, model folder or .gguf file. Default: the built-in "
            "SmolLM2-135M-Instruct, fetched once.",
        ),
    ] = None
    device: Annotated[
        str,
        typer.Option(
            envvar="STREAMCHAT_DEVICE",
            metavar="DEVICE",
            autocompletion=lambda: [AUTO, "cpu", "cuda", "mps"],
            help="auto, cpu, cuda, cuda:N or mps.",
        ),
        Checked(check_device),
    ] = AUTO
    device_map: Annotated[
        Literal["none", "auto", "balanced", "sequential"],
        typer.Option(
            envvar="STREAMCHAT_DEVICE_MAP",
            metavar="MAP",
            help="For a model larger than one device: auto puts its layers on all GPUs, then in "
            "main memory, then on disk; also balanced, sequential; none.",
        ),
    ] = "none"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(
            envvar="STREAMCHAT_DTYPE",
            metavar="DTYPE",
            help="auto (float32 on a CPU, else 16-bit), float32, bfloat16 or float16.",
        ),
    ] = AUTO
    quantize: Annotated[
        Literal["auto", "none", "int8", "int4"],
        typer.Option(
            envvar="STREAMCHAT_QUANTIZE",
            metavar="SCHEME",
            help="Weights in int8, int4 or none (as --dtype says); auto: int8 on a CPU.",
        ),
    ] = AUTO
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Let code from the model's repository run."),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(ModelOptions):
    """Which model, and how it is loaded."""

    no_self_check: Annotated[
        bool,
        typer.Option(
            "--no-self-check",
            help="Load without checking that the model streams exactly: what it says may be "
            "rubbish.",
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeOptions:
    """How much of a stream is kept."""

    sinks: Annotated[
        str,
        typer.Option(
            envvar="STREAMCHAT_SINKS",
            metavar="N|auto",
            help="First tokens that are kept for ever; 0 makes a plain sliding window. auto: 4, or "
            "none beyond the system prompt if the model has learned sinks of its own.",
        ),
        Checked(lambda text: parse_cache(text, AUTO)),
    ] = AUTO
    window: Annotated[
        str,
        typer.Option(
            envvar="STREAMCHAT_WINDOW",
            metavar="N|auto",
            help="Newest tokens that are kept, sinks apart; auto: as many as the model was trained "
            "for and memory has room for.",
        ),
        Checked(lambda text: parse_cache(AUTO, text)),
    ] = str(DEFAULT_WINDOW_SIZE)

    def config(self, policy: Policy = "sink") -> CacheConfig:
        """The same, checked; with auto the default sizes, until the model is known.

        Raises:
            UsageError: If one is neither a number of tokens nor auto.
        """
        return parse_cache(self.sinks, self.window, policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions(SizeOptions):
    """What of a stream is kept."""

    policy: Annotated[
        Policy,
        typer.Option(
            envvar="STREAMCHAT_POLICY",
            metavar="POLICY",
            help="Which tokens stay: the first and the newest (sink), the newest (window), the "
            "newest, computed anew at each step (recompute), all until the trained length or "
            "memory ends (dense), or those that draw most attention (h2o, snapkv). Sinks and "
            "window together are the size of the cache, whatever the policy.",
        ),
    ] = "sink"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen."""

    temperature: Annotated[
        float,
        typer.Option(
            envvar="STREAMCHAT_TEMPERATURE",
            metavar="X",
            help="0 takes the most likely token each time.",
        ),
        Checked(lambda value: SamplingConfig(temperature=value)),
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(
            envvar="STREAMCHAT_TOP_P",
            metavar="X",
            help="Smallest set of tokens with this probability.",
        ),
        Checked(lambda value: SamplingConfig(top_p=value)),
    ] = 1.0
    top_k: Annotated[
        int,
        typer.Option(
            envvar="STREAMCHAT_TOP_K",
            metavar="N",
            help="The k most likely tokens; 0 takes all.",
        ),
        Checked(lambda value: SamplingConfig(top_k=value)),
    ] = 0
    min_p: Annotated[
        float,
        typer.Option(
            envvar="STREAMCHAT_MIN_P",
            metavar="X",
            help="Tokens this likely relative to the most likely.",
        ),
        Checked(lambda value: SamplingConfig(min_p=value)),
    ] = 0.0
    repeat_penalty: Annotated[
        float,
        typer.Option(
            envvar="STREAMCHAT_REPEAT_PENALTY",
            metavar="X",
            help="Above 1 makes the newest 256 tokens less likely to come again.",
        ),
        Checked(lambda value: SamplingConfig(repetition_penalty=value)),
    ] = REPEAT_PENALTY_DEFAULT
    max_new: Annotated[
        int,
        typer.Option(
            min=1,
            envvar="STREAMCHAT_MAX_NEW",
            metavar="N",
            help="Tokens of an answer (or a note) at most.",
        ),
    ] = 1024
    stop: Annotated[
        list[str] | None,
        typer.Option(
            envvar="STREAMCHAT_STOP",
            metavar="TEXT",
            help="Text that ends an answer; may be given several times.",
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(envvar="STREAMCHAT_SEED", metavar="N", help="Seed of the sampler."),
    ] = None

    def config(self) -> SamplingConfig:
        """The same for the engine, checked.

        Raises:
            ConfigError: If a value is out of range.
        """
        return SamplingConfig(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repeat_penalty,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model of a command, and its cache."""

    options: LoadOptions
    cache: CacheConfig

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
                self.options.model,
                device=self.options.device,
                dtype=self.options.dtype,
                quantize=self.options.quantize,
                trust_remote_code=self.options.trust_remote_code,
                device_map=self.options.device_map,
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
                check=not self.options.no_self_check,
                progress=working,
            )
        start_interrupt.check()
        say_if_slow(loaded, messages)
        return loaded, cache


def say_if_slow(loaded: "LoadedModel", messages: Messages) -> None:
    """Why tokens will come slower than they could, if so."""
    if loaded.slow_reason:
        messages.say(f"each token goes through PyTorch, which is slower: {loaded.slow_reason}")
