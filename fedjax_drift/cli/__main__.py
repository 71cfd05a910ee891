"""``python -m fedjax_drift.cli`` is ``fedjax-drift``."""

import sys

from fedjax_drift.cli import main

sys.exit(main())
