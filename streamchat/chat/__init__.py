"""Turns: a conversation of which only the new ids are fed."""
