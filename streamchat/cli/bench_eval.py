"""`streamchat bench --streameval`: what each policy remembers, by distance."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamchat.cli.bench_output import Format, print_records
from streamchat.cli.options import ModelChoice
from streamchat.cli.program import ColorChoice
from streamchat.cli.signals import EXIT_CODES, start_interrupt
from streamchat.config import CacheConfig, Policy
from streamchat.errors import UsageError
from streamchat.ui.console import Messages

if TYPE_CHECKING:
    from streamchat.bench.streameval import Answer, Score

DISTANCES = "0.25x,0.5x,0.9x,1.1x,2x"
"""Within the cache, near its edge on both sides, and beyond."""

HEADER = (
    "policy",
    "distance",
    "in caches",
    "held",
    "questions",
    "answered",
    "chosen",
    "chosen by chance",
)


def measure_memory(
    choice: ModelChoice,
    cache: CacheConfig,
    policies: Sequence[Policy],
    distances: str,
    num_questions: int,
    seed: int,
    plain: bool,
    output: Format,
    messages: Messages,
    color: ColorChoice,
) -> int:
    """Run it; returns the exit code. Ctrl-C ends it with what has been asked so far."""
    parse_distances(distances, cache.cache_size)
    loaded, chosen = choice.load(messages)
    budget = chosen if policies[0] != "dense" else cache

    from streamchat.bench.perplexity import with_policies
    from streamchat.bench.streameval import form_for, make_exam, scores, take, verdict
    from streamchat.model.families import check_fits, trained_length

    form = form_for(loaded.tokenizer, plain=plain)
    budget = budget.pin(len(form.header))
    check_fits(loaded.model.config, budget)
    exam = make_exam(
        loaded.tokenizer,
        form,
        budget,
        parse_distances(distances, budget.cache_size),
        num_questions,
        seed,
    )
    messages.say(
        f"{loaded.source.name} on {loaded.device.type}, {exam.num_questions:,} questions "
        f"about a stream of {exam.num_tokens:,} tokens, caches of {budget.cache_size:,} tokens"
    )
    limit = min(exam.num_tokens, trained_length(loaded.model.config) or exam.num_tokens)
    rows: list[Score] = []
    is_interrupted = False
    with messages.working() as working:
        for config in with_policies(budget, policies, limit):
            answers: list[Answer] = []
            working(f"{config.policy}: filling the cache")
            try:
                for answer in take(loaded, config, exam):
                    answers.append(answer)
                    right = sum(answer.is_right for answer in answers)
                    working(
                        f"{config.policy}: {len(answers):,} of {exam.num_questions:,} questions, "
                        f"{right:,} answered"
                    )
                start_interrupt.check()
            except KeyboardInterrupt:
                is_interrupted = True
            if len(answers) < exam.num_questions and not is_interrupted:
                messages.say(f"{config.policy}: full after {len(answers):,} questions")
            rows += scores(config, answers)
            if is_interrupted:
                break
    if is_interrupted and not rows:
        raise KeyboardInterrupt
    print_records(rows, HEADER, [_cells(row) for row in rows], output, color)
    for policy in dict.fromkeys(row.policy for row in rows):
        messages.say(verdict([row for row in rows if row.policy == policy]))
    if not is_interrupted:
        return 0
    messages.error("interrupted: these are the questions asked until then")
    return next(iter(EXIT_CODES.values()))


def parse_distances(text: str, cache_size: int) -> list[int]:
    """Distances in tokens, ascending; those with an x are multiples of the cache.

    Raises:
        UsageError: If they are something else.
    """
    distances = set()
    for part in text.split(","):
        number = part.strip()
        try:
            distance = (
                float(number[:-1]) * cache_size if number.endswith("x") else float(int(number))
            )
        except ValueError:
            distance = 0
        if not 1 <= distance < float("inf"):
            raise UsageError(
                "--distances must be numbers of tokens, or of caches as in 0.5x, with commas, "
                f"got '{part}'"
            )
        distances.add(int(distance))
    return sorted(distances)


def _cells(row: "Score") -> list[str]:
    return [
        row.policy,
        f"{row.distance:,}",
        f"{row.caches:.2f}x",
        row.held,
        f"{row.num_questions:,}",
        f"{row.answered:.0%}",
        f"{row.chosen:.0%}",
        f"{row.chosen_by_chance:.0%}",
    ]
