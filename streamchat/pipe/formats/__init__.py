"""Readers of input formats: lines in, cues out, each as soon as it is complete.

They are state machines over text: no file, no clock, no terminal. What they do not know they pass
on as text, so that no speech is lost.
"""
