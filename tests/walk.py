"""A walk through all that a stream can do, past several evictions: numbers to compare."""

from conftest import random_ids

import streamchat

POLICIES = {
    "dense": streamchat.CacheConfig(policy="dense", window_size=100),
    "h2o": streamchat.CacheConfig(policy="h2o", window_size=14),
    "snapkv": streamchat.CacheConfig(policy="snapkv", window_size=14),
}
CONFIG = streamchat.CacheConfig(sink_size=2, window_size=14)


def greedy(stream, num_tokens):
    """The most likely tokens, fed one by one."""
    chosen = []
    for _ in range(num_tokens):
        chosen.append(int(stream.logits.argmax()))
        stream.feed(chosen[-1:])
    return chosen


def walk(loaded, config=CONFIG):
    """Scores and greedy ids after feeding, forking, going back and taking back."""
    ids = random_ids(60)[0].tolist()
    stream = streamchat.Stream(loaded, config, chunk_size=20)
    stream.feed(ids[:25])
    before, fork = stream.snapshot(), stream.fork()
    seen = {"scores": stream.score(ids[25:]), "ids": greedy(stream, 8), "fork": greedy(fork, 8)}
    stream.restore(before)
    stream.cache.set_undo_depth(4)
    logits = stream.logits
    greedy(stream, 4)
    stream.rewind(4, logits)
    return {**seen, "again": greedy(stream, 8)}
