"""streamchat against other ways of running the same weights, in one run and in turn.

    python benchmarks/peers.py --setup .peers                   # once: two more environments
    python benchmarks/peers.py TEXT.txt --environments .peers   # about a quarter of an hour

Every contender runs in a process of its own (`workers.py`, which says what each does with a full
cache) and waits while another one measures. A round takes one measurement of each; the figure is
the median over the rounds, with the lowest and the highest beside it. All get the same tokens of
TEXT, the same number of threads and the weights of the built-in model: as float32, or the very
GGUF file that these were converted from. Precision is each tool's own default, and is named.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    ROOT,
    SEED,
    Spread,
    environment,
    interleaved,
    markdown,
    physical_cores,
    say,
    write_csv,
)
from workers import CHUNK

PINS = {
    "sinks": [
        "torch==2.13.0",
        "transformers==4.34.0",
        "attention_sinks==0.4.0",
        "einops",
        "numpy<2",
        "sentencepiece",
    ],
    "llama": ["llama-cpp-python==0.3.36"],
}
"""What the other environments hold. llama.cpp is compiled, which takes about ten minutes."""

PROBES, PROBE_TOKENS = 8, 32
PROBE_TOLERANCE = {"float32": 0.002}
"""Nats by which a contender's surprise may differ from float32's on average, by its weights."""
LOOSE_TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class Contender:
    """One way of running the model.

    Attributes:
        kind: Name in `workers.KINDS`.
        place: Whose python runs it: `here`, `sinks` or `llama`.
        options: Passed to the worker.
    """

    kind: str
    place: str = "here"
    options: tuple[str, ...] = ()


CONTENDERS = {
    "streamchat": Contender("streamchat"),
    "streamchat --quantize none": Contender("streamchat", options=("quantize=none",)),
    "attention_sinks": Contender("attention_sinks", "sinks"),
    "transformers DynamicCache": Contender("dynamic"),
    "transformers StaticCache": Contender("static"),
    "recomputation": Contender("recompute"),
    "llama.cpp": Contender("llama.cpp", "llama"),
}
BASE = "streamchat"
DECODE, PREFILL, SHIFT = "decode ms/token", "prefill tok/s", "shift ms"


class Worker:
    """A contender's process."""

    def __init__(self, name: str, python: str, source: str, threads: int) -> None:
        self.name = name
        contender = CONTENDERS[name]
        command = [python, str(ROOT / "benchmarks" / "workers.py"), contender.kind]
        command += ["--source", source, "--threads", str(threads)]
        for option in contender.options:
            command += ["--option", option]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environ(threads),
        )
        self.left_out: str = self._answer().get("left_out", "")
        self.about: dict[str, Any] = {} if self.left_out else self.ask("hello")
        self.probed: list[float] = []
        self.keys = 0
        self.shifts: list[float] = []

    @property
    def nll(self) -> float:
        """Mean surprise over the probes, in nats."""
        return statistics.fmean(self.probed)

    def ask(self, what: str, **fields: object) -> dict[str, Any]:
        """Send a request; its answer."""
        _open(self._process.stdin).write(json.dumps({"do": what, **fields}) + "\n")
        _open(self._process.stdin).flush()
        return self._answer()

    def close(self) -> None:
        """End the process: its input ends."""
        _open(self._process.stdin).close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        line = _open(self._process.stdout).readline()
        if not line:
            raise SystemExit(f"{self.name}: the worker ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Prompts:
    """Pieces of a text's tokens, from places that a seed chooses."""

    def __init__(self, ids: Sequence[int], seed: int) -> None:
        self._ids, self._random = list(ids), random.Random(seed)

    def take(self, length: int) -> list[int]:
        """Consecutive tokens; the text is repeated where it is too short."""
        start = self._random.randrange(len(self._ids))
        rotated = self._ids[start:] + self._ids[:start]
        return (rotated * (length // len(rotated) + 1))[:length]


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.setup:
        set_up(args.setup)
        args.environments = args.environments or args.setup
    if args.file is None:
        return
    pythons = {
        "here": sys.executable,
        "sinks": args.sinks_python or python_of(args.environments, "sinks"),
        "llama": args.llama_python or python_of(args.environments, "llama"),
    }
    folder, gguf = sources(args)
    prompts = Prompts(tokens_of(args.file, folder), SEED)
    workers = start(args, pythons, folder, gguf)
    try:
        compare_weights(workers, prompts)
        rows = []
        for size in args.sizes:
            rows += measure(workers, size, prompts, args)
    finally:
        for worker in workers.values():
            worker.close()
    write_csv(args.output, rows)
    print(table([{key: str(value) for key, value in row.items()} for row in rows]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", help="plain text in UTF-8")
    parser.add_argument("--setup", type=Path, metavar="DIR", help="make the environments there")
    parser.add_argument("--environments", type=Path, metavar="DIR", help="where --setup made them")
    parser.add_argument("--sinks-python", help="python that has attention_sinks")
    parser.add_argument("--llama-python", help="python that has llama-cpp-python")
    parser.add_argument("--sizes", type=numbers, default=[256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="decoded in one measurement")
    parser.add_argument("--recompute-tokens", type=int, default=1, help="likewise, recomputation")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="prefilled in one measurement")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--only", action="append", choices=CONTENDERS, help="contenders to run")
    parser.add_argument("--model", type=Path, help="folder; the built-in model by default")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    parser.add_argument("--output", type=Path, default=RESULTS / "peers.csv")
    args = parser.parse_args(arguments)
    if args.file is None and args.setup is None:
        parser.error("name a text FILE, or --setup DIR")
    if args.chunk > CHUNK:
        parser.error(f"--chunk is at most {CHUNK}")
    return args


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    return [int(part) for part in text.split(",")]


def set_up(folder: Path) -> None:
    """Make the environments of the contenders that cannot live in ours."""
    for name, pins in PINS.items():
        say(f"making {folder / name}: {' '.join(pins)}")
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        python = python_of(folder, name)
        subprocess.run([str(python), "-m", "pip", "install", *pins], check=True, stdout=sys.stderr)


def python_of(folder: Path | None, name: str) -> str | None:
    """The python of an environment below `folder`."""
    if folder is None:
        return None
    windows = folder / name / "Scripts" / "python.exe"
    return str(windows if windows.exists() else folder / name / "bin" / "python")


def sources(args: argparse.Namespace) -> tuple[str, str]:
    """Model folder, and the GGUF file that it was converted from."""
    if args.model:
        return str(args.model), str(args.gguf or "")
    from streamchat.model.builtin import builtin_model, fetch

    return str(builtin_model(say)), str(args.gguf or fetch(say))


def tokens_of(file: Path, folder: str) -> list[int]:
    """The text's ids."""
    from transformers import AutoTokenizer

    text = file.read_text(encoding="utf-8")
    ids: list[int] = AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False)
    if not ids:
        raise SystemExit(f"{file} is empty")
    return ids


def start(
    args: argparse.Namespace, pythons: dict[str, str | None], folder: str, gguf: str
) -> dict[str, Worker]:
    """The workers of all contenders that can run here; the others are named.

    streamchat loads the built-in model as it does for a user, by no name.
    """
    workers = {}
    for name, contender in CONTENDERS.items():
        if args.only and name not in args.only:
            continue
        python = pythons[contender.place]
        if python is None:
            say(f"left out: {name}, for want of --{contender.place}-python")
            continue
        source = gguf if contender.place == "llama" else folder
        if not source:
            say(f"left out: {name}, for want of --gguf")
            continue
        if contender.kind == "streamchat" and args.model is None:
            source = ""
        say(f"starting {name}")
        worker = Worker(name, python, source, args.threads)
        if worker.left_out:
            say(f"left out: {name}, {worker.left_out}")
            worker.close()
        else:
            workers[name] = worker
    if not workers:
        raise SystemExit("no contender is left")
    return workers


def compare_weights(workers: dict[str, Worker], prompts: Prompts) -> None:
    """Hold all contenders to be the same model: they find the same token as surprising.

    Raises:
        SystemExit: If one does not, beyond what its precision explains.
    """
    probes = [prompts.take(PROBE_TOKENS + 1) for _ in range(PROBES)]
    for worker in workers.values():
        worker.probed = [worker.ask("probe", ids=ids, next=last)["nll"] for *ids, last in probes]
    full = [w for w in workers.values() if w.about["weights"] in PROBE_TOLERANCE]
    expected = (full or list(workers.values()))[0]
    for name, worker in workers.items():
        pairs = zip(worker.probed, expected.probed, strict=True)
        apart = statistics.fmean(abs(own - other) for own, other in pairs)
        say(f"{name}: surprise {worker.nll:.4f} nats, each {apart:.4f} apart")
        tolerance = PROBE_TOLERANCE.get(worker.about["weights"], LOOSE_TOLERANCE)
        if not apart <= tolerance:
            raise SystemExit(f"{name} is not the same model as {expected.name}")


def measure(
    workers: dict[str, Worker], size: int, prompts: Prompts, args: argparse.Namespace
) -> list[dict[str, object]]:
    """The rows of one cache size."""
    filling = prompts.take(size + CHUNK)
    chunks = [prompts.take(args.chunk) for _ in range(args.rounds + 1)]
    for name, worker in workers.items():
        say(f"{size} tokens: filling {name}")
        worker.ask("open", size=size, ids=filling)
        worker.shifts.clear()
        # Thrown away: the first call of each kind.
        worker.ask("prefill", ids=chunks[-1])
        worker.ask("decode", tokens=1)
        worker.shifts.clear()

    prefill_rates: dict[str, list[float]] = {name: [] for name in workers}

    def once(worker: Worker) -> float:
        taken = prefill_rates[worker.name]
        seconds = worker.ask("prefill", ids=chunks[len(taken)])["seconds"]
        taken.append(args.chunk / seconds if seconds else 0.0)
        own = worker.ask("decode", tokens=tokens_for(worker.name, args))
        worker.keys = own["keys"]
        if worker.keys != size:
            raise SystemExit(f"{worker.name}: a step saw {worker.keys} keys, not {size}")
        if "shift_seconds" in own:
            worker.shifts.append(1e3 * own["shift_seconds"])
        return 1e3 * sum(own["seconds"]) / len(own["seconds"])

    say(f"{size} tokens: measuring, {args.rounds} rounds")
    decode_times = interleaved({n: lambda w=w: once(w) for n, w in workers.items()}, args.rounds)
    rows = []
    for name, worker in workers.items():
        figures = {DECODE: decode_times[name], PREFILL: prefill_rates[name], SHIFT: worker.shifts}
        for measured, values in figures.items():
            if values and all(values):
                rows.append(row(worker, size, measured, Spread.of(values), args))
    return rows


def tokens_for(name: str, args: argparse.Namespace) -> int:
    """How many tokens one decode measurement takes."""
    tokens: int = args.recompute_tokens if name == "recomputation" else args.tokens
    return tokens


def row(
    worker: Worker, size: int, measured: str, spread: Spread, args: argparse.Namespace
) -> dict[str, object]:
    where = environment(threads=args.threads, dtype=worker.about["weights"])
    versions: dict[str, str] = worker.about["versions"]
    counts = {PREFILL: args.chunk, SHIFT: 1}
    return {
        "contender": worker.name,
        "cache_size": size,
        "measure": measured,
        "median": spread.median,
        "low": spread.low,
        "high": spread.high,
        "rounds": args.rounds,
        "tokens": counts.get(measured, tokens_for(worker.name, args)),
        "keys": worker.keys,
        "probe_nats": worker.nll,
        **where,
        "cache_dtype": worker.about["cache"],
        # The worker's own, not those of the process that wrote the file.
        "torch": versions.get("torch", ""),
        "transformers": versions.get("transformers", ""),
        "package": " ".join(
            f"{package} {version}"
            for package, version in versions.items()
            if package not in ("torch", "transformers")
        ),
    }


def table(rows: Sequence[dict[str, str]]) -> str:
    """Markdown: a line a contender, its figures with their ratios to streamchat's."""
    sizes = sorted({int(row["cache_size"]) for row in rows})
    found = {(r["contender"], int(r["cache_size"]), r["measure"]): float(r["median"]) for r in rows}
    precision = {r["contender"]: f"{r['dtype']} / {r['cache_dtype']}" for r in rows}
    columns = [(measured, size) for measured in (DECODE, PREFILL) for size in sizes]

    def cell(name: str, measured: str, size: int) -> str:
        value, base = found.get((name, size, measured)), found.get((BASE, size, measured))
        if value is None:
            return ""
        ratio = "" if base is None or name == BASE else f" ({value / base:.2f}x)"
        return f"{value:,.1f}{ratio}" if measured == DECODE else f"{value:,.0f}{ratio}"

    return markdown(
        ["contender", "weights / cache", *(f"{measured}, {size:,}" for measured, size in columns)],
        [
            [name, precision[name], *(cell(name, *column) for column in columns)]
            for name in precision
        ],
    )


def _open(pipe: Any) -> Any:
    """A pipe that was asked for."""
    if pipe is None:
        raise SystemExit("the worker has no pipe")
    return pipe


def _environ(threads: int) -> dict[str, str]:
    """The worker's environment: the same number of threads for all, however they ask.

    How long waiting threads spin is left to each tool: it is short against a turn.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return {**os.environ, **dict.fromkeys(names, str(threads)), **quiet, "HF_HUB_OFFLINE": "1"}


if __name__ == "__main__":
    main()
