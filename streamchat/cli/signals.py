"""SIGINT and SIGTERM while a stream runs: finish what is in hand, then leave with their code."""

import os
import signal
from collections.abc import Callable
from types import FrameType

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class StopRequest:
    """Turns the first signal into a request to stop; the second one ends the process at once.

    Args:
        on_stop: Called once, with the first signal.
    """

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self.exit_code: int | None = None
        self._on_stop = on_stop
        for number in EXIT_CODES:
            signal.signal(number, self._handle)

    def __call__(self) -> bool:
        """Whether a stop was requested."""
        return self.exit_code is not None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        code = EXIT_CODES[signal.Signals(number)]
        if self.exit_code is not None:
            os._exit(code)
        self.exit_code = code
        self._on_stop()
