"""``python -m minisgl``: the same as the ``minisgl`` command."""

from __future__ import annotations

import sys

from minisgl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
