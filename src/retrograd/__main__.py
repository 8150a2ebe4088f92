"""`python -m retrograd`."""

import sys

from .cli import main

sys.exit(main())
