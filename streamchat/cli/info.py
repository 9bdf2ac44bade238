"""`streamchat info`: what a model is, how it is streamed, and what that takes."""

import os
import platform
from typing import TYPE_CHECKING, Annotated, Any

import typer

import streamchat
from streamchat.cli.expand import expand
from streamchat.cli.options import CacheOptions, JsonOption, ModelOptions
from streamchat.cli.program import ColorChoice, ProgramOptions, program_of
from streamchat.config import CacheConfig

if TYPE_CHECKING:
    from streamchat.cache.geometry import CacheGeometry

EPILOG = """
Examples:

    streamchat info

    streamchat info ~/models/qwen3-0.6b --window 4092
"""

LENGTHS = (4_000, 32_000, 128_000, 1_000_000)
"""Stream lengths of the memory table, in tokens."""


@expand()
def info(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")
    ] = None,
    json: JsonOption = False,
    *,
    model: ModelOptions,
    sizes: CacheOptions,
    program: ProgramOptions,
) -> int:
    """Show a model's family, cache and memory, without its weights."""
    state = program_of(ctx)
    messages = state.start(ctx, program)
    cache = sizes.config(sizes.policy)
    with messages.working() as working:
        from streamchat.model import compat
        from streamchat.model.families import check_fits, geometry_from_config, has_learned_sinks
        from streamchat.model.fit import PEAK_WITH_A_FORK, choose_window, weight_bytes
        from streamchat.model.plan import plan
        from streamchat.model.prequantized import method_of

        compat.quiet(show_downloads=messages.console.is_terminal and not messages.quiet)
        planned = plan(
            name or model.model,
            device=model.device,
            dtype=model.dtype,
            quantize=model.quantize,
            trust_remote_code=model.trust_remote_code,
            device_map=model.device_map,
            policy=cache.policy,
            progress=working,
        )
        cache = cache.settle(has_learned_sinks=has_learned_sinks(planned.config))
        cache = choose_window(planned, cache, PEAK_WITH_A_FORK)  # as a chat would
        check_fits(planned.config, cache)
    geometry = geometry_from_config(planned.config, planned.dtype)
    facts: dict[str, Any] = {
        "model": planned.source.name,
        "where": planned.source.path,
        **_model_facts(planned.config, geometry),
        "device": planned.device.type,
        "device_map": planned.device_map or "none",
        "dtype": str(planned.dtype).removeprefix("torch."),
        "quantize": method_of(planned.config) or planned.scheme or "none",
        "weight_bytes": weight_bytes(planned),
        **_cache_facts(geometry, cache),
        "versions": _versions(),
    }
    _print(facts, geometry, cache, state.color, as_json=json)
    return 0


def _model_facts(config: Any, geometry: "CacheGeometry") -> dict[str, Any]:
    from streamchat.model.families import describe_positions, softmax_of, trained_length

    return {
        "family": config.model_type,
        "positions": describe_positions(config),
        "softmax": softmax_of(config),
        "trained_length": trained_length(config),
        "layers": geometry.num_layers,
        "heads": f"{config.num_attention_heads} on {geometry.num_kv_heads} key/value heads",
    }


def _cache_facts(geometry: "CacheGeometry", cache: CacheConfig) -> dict[str, Any]:
    return {
        "policy": cache.policy,
        "holds": cache.describe(),
        "sink_size": cache.sink_size,
        "window_size": cache.window_size,
        "cache_size": cache.cache_size,
        "bytes_per_token": geometry.bytes_per_token(),
        "cache_bytes": geometry.bytes_per_token() * cache.cache_size,
    }


def _versions() -> str:
    import torch
    import transformers

    return (
        f"streamchat {streamchat.__version__}, transformers {transformers.__version__}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    )


def _print(
    facts: dict[str, Any],
    geometry: "CacheGeometry",
    cache: CacheConfig,
    color: ColorChoice,
    *,
    as_json: bool,
) -> None:
    from streamchat.ui.console import can_draw, make_console
    from streamchat.ui.lines import to_json
    from streamchat.ui.output import Output
    from streamchat.ui.tables import markdown_table, print_table

    output = Output()
    per_token = geometry.bytes_per_token()
    if as_json:
        memory = {
            str(n): {"dense": n * per_token, "bounded": min(n, cache.cache_size) * per_token}
            for n in LENGTHS
        }
        output.line(to_json({**facts, "memory": memory}))
        return
    for name, value in facts.items():
        shown = "unknown" if value is None else f"{value:,}" if isinstance(value, int) else value
        if name == "sink_size" and cache.pins and not cache.sink_size:
            shown += " (the model has sinks of its own; a system prompt is pinned all the same)"
        if name == "window_size" and cache.is_auto:
            shown += " (auto)"
        output.line(f"{name.replace('_', ' '):<16} {shown}")
    output.line("")
    header = ["tokens seen", "dense cache", "bounded cache"]
    cells = [
        [
            f"{length:,}",
            _megabytes(length * per_token),
            _megabytes(min(length, cache.cache_size) * per_token),
        ]
        for length in LENGTHS
    ]
    if can_draw():
        print_table(make_console(color.value, stderr=False), header, cells)
    else:
        output.line(markdown_table(header, cells))


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
