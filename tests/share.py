"""Run by torchrun in tests: each process shares the models of a folder; the first says what it saw.

    torchrun … share.py FOLDER RESULTS

Python's interface, as a user's own script would use it.
"""

import json
import sys
import warnings
from pathlib import Path

from walk import walk

import streamchat


def main():
    warnings.simplefilter("error")
    folder, results = map(Path, sys.argv[1:])
    seen = {}
    for path in sorted(folder.iterdir()):
        try:
            loaded = streamchat.load(str(path), tensor_parallel=True)
        except streamchat.StreamchatError as error:
            seen[path.name] = str(error)
        else:
            seen[path.name] = walk(loaded)
    results.write_text(json.dumps(seen))


main()
