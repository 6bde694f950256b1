"""How many cases the tests marked `draws` draw: `GRAPHRT_TEST_MORE` times as many as usual."""

from __future__ import annotations

import os

MORE = int(os.environ.get("GRAPHRT_TEST_MORE", "1"))
