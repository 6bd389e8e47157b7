"""The README's table of settings is what the settings tree says."""

from pathlib import Path

from server.settings import ENV_PREFIX, Settings

README = Path(__file__).parent.parent / "README.md"


def settings_table() -> str:
    """A row per setting: its flag, its environment variable, its default, what it does."""
    rows = ["| flag | environment | default | |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        flag = "--" + name.replace("_", "-")
        if name == "model":
            flag = "MODEL"
        elif field.annotation is bool:
            flag = f"{flag}, --no-{name}"
        default = {None: "", True: "on", False: "off"}.get(field.default, str(field.default))
        rows.append(f"| `{flag}` | `{ENV_PREFIX}{name.upper()}` | {default} | {field.description} |")
    return "\n".join(rows)


def test_the_readme_lists_the_settings() -> None:
    text = README.read_text()
    start, end = text.index("<!-- settings -->"), text.index("<!-- /settings -->")
    listed = text[start:end].removeprefix("<!-- settings -->").strip()
    assert listed == settings_table(), f"put this between the markers:\n{settings_table()}"
