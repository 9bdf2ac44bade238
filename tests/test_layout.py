"""The integers of the sink cache against a plain list.

The oracle in every test here is `Held`: tokens written one at a time, the oldest that is no sink
dropped when there are too many. It shares nothing with `Layout` but the contract's sentence.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from streamchat.cache.layout import Layout

SINK_SIZES = st.integers(0, 9)
WINDOW_SIZES = st.integers(1, 12)
LENGTHS = st.integers(0, 70)


class Held:
    """Positions held after `length` tokens, oldest first, and those evicted, in order."""

    def __init__(self, sink_size, window_size, length):
        self.positions, self.evicted = [], []
        for position in range(length):
            self.positions.append(position)
            if len(self.positions) > sink_size + window_size:
                self.evicted.append(self.positions.pop(sink_size))


def written_one_at_a_time(layout, length):
    """Slot to position, as decode steps leave it."""
    return {layout.slot(position): position for position in range(length)}


@settings(deadline=None)
@given(SINK_SIZES, WINDOW_SIZES, LENGTHS)
def test_every_held_token_has_a_slot_of_its_own(sink_size, window_size, length):
    """The slots hold exactly the held tokens, in the first slots without a gap.

    It would miss a slot that is right here and moves later, as would any look at one moment.
    """
    layout, held = Layout(sink_size, window_size), Held(sink_size, window_size, length)
    slots = written_one_at_a_time(layout, length)
    assert sorted(slots.values()) == held.positions
    assert sorted(slots) == list(range(layout.num_held(length)))
    assert len(held.positions) == layout.num_held(length) <= layout.cache_size


@settings(deadline=None)
@given(SINK_SIZES, WINDOW_SIZES, LENGTHS)
def test_counts_are_those_of_the_list(sink_size, window_size, length):
    """Sinks, window and evicted tokens are counted as the list has them.

    It says nothing of where they lie.
    """
    layout, held = Layout(sink_size, window_size), Held(sink_size, window_size, length)
    sinks = [p for p in held.positions if p < sink_size]
    assert layout.num_sinks(length) == len(sinks)
    assert list(layout.held_window(length)) == held.positions[len(sinks) :]
    assert layout.num_evicted(length) == len(held.evicted)


@settings(deadline=None)
@given(SINK_SIZES, WINDOW_SIZES, LENGTHS, LENGTHS)
def test_evicted_by_is_what_leaves_the_list(sink_size, window_size, length, count):
    """The tokens that feeding `count` more evicts are named in the order in which they leave.

    With a chunk longer than the window, tokens of the chunk itself are among them.
    """
    layout = Layout(sink_size, window_size)
    before = Held(sink_size, window_size, length).evicted
    after = Held(sink_size, window_size, length + count).evicted
    assert list(layout.evicted_by(length, count)) == after[len(before) :]


@settings(deadline=None)
@given(SINK_SIZES, WINDOW_SIZES, LENGTHS)
def test_ring_order_is_the_order_of_the_slots(sink_size, window_size, length):
    """The newer run, then the older, are the window's positions read slot by slot.

    It would miss runs that are cut elsewhere than at the newest token.
    """
    layout = Layout(sink_size, window_size)
    slots = written_one_at_a_time(layout, length)
    by_slot = [slots[slot] for slot in sorted(slots) if slot >= sink_size]
    newer, older = layout.ring_order(length)
    assert [*newer, *older] == by_slot
    assert not older or newer[-1] == length - 1


@settings(deadline=None)
@given(SINK_SIZES, WINDOW_SIZES, LENGTHS, st.integers(1, 70))
def test_ring_writes_leave_what_writing_one_at_a_time_leaves(sink_size, window_size, length, count):
    """A chunk's writes put the ring where single writes do, each slot written at most once.

    Sinks have a store of their own: the writes leave their slots alone.
    """
    layout = Layout(sink_size, window_size)
    slots = {s: p for s, p in written_one_at_a_time(layout, length).items() if s >= sink_size}
    written = []
    for write in layout.ring_writes(length, count):
        for offset, position in enumerate(write.positions):
            slots[write.slot + offset] = position
            written.append(write.slot + offset)
    expected = written_one_at_a_time(layout, length + count)
    assert slots == {s: p for s, p in expected.items() if s >= sink_size}
    assert len(written) == len(set(written)) <= window_size


@settings(deadline=None)
@given(SINK_SIZES, WINDOW_SIZES, st.integers(0, 200))
def test_distances_are_those_inside_the_list(sink_size, window_size, position):
    """From a query to a window key t - j, to a sink from `sink_query_position`, is the list's own.

    No distance reaches S + W. How the tensors are turned is not looked at here.
    """
    layout = Layout(sink_size, window_size)
    held = Held(sink_size, window_size, position + 1).positions
    seen_from_sinks = layout.sink_query_position(position)
    for index, key in enumerate(held):
        distance = (seen_from_sinks if key < sink_size else position) - key
        assert distance == held.index(position) - index
        assert 0 <= distance < layout.cache_size
