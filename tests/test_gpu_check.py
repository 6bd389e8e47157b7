import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.sh"


def test_without_a_gpu_it_fails_with_the_reason() -> None:
    done = subprocess.run(
        [SCRIPT],
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == (
        "torch finds no CUDA device here; run this on a machine with an NVIDIA GPU and a torch that is built for it."
    )
