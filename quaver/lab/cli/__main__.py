"""`python -m quaver.lab.cli`, the same as `quaver`."""

import sys

from quaver.lab.cli import main

sys.exit(main())
