"""Ctrl-C before a command takes over: it ends the program, wherever it strikes."""

import subprocess
import sys

import typer

from streamchat.cli import app
from streamchat.cli.signals import start_interrupt

DROPPED = """
import os, signal
from streamchat.cli.signals import start_interrupt

class Noisy:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass

start_interrupt.install()
Noisy()
print("goes on")
try:
    start_interrupt.check()
except KeyboardInterrupt:
    print("noticed")
"""


def test_an_interrupt_that_python_drops_is_noticed():
    """In a destructor Python reports KeyboardInterrupt and goes on: no traceback, and no escape."""
    done = subprocess.run(
        [sys.executable, "-c", DROPPED], capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[:2] == ["goes on", "noticed"]
    assert done.stderr == ""


def test_what_a_half_done_import_raises_is_an_interrupt(monkeypatch, capsys):
    """After Ctrl-C in an import, whatever fails later is called what it is."""

    def fail(*_, **__):
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(typer.Typer, "__call__", fail)
    assert app.run(["info"]) == 1
    monkeypatch.setattr(start_interrupt, "has_come", True)
    assert app.run(["info"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "streamchat: interrupted"
