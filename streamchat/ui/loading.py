"""Loading in the background, while the user types already."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from streamchat.errors import StreamchatError

POLL_SECONDS = 0.1

Result = TypeVar("Result")


class Background(Generic[Result]):
    """A function's result, computed in a thread.

    Args:
        compute: The function.
        failed: Called in the thread if it raises.
    """

    def __init__(self, compute: Callable[[], Result], failed: Callable[[], None]) -> None:
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._done = threading.Event()

        def run() -> None:
            try:
                self._result.append(compute())
            except BaseException as error:  # raised again in the thread that asks
                self._error = error
            self._done.set()
            if self._error is not None:
                failed()

        threading.Thread(target=run, name="load", daemon=True).start()

    def is_done(self) -> bool:
        """Whether it has returned or raised."""
        return self._done.is_set()

    def has_result(self) -> bool:
        """Whether it has returned."""
        return self.is_done() and self._error is None

    def wait(self, gives_up: Callable[[], bool] = lambda: False) -> None:
        """Until it is done, or `gives_up`."""
        while not self._done.wait(POLL_SECONDS) and not gives_up():
            pass

    def result(self) -> Result:
        """What it returned; waits for it.

        Raises:
            BaseException: What it raised.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        if not self._result:
            raise StreamchatError("loading gave no result")
        return self._result[0]
