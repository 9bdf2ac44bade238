"""What the scripts that write pages share: write the files, or say which are out of date."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path


def stale(wanted: Mapping[Path, str]) -> list[str]:
    """Names of the files that hold something else than what is wanted."""
    return [
        file.name
        for file, text in wanted.items()
        if not file.is_file() or file.read_text(encoding="utf-8") != text
    ]


def run(script: str, description: str | None, wanted: Callable[[], Mapping[Path, str]]) -> None:
    """The command line of a script: writes what is wanted; with --check, says what is out of date.

    Args:
        script: The script's `__file__`.
        description: Its docstring.
        wanted: What the files should hold.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    if not parser.parse_args().check:
        for file, text in wanted().items():
            file.write_text(text, encoding="utf-8")
    elif names := stale(wanted()):
        name = Path(script).name
        raise SystemExit(f"out of date: {', '.join(names)}; run python docs/{name}")
