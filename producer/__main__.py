"""`undercurrent-producer`, `python -m producer`."""

from __future__ import annotations

import sys

from producer.cli import app
from undercurrent.cli.running import run


def main() -> None:
    """Run the command line of this process and exit with its code."""
    sys.exit(run(app, "undercurrent-producer"))


if __name__ == "__main__":
    main()
