"""`python -m quaver.cli`, the same as `quaver`."""

import sys

from quaver.cli import main

sys.exit(main())
