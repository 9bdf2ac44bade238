"""Functions that Python calls: compiled once a machine, and kept on disk by numba."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

# What a sum in another order and fused multiply-adds need. Not `nnan`: a NaN must stay one.
FAST = {"reassoc", "contract", "nsz"}

OPTIONS = {"nogil": True, "fastmath": FAST, "error_model": "numpy"}


class Entry:
    """A compiled function that needs no interpreter lock.

    Args:
        function: What to compile. All it calls stands in this folder.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._compiled = self._build()
        self.is_ready = False
        newest = max(source.stat().st_mtime for source in Path(__file__).parent.glob("*.py"))
        if any(file.stat().st_mtime < newest for file in self._kept()):
            # numba looks at the function's own file only, not at what it calls.
            self._forget()

    @property
    def is_kept(self) -> bool:
        """Whether it has been compiled before, on this machine and from these sources."""
        return any(file.suffix == ".nbc" for file in self._kept())

    def __call__(self, *args: Any) -> None:
        """Run it; the first time, compile it or read what is kept."""
        if self.is_ready:
            self._compiled(*args)
            return
        try:
            self._compiled(*args)
        except Exception:  # a damaged file makes numba raise anything
            if not self._kept():
                raise
            self._forget()
            self._compiled(*args)
        self.is_ready = True

    def _build(self) -> Any:
        try:
            return njit(cache=True, **OPTIONS)(self._function)
        except RuntimeError:  # nothing can be written beside the source or in the user's cache
            return njit(**OPTIONS)(self._function)

    def _kept(self) -> list[Path]:
        folder = self._compiled.stats.cache_path
        name = self._function.__name__
        return [] if folder is None else list(Path(folder).glob(f"*.{name}-*.nb?"))

    def _forget(self) -> None:
        for file in self._kept():
            file.unlink(missing_ok=True)
        self._compiled = self._build()
