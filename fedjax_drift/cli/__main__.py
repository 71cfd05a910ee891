"""``python -m fedjax_drift.cli`` runs the command ``fedjax-drift``."""

import sys

from fedjax_drift.cli import main

sys.exit(main())
