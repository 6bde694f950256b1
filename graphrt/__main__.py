"""`python3 -m graphrt` is the `graphrt` command."""

from __future__ import annotations

from graphrt.cli.app import main

if __name__ == "__main__":
    main()
