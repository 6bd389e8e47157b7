"""Entry of a process that serves with accelerate's offload: `python -m engine.peers.accelerate FD bench CONFIG`.

transformers' own model with the weights that do not fit in a slower tier. accelerate's hooks load each module's weights
before its forward pass, all experts of a layer at once, and drop them after it.
"""

import gc
import logging
import sys

from engine.config import BenchConfig
from engine.errors import ConfigError
from engine.phases import PhaseClock
from engine.process import Connection, main, quiet_libraries, serve
from engine.protocol import Ready, Task


def run(connection: Connection, task: Task, config_json: str) -> None:
    """Serve until the server says that it is enough. Raises `SpecterError`."""
    if task != "bench":
        raise ConfigError(f"accelerate's offload is there to be compared with, and has no task {task!r}; use 'bench'.")
    config = BenchConfig.model_validate_json(config_json)
    clock = PhaseClock()
    with clock.phase("imports"):
        # Not earlier: `main` sets what torch reads when it is loaded.
        from engine.peers.build import open_peer

        quiet_libraries()
        # Where weights went is in the plan.
        logging.getLogger("accelerate").setLevel(logging.ERROR)
        gc.freeze()
    with open_peer(config, connection.send, clock) as (core, capabilities):
        connection.is_serving = True
        connection.send(Ready(capabilities))
        serve(connection, core)


if __name__ == "__main__":
    sys.exit(main(run))
