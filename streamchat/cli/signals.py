"""SIGINT and SIGTERM while a stream runs: finish what is in hand, then leave with their code."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

HANG_UP: signal.Signals | None = getattr(signal, "SIGHUP", None)
"""Sent when the terminal is gone; Windows has no such signal."""

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
if HANG_UP is not None:
    EXIT_CODES[HANG_UP] = 129

ENDS = (signal.SIGINT, signal.SIGTERM)


class StartInterrupt:
    """Ctrl-C before a command takes over raises KeyboardInterrupt, and is not forgotten.

    Python drops an exception that comes up in a destructor, and libraries catch what goes wrong
    while they are imported; the program would then run on, or fail with something else.
    """

    def __init__(self) -> None:
        self.has_come = False

    def install(self) -> None:
        """From now on notice SIGINT."""
        signal.signal(signal.SIGINT, self._handle)
        report = sys.unraisablehook

        def unraisable(unraisable: Any) -> None:
            if not issubclass(unraisable.exc_type, KeyboardInterrupt):
                report(unraisable)

        sys.unraisablehook = unraisable

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.has_come = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise what was dropped, in the thread that signals come to."""
        if self.has_come and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt


start_interrupt = StartInterrupt()


class StopRequest:
    """Turns the first signal into a request to stop; the second one ends the process at once.

    Args:
        on_stop: Called once, with the first signal.
        numbers: Which signals; those that the program was started to ignore (nohup) stay ignored.
    """

    def __init__(
        self, on_stop: Callable[[], None], numbers: Sequence[signal.Signals] = ENDS
    ) -> None:
        self.exit_code: int | None = None
        self._on_stop = on_stop
        for number in numbers:
            if number != HANG_UP or signal.getsignal(number) != signal.SIG_IGN:
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
