"""`python -m tests.server.run_server [fake engine options] -- [specter arguments]`: the command with a fake engine."""

import sys

from server.__main__ import main

if __name__ == "__main__":
    split = sys.argv.index("--")
    engine_command = [sys.executable, "-m", "tests.server.fake_engine", *sys.argv[1:split]]
    sys.exit(main(sys.argv[split + 1 :], engine_command))
