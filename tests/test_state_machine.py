"""Whatever is done to a cache in whatever order, it is the cache of a plain list of ids."""

import torch
from conftest import VOCAB_SIZE, tiny_model
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from oracles import assert_logits_equal, one_layer_oracle, retained_ids

from streamchat import CacheConfig, SinkCache, StateError
from streamchat.model.prepare import forward

MODEL = tiny_model(num_layers=1)
UNDO_DEPTH = 6

IDS = st.integers(3, VOCAB_SIZE - 1)


class CacheMachine(RuleBasedStateMachine):
    """A cache beside the list of all ids that it was fed. Oracle A gives the logits.

    One layer: what an upper layer would remember is left to `test_exactness`.
    """

    snapshots = Bundle("snapshots")

    @initialize(sink_size=st.sampled_from([0, 1, 4]), window_size=st.sampled_from([1, 3, 8]))
    def start(self, sink_size, window_size):
        self.sizes = (sink_size, window_size)
        config = CacheConfig(sink_size=sink_size, window_size=window_size)
        self.cache = SinkCache.for_model(MODEL, config)
        self.cache.set_undo_depth(UNDO_DEPTH)
        self.ids = []
        self.num_undoable = 0
        # Caches that were forked from or to, each with its ids and what it can take back.
        self.others = []

    def feed(self, ids):
        logits = forward(MODEL, torch.tensor([ids]), self.cache)[0, -1]
        self.ids = self.ids + ids
        assert_logits_equal(logits, one_layer_oracle(MODEL, self.ids, *self.sizes))

    @rule(ids=st.lists(IDS, min_size=2, max_size=30))
    def feed_chunk(self, ids):
        self.feed(ids)
        self.num_undoable = 0

    @rule(ids=st.lists(IDS, min_size=1, max_size=12))
    def feed_one_by_one(self, ids):
        for token in ids:
            self.feed([token])
        self.num_undoable = min(UNDO_DEPTH, self.num_undoable + len(ids))

    @rule(num_tokens=st.integers(1, UNDO_DEPTH + 1))
    def rewind(self, num_tokens):
        if num_tokens <= self.num_undoable:
            self.cache.rewind(num_tokens)
            self.ids = self.ids[: len(self.ids) - num_tokens]
            self.num_undoable -= num_tokens
            return
        try:
            self.cache.rewind(num_tokens)
        except StateError:
            return
        raise AssertionError("took back more than it could")

    @rule(ids=st.lists(IDS, min_size=1, max_size=20))
    def interrupt(self, ids):
        def fail(*_args):
            raise KeyboardInterrupt

        hook = MODEL.model.layers[0].mlp.register_forward_pre_hook(fail)
        try:
            forward(MODEL, torch.tensor([ids]), self.cache)
        except KeyboardInterrupt:
            pass
        finally:
            hook.remove()

    @rule()
    def fork(self):
        self.others.append((self.cache, self.ids, self.num_undoable))
        self.cache = self.cache.fork()
        self.num_undoable = 0

    @rule(index=st.integers(0, 9))
    def switch(self, index):
        if self.others:
            other = self.others.pop(index % len(self.others))
            self.others.append((self.cache, self.ids, self.num_undoable))
            self.cache, self.ids, self.num_undoable = other

    @rule(target=snapshots)
    def snapshot(self):
        return self.cache.snapshot(), self.ids

    @rule(saved=snapshots)
    def restore(self, saved):
        snapshot, self.ids = saved
        self.cache.restore(snapshot)
        self.num_undoable = 0

    @rule()
    def reset(self):
        self.cache.reset()
        self.ids = []
        self.num_undoable = 0

    @invariant()
    def counts_are_those_of_the_list(self):
        if not hasattr(self, "cache"):
            return
        num_held = len(retained_ids(self.ids, *self.sizes))
        assert self.cache.num_seen == len(self.ids)
        assert self.cache.num_held == num_held
        assert self.cache.num_evicted == len(self.ids) - num_held


CacheMachine.TestCase.settings = settings(deadline=None, max_examples=80, stateful_step_count=30)
TestCacheMachine = CacheMachine.TestCase
