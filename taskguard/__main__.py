"""`python -m taskguard`: the command `taskguard`."""

import sys

from taskguard.cli import main

if __name__ == "__main__":
    sys.exit(main())
