"""`python -m undercurrent.cli`."""

from __future__ import annotations

from undercurrent.cli.main import main

if __name__ == "__main__":
    main()
