"""python -m flashsmith.cli"""

import sys

from . import main

sys.exit(main())
