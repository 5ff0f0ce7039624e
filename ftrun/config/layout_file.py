"""Reads the text of layout rules: a file, or a layout that is packaged with ftrun.

A layout with values, such as `megatron-core:layers=24,vocab=50257,tp=2`, is a file in which `$tp`
is replaced. A comment of the file lists the values, those with a default as `tp=1`:

    # values: layers vocab tp=1

A line that ends with `# only tp=1` is left out if tp has another value.
"""

import re
from pathlib import Path
from string import Template

from ftrun.errors import UsageError

PACKAGED = Path(__file__).parent / "layouts"
_WITH_VALUES = re.compile(r"(.+?):(\w+=[^,]+(?:,\w+=[^,]+)*)")
_ONLY = re.compile(r"# only (\w+)=(\w+)$")
_DECLARED = re.compile(r"^# values: (.*)$", re.MULTILINE)


def layout_text(given: str) -> str:
    """The rules that a path or the name of a packaged layout stands for; OSError: no such file.

    Raises UsageError if values are missing or not known.
    """
    found = _WITH_VALUES.fullmatch(given)
    name, words = (found[1], found[2].split(",")) if found else (given, [])
    text = _path_of(name).read_text()
    values = dict(word.split("=", 1) for word in words)
    declared = _DECLARED.search(text)
    known = declared[1].split() if declared else []
    defaults = dict(word.split("=", 1) for word in known if "=" in word)
    needed = [word.partition("=")[0] for word in known]
    if unknown := [key for key in values if key not in needed]:
        there = ", ".join(needed) or "none"
        raise UsageError(f"layout {given}: {unknown[0]} is not a value of {name}; it has {there}")
    if missing := [key for key in needed if key not in values | defaults]:
        example = ",".join(f"{key}=..." for key in missing)
        raise UsageError(f"layout {name} needs {', '.join(missing)}: give {name}:{example}")
    if not known:
        return text
    filled = defaults | values
    lines = [
        line
        for line in text.splitlines()
        if (only := _ONLY.search(line)) is None or filled.get(only[1]) == only[2]
    ]
    return Template("\n".join(lines)).safe_substitute(filled)


def _path_of(name: str) -> Path:
    packaged = PACKAGED / f"{name}.yaml"
    is_name = re.fullmatch(r"[\w-]+", name) is not None
    return packaged if is_name and not Path(name).exists() and packaged.exists() else Path(name)
