"""`python -m enqueuer`: the same as the console command `enqueuer`."""

import sys

from enqueuer.cli import main

if __name__ == "__main__":
    sys.exit(main())
