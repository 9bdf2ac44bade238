"""What the benchmarks share: where they ran, stopwatches, CSV files and Markdown tables.

Imports the standard library only, so that it works in every contender's environment.
"""

import csv
import importlib.metadata
import inspect
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SEED = 0
SINKS = 4

# Libraries draw progress bars over what a benchmark says.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median of several measurements, and how far they lie apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def interleaved(works: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measurements taken in turn: noise of the machine hits all alike.

    Args:
        works: By name, what takes one measurement and returns it.
        rounds: How often each is called. Every round starts with another one.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(works[name]())
    return taken


def physical_cores() -> int:
    """Cores that this process may use, hyper-threads not counted."""
    import psutil

    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    return cores


def environment(*, threads: int, dtype: str, device: str = "cpu") -> dict[str, object]:
    """Where a figure was taken; goes into each row of a CSV file."""
    return {
        "commit": commit(),
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "transformers": version_of("transformers"),
        "device": cpu_model() if device == "cpu" else device_name(device),
        "dtype": dtype,
        "threads": threads,
        "seed": SEED,
    }


def commit() -> str:
    """Short hash of the checkout, with a `+` if it was changed since."""
    command = ["git", "-C", str(ROOT)]
    try:
        name = _output([*command, "rev-parse", "--short=10", "HEAD"])
        changed = _output([*command, "status", "--porcelain", "--untracked-files=no", "--", *CODE])
    except (OSError, subprocess.CalledProcessError):
        return ""
    return name + ("+" if changed else "")


CODE = ("streamchat", "benchmarks/*.py")
"""What a figure depends on: files changed elsewhere do not taint it."""


def version_of(package: str) -> str:
    """Version of an installed package, empty if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cpu_model() -> str:
    """The processor's name, with the family and model number where these say more than the name."""
    fields: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    elif sys.platform == "darwin":
        fields["model name"] = _output(["sysctl", "-n", "machdep.cpu.brand_string"])
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']} model {fields.get('model', '?')})"
    return name


def device_name(device: str) -> str:
    """Name of an accelerator."""
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows with a header; replaces the file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _shown(value) for key, value in row.items()} for row in rows)
    say(f"wrote {path}")


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "| " + " | ".join(cells) + " |"

    return "\n".join(line(row) for row in [header, rule, *rows])


def load_options(quantize: str | None) -> dict[str, str]:
    """For `streamchat.load`: the option where it is asked for, and where this version has it.

    Raises:
        SystemExit: If it is asked for and not there.
    """
    import streamchat

    if quantize is None:
        return {}
    if "quantize" not in inspect.signature(streamchat.load).parameters:
        raise SystemExit("this version of streamchat.load has no quantize")
    return {"quantize": quantize}


def main_dtype(model: Any) -> str:
    """The dtype that most bytes of a model's parameters and buffers are stored in."""
    num_bytes: dict[str, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            name = str(tensor.dtype).removeprefix("torch.")
            num_bytes[name] = num_bytes.get(name, 0) + tensor.numel() * tensor.element_size()
    return max(num_bytes, key=lambda name: num_bytes[name])


def say(text: str) -> None:
    """A line for the person who waits, on standard error."""
    print(text, file=sys.stderr, flush=True)


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _shown(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
