"""Notes of notes. The oracle: a summary is the list of what it was made of, so that it can be read.

`summarize` wraps the texts in brackets: `[a b]` is the summary of `a` and `b`.
"""

import json
import random
import re

import pytest

from streamchat import UsageError
from streamchat.events import Note
from streamchat.pipe.roll_up import Level, RollUp, parse_levels

ROOMY = 10_000


def note(number, start=None, text=None):
    return Note(
        number=number,
        text=text or str(number),
        first_line=10 * number,
        first_part=1,
        last_line=10 * number + 9,
        last_part=1,
        ends_line=True,
        first_position=0,
        last_position=0,
        start=start,
        end=None if start is None else start + 60,
    )


def bracketed(texts):
    return f"[{' '.join(texts)}]"


def rolled(*levels, room=ROOMY, size=len):
    return RollUp(levels, room, size, bracketed)


def leaves(text):
    """The notes in a bracketed text."""
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10", (Level(count=10),)),
        ("1h", (Level(seconds=3600),)),
        ("10m, 1h", (Level(seconds=600), Level(seconds=3600))),
        ("5,6,90s", (Level(count=5), Level(count=6), Level(seconds=90))),
    ],
)
def test_levels_as_users_write_them(text, expected):
    """Numbers of entries, or times, the lowest level first."""
    assert parse_levels(text) == expected


@pytest.mark.parametrize(
    "text", ["", "1", "0", "-3", "often", "5,", "3tok", "²", "1h,10m", "1h,1h"]
)
def test_other_levels_are_refused(text):
    """In words."""
    with pytest.raises(UsageError, match=r"--roll-up (must be|takes)"):
        parse_levels(text)


def test_every_so_many_notes():
    """Each summary covers the notes since the last one, and names their lines and times."""
    roll_up = rolled(Level(count=3))
    found = [s for n in range(1, 8) for s in roll_up.add(note(n, start=60.0 * n))]
    assert [(s.level, s.text) for s in found] == [(1, "[1 2 3]"), (1, "[4 5 6]")]
    second = found[1]
    assert (second.first_note, second.last_note) == (4, 6)
    assert (second.first_line, second.last_line) == (40, 69)
    assert (second.start, second.end, second.is_whole) == (240, 420, False)


def test_levels_upon_levels():
    """Summaries are rolled up as notes are."""
    roll_up = rolled(Level(count=2), Level(count=2))
    found = [s.text for n in range(1, 9) for s in roll_up.add(note(n))]
    assert found == ["[1 2]", "[3 4]", "[[1 2] [3 4]]", "[5 6]", "[7 8]", "[[5 6] [7 8]]"]


def test_the_hour_is_the_inputs_own():
    """A summary once the notes that wait span the time."""
    roll_up = rolled(Level(seconds=600))
    found = [s.text for n in range(25) for s in roll_up.add(note(n + 1, start=60.0 * n))]
    assert found == [bracketed([str(n) for n in range(1, 11)]), bracketed(map(str, range(11, 21)))]


def test_the_whole_is_everything_in_order_and_changes_nothing():
    """Asked twice it is the same, and rolling up goes on as though it had not been asked."""
    roll_up, other = rolled(Level(count=2), Level(count=2)), rolled(Level(count=2), Level(count=2))
    for n in range(1, 8):
        list(roll_up.add(note(n)))
        list(other.add(note(n)))
        list(other.whole())
    (whole,) = roll_up.whole()
    assert whole.text == "[[[1 2] [3 4]] [5 6] 7]"
    assert (whole.is_whole, whole.first_note, whole.last_note) == (True, 1, 7)
    assert whole == next(iter(other.whole()))
    assert [s.text for s in other.add(note(8))] == [s.text for s in roll_up.add(note(8))]


@pytest.mark.parametrize("count", [0, 1])
def test_one_note_is_its_own_whole(count):
    """Nothing is summed up that says no more than a note."""
    roll_up = rolled(Level(count=3))
    for n in range(count):
        assert list(roll_up.add(note(n + 1))) == []
    assert list(roll_up.whole()) == []


@pytest.mark.parametrize("seed", range(20))
def test_no_question_is_too_long_and_no_note_is_lost(seed):
    """Whatever the sizes: texts put together fit into the room and one more entry."""
    generator = random.Random(seed)
    largest, room = 10, generator.randint(20, 60)
    asked = []

    def size(text):
        return sizes.setdefault(text, generator.randint(1, largest))

    def summarize(texts):
        asked.append(sum(size(text) for text in texts))
        assert len(texts) >= 2
        return bracketed(texts)

    sizes = {}
    levels = generator.choice([(), (Level(count=3),), (Level(count=50), Level(count=2))])
    roll_up = RollUp(levels, room, size, summarize)
    for n in range(1, 120):
        list(roll_up.add(note(n)))
        held = [entry for waiting in roll_up.pack() for entry in waiting]
        assert [m for entry in held for m in leaves(entry["text"])] != []
        assert sorted(m for entry in held for m in leaves(entry["text"])) == list(range(1, n + 1))
    *_, whole = roll_up.whole()
    assert whole.is_whole
    assert leaves(whole.text) == list(range(1, 120))
    assert max(asked) <= room + largest


def test_it_goes_on_from_what_was_packed():
    """Through JSON and back, what comes is what would have come."""
    whole, first = rolled(Level(count=2), Level(count=3)), rolled(Level(count=2), Level(count=3))
    expected = [s for n in range(1, 30) for s in whole.add(note(n))]
    found = [s for n in range(1, 12) for s in first.add(note(n))]
    second = rolled(Level(count=2), Level(count=3))
    second.unpack(json.loads(json.dumps(first.pack())))
    found += [s for n in range(12, 30) for s in second.add(note(n))]
    assert found == expected
    assert list(second.whole()) == list(whole.whole())
