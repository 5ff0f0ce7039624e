"""Reads the text of layout rules: a file, or a layout that is packaged with ftrun.

A layout with values, such as `megatron-core:layers=24,vocab=50257,fc1=2,tp=2`, is a file in which
`$tp` is replaced. Comments of the file list the values, those with a default as `tp=1`:

    # values: layers tp=1

A line that ends with `# only tp=1` is left out if tp has another value. A comment may limit the
values, with the reason in parentheses; `unless` is optional:

    # require: cp=1 unless tp=1 (the reason)

A file without `$` has no values, and its comments have no meaning.
"""

import os.path
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from ftrun.errors import UsageError

PACKAGED = Path(__file__).parent / "layouts"
_WITH_VALUES = re.compile(r"(.+?):(\w+=[^,]+(?:,\w+=[^,]+)*)")
_ONLY = re.compile(r"# only (\w+)=(\w+)$")
_DECLARED = re.compile(r"^# values: (.*)$", re.MULTILINE)
_REQUIRED = re.compile(r"^# require: (\w+)=(\S+)(?: unless (\w+)=(\S+))? \((.*)\)$", re.MULTILINE)


def layout_text(given: str) -> str:
    """The rules that a path or the name of a packaged layout stands for; OSError: no such file.

    Raises UsageError if values are missing, not known, or not supported together.
    """
    found = None if os.path.exists(given) else _WITH_VALUES.fullmatch(given)
    name, words = (found[1], found[2].split(",")) if found else (given, [])
    text = _path_of(name).read_text()
    known = " ".join(_DECLARED.findall(text)).split() if "$" in text else []
    filled = _filled(known, dict(word.split("=", 1) for word in words), name)
    if not known:
        return text
    lines = [
        line
        for line in text.splitlines()
        if (only := _ONLY.search(line)) is None or filled.get(only[1]) == only[2]
    ]
    made = Template("\n".join(lines)).safe_substitute(filled)
    for key, wanted, other, usual, reason in _REQUIRED.findall(made):
        if filled.get(key) != wanted and (not other or filled.get(other) != usual):
            raise UsageError(f"layout {name}: {key}={filled.get(key)} is not supported; it must be "
                             f"{wanted}: {reason}")  # fmt: skip
    return made


def _filled(known: Sequence[str], values: Mapping[str, str], name: str) -> dict[str, str]:
    """The values, and the defaults of the others; `known` are words such as `layers` and `tp=1`."""
    defaults = dict(word.split("=", 1) for word in known if "=" in word)
    needed = [word.partition("=")[0] for word in known]
    if unknown := [key for key in values if key not in needed]:
        there = ", ".join(needed) or "none"
        raise UsageError(f"layout {name}: {unknown[0]} is not a value of {name}; it has {there}")
    if missing := [key for key in needed if key not in values and key not in defaults]:
        example = ",".join(f"{key}=..." for key in missing)
        raise UsageError(f"layout {name} needs {', '.join(missing)}: give {name}:{example}")
    return defaults | dict(values)


def _path_of(name: str) -> Path:
    packaged = PACKAGED / f"{name}.yaml"
    is_name = re.fullmatch(r"[\w-]+", name) is not None
    return packaged if is_name and not Path(name).exists() and packaged.exists() else Path(name)
