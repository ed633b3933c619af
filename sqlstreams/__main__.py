"""`python -m sqlstreams` is the command `sqlstreams`."""

import sys

from sqlstreams.cli import main

if __name__ == "__main__":
    sys.exit(main())
