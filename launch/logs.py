"""What happened to a run: `python -m launch.logs FILE` is `bumpgate logs FILE`."""

import sys

from bumpgate.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "logs")
    main()
