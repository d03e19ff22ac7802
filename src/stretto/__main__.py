"""`python -m stretto`."""

import sys

from stretto_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
