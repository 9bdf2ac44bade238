"""How this process was started. Known without torch, which the command line imports late."""

import os


def is_one_of_several() -> bool:
    """Whether torchrun has started this process, and others with it."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
