"""ALiBi: scores biased by distance, as the position contract in `layout.py` counts it.

Models make these biases from the place of a key alone, and leave it to the softmax that only
differences count. A key's place, here, is where it stands as seen from a query: sinks at 0..S-1,
the query at min(t, S+W-1), the window before it. What a model adds there is taken from its own
table, so that its rounding is the model's too: Falcon makes its biases in bfloat16, where they are
straight lines for the first 256 places only.

See Press et al. 2021, arXiv:2108.12409.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from streamchat.cache.layout import Layout
from streamchat.ops.attention import Bias


class PlaceBiases:
    """The biases of all places that keys of a cache can have.

    Args:
        layout: Sizes of sinks and window.
        table: What the model adds to the scaled scores of key 0, 1, …, shape (num_heads, S + W).
        longest_block: Queries that `of_block` is asked for at most.
    """

    def __init__(self, layout: Layout, table: Tensor, longest_block: int) -> None:
        self._layout, self._margin = layout, longest_block
        # One constant for each head, which no softmax sees: the keys next to the query of a full
        # cache get the smallest numbers, and their scores the least rounding.
        wide = table.double()
        self._table = (wide - wide[:, -1:]).float()
        # A block's first and last queries ask for each other's hidden keys as well.
        self._padded = F.pad(self._table, (longest_block, longest_block))

    def of_token(self, position: int) -> Tensor:
        """For all slots that are filled once the token at `position` is, as it sees them.

        Returns:
            Shape (num_heads, num_held).
        """
        layout = self._layout
        if position < layout.cache_size:
            return self._table[:, : position + 1]
        sinks, window = self._table[:, : layout.sink_size], self._table[:, layout.sink_size :]
        # Slots up to the newest token's hold the newer run, those behind it the older one.
        num_newer = layout.slot(position) - layout.sink_size + 1
        return torch.cat((sinks, window.roll(num_newer, dims=-1)), dim=-1)

    def of_block(self, queries: range, first_column: int) -> Bias:
        """For window keys in the order of the stream, the first one at `first_column`."""
        places = [self._layout.place_in_window(first_column, query) for query in queries]
        starts = torch.tensor(places, device=self._padded.device) + self._margin
        return Bias(self._padded, starts)

    def of_sinks(self, num_queries: int) -> Bias:
        """For the sinks, whose place is the same for all queries."""
        starts = torch.zeros(num_queries, dtype=torch.int64, device=self._table.device)
        return Bias(self._table, starts)
