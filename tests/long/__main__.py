"""`python -m tests.long`: see `tests.long.run`."""

from tests.long.run import main

raise SystemExit(main())
