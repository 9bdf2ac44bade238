"""pipe."""
