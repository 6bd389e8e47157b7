"""What a person sees in the terminal once the server is ready."""

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text


def startup_line(total_seconds: float, stage_seconds: Mapping[str, float]) -> str:
    """How long the start took, and the engine's stages of it; those that took no time to speak of are left out."""
    stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in stage_seconds.items() if seconds >= 0.05)
    line = f"Ready after {total_seconds:.1f} s"
    return f"{line}: {stages}" if stages else line


def print_ready(base_url: str, model_name: str, console: Console) -> None:
    body = f'{{"model": "{model_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    # Not wrapped, so that it can be pasted.
    console.print(Text(f"\nReady on {base_url} with the model '{model_name}'. Try:"), soft_wrap=True)
    command = f"curl {base_url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
    console.print(Text(command), soft_wrap=True)
