"""The command line in several processes: the first runs it, the others follow."""

from collections.abc import Sequence

from streamchat.cli import app
from streamchat.cli.program import Program
from streamchat.errors import StreamchatError


def run(args: Sequence[str]) -> int:
    """Run the command line in a process that torchrun has started.

    The processes meet before anything is parsed: whatever ends the first one ends all.

    Returns:
        The exit code.
    """
    from streamchat.model.follow import follow
    from streamchat.model.ranks import join

    try:
        ranks = join()
    except StreamchatError as error:
        Program().messages().error(str(error))
        return error.exit_code
    if not ranks.is_first:
        return follow(ranks)
    try:
        return app.run(args)
    finally:
        ranks.end()
