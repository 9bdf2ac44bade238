"""Sessions on disk: what was said, what has left the window, and the state to go on from."""
