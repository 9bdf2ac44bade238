"""The README's tables, made from `benchmarks/results/*.csv`.

    python benchmarks/tables.py            # write them into README.md
    python benchmarks/tables.py --check    # exit 1 if README.md does not show what the files hold

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; all between is replaced.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import bookkeeping
import flat
import live
import long_stream
import peers
import policies
import pretrain_sinks
import roofline
import sink_map
import streameval
from common import RESULTS, ROOT, read_csv, say

TABLES: Mapping[str, Callable[[Sequence[dict[str, str]]], str]] = {
    "peers": peers.table,
    "bookkeeping": bookkeeping.table,
    "roofline": roofline.table,
    "flat": flat.table,
    "live": live.table,
    "long_stream": long_stream.table,
    "long_tiny": long_stream.table,
    "policies": policies.table,
    "policies-speed": policies.speed_table,
    "pretrain_sinks": pretrain_sinks.table,
    "sink_map": sink_map.table,
    "streameval": streameval.table,
}
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
NO_FIGURES = "(No figures yet.)\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    old = args.readme.read_text(encoding="utf-8")
    new = filled_in(old, args.results)
    if args.check:
        if old != new:
            say(f"{args.readme} is out of date: run python benchmarks/tables.py")
        return int(old != new)
    args.readme.write_text(new, encoding="utf-8", newline="\n")
    return 0


def filled_in(text: str, results: Path) -> str:
    """The text with all its tables made anew."""
    missing = set(TABLES) - {name for _, name, _ in PLACE.findall(text)}
    if missing:
        raise SystemExit(f"no place for table {', '.join(sorted(missing))}")

    def anew(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        return begin + section(name, results / f"{name}.csv") + end

    return PLACE.sub(anew, text)


def section(name: str, path: Path) -> str:
    """A table, and where its figures were taken."""
    if name not in TABLES:
        raise SystemExit(f"no table is called {name}")
    if not path.is_file():
        return NO_FIGURES
    rows = read_csv(path)
    return f"{TABLES[name](rows)}\n\n{provenance(rows)}\n"


def provenance(rows: Sequence[dict[str, str]]) -> str:
    """One line: what all rows have in common about where they were taken."""

    def of(key: str) -> str:
        return ", ".join(dict.fromkeys(row[key] for row in rows if row[key]))

    versions = f"torch {of('torch')}, transformers {of('transformers')}"
    return f"{of('device')}, {of('threads')} threads; {versions}; commit {of('commit')}."


if __name__ == "__main__":
    raise SystemExit(main())
