"""What the benchmarks share: where they ran, and CSV files."""

import csv
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SEED = 0

Row = Mapping[str, object]


def environment(*, threads: int, dtype: str, device: str = "cpu") -> dict[str, object]:
    """Where a figure was taken; goes into each row of a CSV file."""
    import torch

    command = ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    is_cuda = device.startswith("cuda")
    return {
        "commit": done.stdout.strip(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.processor(),
        "dtype": dtype,
        "threads": threads,
        "seed": SEED,
    }


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows with a header; replaces the file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def say(text: str) -> None:
    """A line for the person who waits, on standard error."""
    print(text, file=sys.stderr, flush=True)
