"""From a name to a model that can be streamed: find, load, prepare, check."""
