"""These tests need the emulated accelerator in pytest's own process: ``DS_ACCELERATOR=emulated``."""

import os

collect_ignore_glob = [] if os.environ.get("DS_ACCELERATOR") == "emulated" else ["test_*.py"]
