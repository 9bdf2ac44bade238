"""What crashes, disks and people do to files, for tests of whoever reads them."""

from dataclasses import dataclass

from hypothesis import strategies as st


@dataclass(frozen=True)
class Edit:
    """One change to the bytes of a file.

    Attributes:
        kind: What is done.
        place: Where, as a share of the file.
        size: Bytes concerned.
        new: What is written there.
    """

    kind: str
    place: float
    size: int
    new: bytes

    def apply(self, data):
        at = int(self.place * len(data))
        end = at + self.size
        if self.kind == "flip" and data:
            bit = 1 << self.size % 8
            return data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
        if self.kind == "overwrite":
            return data[:at] + self.new + data[at + len(self.new) :]
        if self.kind == "zero":
            return data[:at] + bytes(len(data[at:end])) + data[end:]
        if self.kind == "truncate":
            return data[:at]
        if self.kind == "insert":
            return data[:at] + self.new + data[at:]
        return data[:end] + data[at:]  # a part twice


EDITS = st.lists(
    st.builds(
        Edit,
        kind=st.sampled_from(["flip", "overwrite", "zero", "truncate", "insert", "repeat"]),
        place=st.floats(0, 1, exclude_max=True),
        size=st.sampled_from([1, 2, 3, 4, 16, 600, 5000]),
        new=st.binary(max_size=16),
    ),
    min_size=1,
    max_size=3,
)


def damaged(data, edits):
    """The bytes after all edits."""
    for edit in edits:
        data = edit.apply(data)
    return data
