"""`python -m hvd.cli.demo`."""

import sys

from hvd.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
