"""Every error a user of streamchat can meet, and the exit code each one ends with.

StreamchatError                 1  failed while running
├── StateError                  1  a call that the stream's state does not allow
│   └── StreamFullError         1  a cache that evicts nothing has no room left
├── InputError                  1  the input could not be read
├── OutputError                 1  standard output could not be written (a full disk, say)
├── SessionError                1  a session could not be read or written
│   ├── SessionInUseError       1  another process has it open
│   └── DamagedError            1  a file of it is damaged, foreign, or of a newer format
├── UsageError                  2  bad flag or value, missing file
│   └── ConfigError             2  an option value out of range
└── ModelError                  3  the model cannot be found or loaded
    ├── UnsupportedModelError   3  the model cannot be streamed exactly
    └── SelfCheckError          3  the load-time self-check found a mismatch

A message says what happened, what was got, and what to do. The exit code sits on the class, so
that the command line needs one handler.
"""


class StreamchatError(Exception):
    """Root of the tree."""

    exit_code = 1


class StateError(StreamchatError):
    """The stream or cache is not in a state that allows the call."""


class StreamFullError(StateError):
    """A cache that evicts nothing has no room left."""


class InputError(StreamchatError):
    """The input could not be read."""


class OutputError(StreamchatError):
    """Standard output could not be written."""


class SessionError(StreamchatError):
    """A session could not be read or written."""


class SessionInUseError(SessionError):
    """Another process has the session open."""


class DamagedError(SessionError):
    """A file of a session is damaged, comes from elsewhere, or has a newer format."""


class UsageError(StreamchatError):
    """The command line was wrong."""

    exit_code = 2


class ConfigError(UsageError):
    """An option value is out of its range."""


class ModelError(StreamchatError):
    """The model cannot be found or loaded."""

    exit_code = 3


class UnsupportedModelError(ModelError):
    """The model was found, but cannot be streamed exactly."""


class SelfCheckError(ModelError):
    """The load-time self-check found a mismatch with the model's own path."""
