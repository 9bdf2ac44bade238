"""Run by torchrun in tests: the processes share the models of a folder, one after the other.

    torchrun … share.py FOLDER RESULTS

By Python's interface, as in a script of a user's own; the first process says what came out.
"""

import json
import sys
from pathlib import Path

from walk import POLICIES, walk

import streamchat

if __name__ == "__main__":
    folder, results = map(Path, sys.argv[1:])
    seen = {}
    for path in sorted(folder.iterdir()):
        try:
            loaded = streamchat.load(str(path), tensor_parallel=True)
            seen[path.name] = walk(loaded)
            if path.name == "llama":
                seen |= {name: walk(loaded, config) for name, config in POLICIES.items()}
        except streamchat.ModelError as error:
            seen[path.name] = str(error)
    results.write_text(json.dumps(seen), encoding="utf-8")
