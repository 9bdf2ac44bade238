"""How far behind a live transcript is `streamchat pipe`? Words come at the rate of speech.

    python benchmarks/live.py TEXT.txt

The text is written to the program's standard input line by line, as captions would come: each line
when its last word has been said. `notes` is the program's own measure, from the arrival of a line
to the moment that the model has read it, with a note every minute in between; `score` is measured
from outside, from writing a line to reading its score. For each of both it takes as long as it
simulates.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from common import RESULTS, SEED, environment, markdown, physical_cores, say, write_csv

WORDS_PER_SECOND = (2.0, 3.0)
WORDS_PER_LINE = (4, 14)
MODES = {"notes": ["--every", "60s"], "score": []}


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    words = args.file.read_text(encoding="utf-8").split()
    lines = list(spoken(words, 60 * args.minutes))
    where = environment(threads=physical_cores(), dtype="int8" if args.model is None else "")
    rows = []
    for mode, options in MODES.items():
        say(f"{mode}: {len(lines)} lines in {args.minutes:g} minutes")
        model = [] if args.model is None else ["--model", args.model]
        measured = run([*model, "--mode", mode, *options], lines)
        rows.append({"mode": mode, "minutes": args.minutes, **measured, **where})
    write_csv(args.output / "live.csv", rows)
    print(table([{key: str(value) for key, value in row.items()} for row in rows]))


def spoken(words: Sequence[str], seconds: float) -> Iterator[tuple[float, str]]:
    """Lines, and when each has been said."""
    generator, clock, begin = random.Random(SEED), 0.0, 0
    while begin < len(words):
        line = words[begin : begin + generator.randint(*WORDS_PER_LINE)]
        begin += len(line)
        clock += len(line) / generator.uniform(*WORDS_PER_SECOND)
        if clock > seconds:
            return
        yield clock, " ".join(line)


def run(options: Sequence[str], lines: Sequence[tuple[float, str]]) -> dict[str, object]:
    """One run of the program."""
    command = [sys.executable, "-m", "streamchat", "pipe", "--json", *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if process.stdin is None or process.stdout is None:
        raise SystemExit("no pipe")
    source, events = process.stdin, process.stdout
    received: list[tuple[float, dict[str, object]]] = []
    is_ready = threading.Event()

    def read() -> None:
        for text in events:
            received.append((time.monotonic(), json.loads(text)))
            is_ready.set()
        is_ready.set()  # it has failed

    reader = threading.Thread(target=read)
    reader.start()
    is_ready.wait()  # `start`: the model is loaded
    written = []
    began = time.monotonic()
    for moment, line in lines:
        time.sleep(max(0.0, began + moment - time.monotonic()))
        written.append(time.monotonic())
        source.write(f"{line}\n")
        source.flush()
    source.close()
    reader.join()
    if process.wait():
        raise SystemExit(f"it failed with {process.returncode}")
    end = received[-1][1]
    lags = [
        at - written[int(str(event["line"])) - 1]
        for at, event in received
        if event["event"] == "score" and event["ends_line"]
    ]
    return {
        "lines": len(lines),
        "words": sum(len(line.split()) for _, line in lines),
        "tokens": end["num_tokens"],
        "evicted": end["num_evicted"],
        "notes": sum(event["event"] == "note" for _, event in received),
        "lag_p95": end["lag_p95"],
        "lag_max": end["lag_max"],
        "outside_p95": statistics.quantiles(lags, n=100)[94] if len(lags) > 1 else "",
        "outside_max": max(lags) if lags else "",
    }


def table(rows: Sequence[dict[str, str]]) -> str:
    """For the README."""
    header = ["mode", "minutes", "lines", "notes", "lag of 95 %, s", "longest, s"]
    cells = [
        [
            f"`{row['mode']}`",
            f"{float(row['minutes']):g}",
            f"{int(row['lines']):,}",
            row["notes"] if row["mode"] == "notes" else "",
            f"{float(row['outside_p95'] or row['lag_p95']):.2f}",
            f"{float(row['outside_max'] or row['lag_max']):.2f}",
        ]
        for row in rows
    ]
    return markdown(header, cells)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="text in UTF-8")
    parser.add_argument("--model", help="default: the built-in one")
    parser.add_argument("--minutes", type=float, default=10, help="of speech, for each mode")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the CSV file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
