"""Entry point of the command `streamchat`."""

import os
import sys

SPIN_COUNT = "2000"
"""How long a waiting OpenMP thread of torch spins. The default is fine on an idle machine only:
with one of two cores busy (a speech recogniser, say) decoding took 81 to 252 ms a token instead of
47; on an idle machine the two are equal within noise. See docs/log.md."""


def main() -> None:
    """Run the command line and leave with its exit code."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    from streamchat.cli.signals import start_interrupt

    start_interrupt.install()
    try:
        from streamchat.model.launch import is_one_of_several

        if is_one_of_several():
            from streamchat.cli.ranks import run
        else:
            from streamchat.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # during the imports
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
