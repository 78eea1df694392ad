"""`python -m quaver`, the same as `quaver`."""

import sys

from quaver.lab.cli import main

sys.exit(main())
