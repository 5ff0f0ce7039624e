"""The files that docs/layouts.md shows."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"


def rule_file(name: str) -> str:
    """The text of a file of rules, which begins with its name as a comment."""
    found = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return next(text for text in found if text.startswith(f"# {name}\n"))
