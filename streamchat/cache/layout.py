"""Which token lives where: the decisions of the sink cache, in integers.

The position contract. Every other file points here.

* Tokens are numbered 0, 1, 2, … by their index in the stream. S = `sink_size`, W = `window_size`.
* After token t has been fed, the cache holds {0..S-1} and {t-W+1..t}, and nothing else. Token t
  attends to exactly these, itself included.
* Token p < S is a sink and has slot p. Token p >= S has slot S + (p - S) mod W: the window is a
  ring, and no token ever moves.
* A key is rotated for its stream position once, when it is written. The distance from query t to a
  window key j is then t - j, in any slot order.
* To a sink j the distance is t - j until token t = S + W - 1, and (S + W - 1) - j for ever after,
  so that no distance reaches S + W. The sinks are therefore scored by a query that is rotated as
  though it stood at min(t, S + W - 1). (Turning the sinks forward by the rest, step by step, would
  be the same; but that rounds other numbers than a chunk does, and a chunk cannot do it.)
* A model with ALiBi rotates nothing, and biases scores by these same distances: see `alibi.py`.

See StreamingLLM (Xiao et al. 2023, arXiv:2309.17453), section 3.2. The original code evicts after
the forward pass, so its query sees one key more than its window counts: its 4 + 1020 is 4 + 1021
here.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RingWrite:
    """Stream positions `positions`, to be copied to consecutive slots from `slot` on."""

    slot: int
    positions: range


@dataclass(frozen=True, slots=True)
class Layout:
    """Slots and positions of a cache of `sink_size` + `window_size` tokens.

    `num_seen` below is the number of tokens fed so far, so the next token is number `num_seen`.
    """

    sink_size: int
    window_size: int

    @property
    def cache_size(self) -> int:
        """Number of slots, S + W."""
        return self.sink_size + self.window_size

    def slot(self, position: int) -> int:
        """Slot of the token at `position`."""
        if position < self.sink_size:
            return position
        return self.sink_size + (position - self.sink_size) % self.window_size

    def num_held(self, num_seen: int) -> int:
        """Tokens in the cache. They fill the first slots without a gap."""
        return min(num_seen, self.cache_size)

    def num_sinks(self, num_seen: int) -> int:
        """Sinks in the cache."""
        return min(num_seen, self.sink_size)

    def num_evicted(self, num_seen: int) -> int:
        """Tokens that have left."""
        return max(0, num_seen - self.cache_size)

    def evicted_by(self, num_seen: int, count: int) -> range:
        """Positions that leave when `count` more tokens are fed."""
        start = self.sink_size + self.num_evicted(num_seen)
        return range(start, self.sink_size + self.num_evicted(num_seen + count))

    def held_window(self, num_seen: int) -> range:
        """Window positions in the cache, oldest first."""
        return range(max(self.sink_size, num_seen - self.window_size), num_seen)

    def ring_order(self, num_seen: int) -> tuple[range, range]:
        """Window positions in the order of their slots: after a wrap, the newer run comes first."""
        held = self.held_window(num_seen)
        if not held:
            return range(0), range(0)
        first_slot_position = held[-1] - (held[-1] - self.sink_size) % self.window_size
        return range(first_slot_position, held.stop), range(held.start, first_slot_position)

    def ring_writes(self, num_seen: int, count: int) -> list[RingWrite]:
        """Where the next `count` tokens go, the sinks among them and the overwritten left out."""
        end = num_seen + count
        start = max(num_seen, self.sink_size, end - self.window_size)
        writes = []
        while start < end:
            slot = self.slot(start)
            length = min(end - start, self.cache_size - slot)
            writes.append(RingWrite(slot, range(start, start + length)))
            start += length
        return writes

    def sink_query_position(self, position: int) -> int:
        """Where a query at `position` stands as seen from the sinks."""
        return min(position, self.cache_size - 1)

    def place_in_window(self, position: int, query: int) -> int:
        """Where the window token at `position` stands as seen by a query, the sinks at 0..S-1."""
        return self.sink_query_position(query) - (query - position)
