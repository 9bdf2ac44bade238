"""The streaming engine: feed, score, generate, fork. It yields events and prints nothing."""
