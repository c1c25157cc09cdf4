"""`python -m hvd` is the program `hvd`."""

from hvd.cli.main import run

run()
