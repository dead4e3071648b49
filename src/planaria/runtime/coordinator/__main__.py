"""``python -m planaria.runtime.coordinator``."""

import sys

from planaria.runtime.coordinator.server import main

if __name__ == "__main__":
    sys.exit(main())
