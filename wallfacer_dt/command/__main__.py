"""``python -m wallfacer_dt.command``."""

import sys

from wallfacer_dt.command.app import main

if __name__ == "__main__":
    sys.exit(main())
