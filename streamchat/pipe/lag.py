"""How far behind its live input a run was: quantiles over all lines, in bounded memory."""

import math
from collections import Counter

SHORTEST_SECONDS = 1e-3
"""What is shorter counts as this."""

GROWTH = 1.02
"""Of a bucket against the one before: quantiles are right within two percent."""


class LagMeter:
    """Counts lines by how long they have waited."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.longest = 0.0

    def add(self, seconds: float, num_lines: int) -> None:
        """Take in lines that were dealt with so long after they came."""
        bucket = math.ceil(math.log(max(seconds, SHORTEST_SECONDS) / SHORTEST_SECONDS, GROWTH))
        self._buckets[bucket] += num_lines
        self.longest = max(self.longest, seconds)

    def quantile(self, share: float) -> float | None:
        """Seconds that this share of all lines have waited at most; None without lines."""
        total, count = self._buckets.total(), 0
        for bucket in sorted(self._buckets):
            count += self._buckets[bucket]
            if count and count >= share * total:
                return min(SHORTEST_SECONDS * GROWTH**bucket, self.longest)
        return None
