"""Work that nobody waits for: jobs done one after the other on one thread."""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

from streamchat.errors import SessionError

Job = Callable[[], object]


class Background:
    """Runs jobs in the order in which they came; the interpreter waits for them at its end.

    A job that fails with a `SessionError` does not end the others; `take_errors` gives what went
    wrong. Any other exception is a fault of the program, and `flush` and `close` raise it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="streamchat-store")
        self._jobs: dict[Hashable, Job] = {}
        self._errors: list[SessionError] = []
        self._fault: BaseException | None = None
        self._is_closed = False

    def submit(self, job: Job, *, replaces: Hashable | None = None) -> None:
        """Do something later.

        Args:
            job: What to do.
            replaces: Jobs with the same key that still wait are dropped: of several states, only
                the newest is saved, and only one waits in memory.

        Raises:
            RuntimeError: After `close`.
        """
        key = object() if replaces is None else ("replaces", replaces)
        with self._lock:
            self._pool.submit(self._do_next)
            self._jobs.pop(key, None)
            self._jobs[key] = job

    def flush(self) -> None:
        """Wait until all that was submitted is done."""
        if not self._is_closed:
            self._pool.submit(self._do_next).result()
        with self._lock:
            fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def take_errors(self) -> list[SessionError]:
        """What went wrong since this was asked last."""
        with self._lock:
            errors, self._errors = self._errors, []
        return errors

    def close(self) -> None:
        """Wait until all is done, and end the thread. Closing twice does nothing."""
        self._pool.shutdown(wait=True)
        self._is_closed = True
        self.flush()

    def _do_next(self) -> None:
        with self._lock:
            if not self._jobs:  # its job was replaced by a later one
                return
            job = self._jobs.pop(next(iter(self._jobs)))
        try:
            job()
        except SessionError as error:
            with self._lock:
                self._errors.append(error)
        except BaseException as error:  # raised where somebody waits for the result
            with self._lock:
                self._fault = self._fault or error
