"""A campaign from the command line: `python -m experiments.campaign`."""

import sys

from experiments.campaign.run import main

if __name__ == "__main__":
    sys.exit(main())
