"""Finds, reads and merges profiles, and records the origin of each value.

Runs in:  cli.
Takes in: a profile by name or file, FTRUN_SECTION_KEY variables, flags, --set.
Gives:    a validated `Profile`, and the origin of each key.

Later layers override earlier ones: defaults, profile, environment, flags. Every layer is validated
completely, so that one error lists all problems.
"""

import difflib
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import yaml

import ftrun
from ftrun.config import MAX_DATA, MAX_PARITY, Profile
from ftrun.errors import ProfileInvalid, UsageError
from ftrun.wire import run_environment as env

MAX_PROFILE_BYTES = 64 * 1024
DEFAULT = "default"

_WANTED = {
    ("snapshot", "every"): "should be auto or a number",
    ("erasure", "scheme"): "should be auto, none or K+M, such as 4+2",
    ("hooks", "webhook"): "should be an address that begins with http:// or https://",
}

_BOUNDS = {
    " >= ": "greater than or equal to",
    " <= ": "less than or equal to",
    " > ": "greater than",
    " < ": "less than",
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
}

_SHORT_NAMES = {("security", "secret_file"): ("FTRUN_SECRET_FILE",)}
"""Additional variables of a key, besides `variable_name`."""

INTERNAL_NAMES = frozenset(
    value for name, value in vars(env).items() if name.isupper() and isinstance(value, str)
)
"""Variables that ftrun sets for its workers; a run inside a worker must not read them."""


@dataclass(frozen=True, slots=True)
class SettingValue:
    """The value of one key, and its origin."""

    section: str
    key: str
    value: object
    origin: str

    def __str__(self) -> str:
        return f"{self.section}.{self.key}" if self.key else self.section


@dataclass(frozen=True, slots=True)
class ProfileLayer:
    """The settings of one source, and the problems that prevented reading others."""

    source: str
    settings: tuple[SettingValue, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResolvedProfile:
    """A validated profile; `origins` maps `section.key` to its origin."""

    profile: Profile
    origins: Mapping[str, str] = field(default_factory=dict)


def profile_folder() -> Path:
    """Returns the folder of packaged profiles: in the installed package, or in the checkout."""
    package = Path(ftrun.__file__).parent
    installed = package / "_data" / "profiles"
    return installed if installed.is_dir() else package.parent / "profiles"


def profile_names() -> list[str]:
    """Returns the names of packaged profiles; drill plans in the same folder are excluded."""
    names = (path.stem for path in profile_folder().glob("*.yaml"))
    return sorted(name for name in names if not name.startswith("drill"))


def find_profile(name: str) -> Path:
    packaged = profile_folder() / f"{name}.yaml"
    if name in profile_names():
        return packaged
    if Path(name).is_file():
        return Path(name)
    names = profile_names()
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise UsageError(
        f"there is no profile {name!r}, neither of that name ({', '.join(names)}) nor as a file "
        f"under {Path.cwd()}.{hint}"
    )


def shown_path(path: Path) -> str:
    """Shortens a path: the file name of a packaged profile, else relative to the current folder.

    A path outside the current folder is unchanged. Symbolic links are not followed.
    """
    if path.parent == profile_folder():
        return path.name
    if path.is_absolute() and path.is_relative_to(here := Path.cwd()):
        return str(path.relative_to(here))
    return str(path)


def resolve(
    name: str | None,
    *,
    variables: Mapping[str, str],
    torchrun: Sequence[SettingValue] = (),
    flags: Sequence[SettingValue] = (),
) -> ResolvedProfile:
    """Merges all layers into a validated profile.

    Args:
        name: the name or file of the profile.
        variables: the environment.
        torchrun: settings from PET_ variables; they override the profile, and FTRUN_ variables
            override them.
        flags: settings from the command line.

    Raises:
        UsageError: there is no such profile.
        ProfileInvalid: lists all unknown keys and all invalid values.
    """
    layers = [
        ProfileLayer("PET_ variables", tuple(torchrun)),
        _environment_layer(variables),
        ProfileLayer("the command line", tuple(flags)),
    ]
    if name is not None:
        layers.insert(0, read_profile(find_profile(name)))
    problems = {layer.source: _problems(layer) for layer in layers}
    wrong = [source for source, found in problems.items() if found]
    if wrong:
        raise ProfileInvalid(
            source=" and ".join(wrong), problems=[p for source in wrong for p in problems[source]]
        )
    merged: dict[str, dict[str, object]] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        for setting in layer.settings:
            merged.setdefault(setting.section, {})[setting.key] = setting.value
            origins[str(setting)] = setting.origin
    return ResolvedProfile(msgspec.convert(merged, Profile), origins)


@cache
def section_types() -> dict[str, Any]:
    return get_type_hints(Profile)


@cache
def key_types(section: Any) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)


def about_key(section: type, key: str) -> str:
    found = [
        one.description
        for one in get_args(key_types(section)[key])
        if isinstance(one, msgspec.Meta)
    ]
    return found[0] or ""


def known_keys() -> Iterator[tuple[str, str]]:
    for section, keys in section_types().items():
        for key in key_types(keys):
            yield section, key


def variable_name(section: str, key: str) -> str:
    return f"FTRUN_{section}_{key}".upper()


def setting_from_text(text: str) -> SettingValue:
    """Parses `section.key=value` as given to --set; the value is read as YAML.

    Raises:
        UsageError: the text does not have this form.
    """
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot or not key:
        raise UsageError(f"--set takes section.key=value, such as snapshot.every=5, not {text!r}")
    return SettingValue(section, key, plain_value(value), f"--set {text}")


def plain_value(text: str) -> object:
    """Reads text from a flag or a variable as YAML; text that is not YAML stays text."""
    try:
        return yaml.load(text, Loader=PlainLoader)
    except yaml.YAMLError:
        return text


def read_profile(path: Path) -> ProfileLayer:
    """Reads the settings of a file with their line numbers; unreadable parts are in `problems`."""
    source = shown_path(path)
    data = path.read_bytes()
    if len(data) > MAX_PROFILE_BYTES:
        return ProfileLayer(
            source,
            problems=(f"it has {len(data)} bytes, and a profile has {MAX_PROFILE_BYTES} at most",),
        )
    try:
        loader = PlainLoader(data)
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        return ProfileLayer(source, problems=(_yaml_problem(error),))
    if node is None:
        return ProfileLayer(source)
    reader = _NodeReader(source, loader)
    try:
        reader.read(node)
    except yaml.YAMLError as error:
        reader.problems.append(_yaml_problem(error))
    return ProfileLayer(source, tuple(reader.settings), tuple(reader.problems))


class PlainLoader(yaml.SafeLoader):
    """Loads plain data: no tags with effects; no aliases, because their expansion is unbounded."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, "aliases are not allowed in a profile", event.start_mark
            )
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


class _NodeReader:
    """Converts a YAML tree to settings that keep their line numbers."""

    def __init__(self, source: str, loader: PlainLoader) -> None:
        self._source = source
        self._loader = loader
        self.settings: list[SettingValue] = []
        self.problems: list[str] = []

    def read(self, root: yaml.Node) -> None:
        for section, node in self._entries(root, "a profile"):
            if isinstance(node, yaml.ScalarNode) and not node.value:
                continue
            for key, value in self._entries(node, section):
                origin = f"{self._source}:{value.start_mark.line + 1}"
                plain = self._loader.construct_document(value)
                self.settings.append(SettingValue(section, key, plain, origin))

    def _entries(self, node: yaml.Node, what: str) -> Iterator[tuple[str, yaml.Node]]:
        line = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            known = what in section_types() or what == "a profile"
            said = f"{what} holds keys with values" if known else _unknown_section(what)
            self.problems.append(f"line {line}: {said}")
            return
        seen: set[str] = set()
        for key_node, value in node.value:
            key = str(key_node.value)
            if key in seen:
                self.problems.append(f"line {key_node.start_mark.line + 1}: {key} is there twice")
            seen.add(key)
            yield key, value


def _environment_layer(variables: Mapping[str, str]) -> ProfileLayer:
    settings = []
    for section, key in known_keys():
        for name in (*_SHORT_NAMES.get((section, key), ()), variable_name(section, key)):
            if name in variables and name not in INTERNAL_NAMES:
                value = plain_value(variables[name])
                settings.append(SettingValue(section, key, value, f"environment {name}"))
    return ProfileLayer("the environment", tuple(settings))


def _problems(layer: ProfileLayer) -> list[str]:
    nested: dict[str, dict[str, object]] = {}
    for setting in layer.settings:
        nested.setdefault(setting.section, {})[setting.key] = setting.value
    found = list(layer.problems)
    origins = {str(setting): setting.origin for setting in layer.settings}
    for section, values in nested.items():
        keys = section_types().get(section)
        if keys is None:
            origin = origins[next(name for name in origins if name.split(".")[0] == section)]
            found.append(f"{origin}: {_unknown_section(section)}")
            continue
        for key, value in values.items():
            found += _problem_of(section, key, value, origins.get(f"{section}.{key}", section))
    return [*found, *_impossible_values(nested, origins)]


def _problem_of(section: str, key: str, value: object, origin: str) -> list[str]:
    types = key_types(section_types()[section])
    if key not in types:
        near = difflib.get_close_matches(key, types, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(types)}"
        return [f"{origin}: {key} is not a key of {section}{hint}"]
    try:
        msgspec.convert(value, types[key])
    except msgspec.ValidationError as error:
        said = _WANTED.get((section, key)) or f"should be {_wanted(str(error), types[key])}"
        return [f"{origin}: {section}.{key} {said}, and is {value!r}"]
    return []


def _wanted(said: str, wanted: Any) -> str:
    """Rewrites the expectation in a msgspec error as plain words."""
    choices = [one for part in get_args(wanted)[:1] for one in get_args(part)]
    if said.startswith("Invalid enum value"):
        return f"one of {', '.join(map(str, choices))}"
    text, _, _ = said.removeprefix("Expected ").partition(", got")
    if " of length " in text:
        return "a text that is not empty"
    for sign, words in _BOUNDS.items():
        if sign in text:
            return f"{words} {text.partition(sign)[2].removesuffix('.0')}"
    for name, words in _KINDS.items():
        text = text.replace(f"`{name}`", words)
    return text.replace("`", "").replace(" | null", "")


def _impossible_values(
    nested: Mapping[str, Mapping[str, object]], origins: Mapping[str, str]
) -> list[str]:
    """Returns problems with values of the right type, such as a signal name that does not exist."""
    found = []
    every = nested.get("snapshot", {}).get("every")
    if isinstance(every, int) and not isinstance(every, bool) and every < 1:
        found.append(f"{origins['snapshot.every']}: snapshot.every is auto, or 1 and more")
    scheme = nested.get("erasure", {}).get("scheme")
    if isinstance(scheme, str) and (match := re.fullmatch(r"(\d+)\+(\d+)", scheme)):
        data, parity = int(match[1]), int(match[2])
        if data > MAX_DATA or parity > MAX_PARITY:
            found.append(
                f"{origins['erasure.scheme']}: erasure.scheme has at most {MAX_DATA}+{MAX_PARITY}, "
                f"and is {scheme}"
            )
    names = nested.get("stop", {}).get("forward")
    found.extend(
        f"{origins['stop.forward']}: {name!r} is no signal; they are written as SIGUSR1"
        for name in (names if isinstance(names, list) else [])
        if name not in signal.Signals.__members__
    )
    return found


def _unknown_section(section: str) -> str:
    names = list(section_types())
    near = difflib.get_close_matches(section, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    return f"{section} is not a section; {hint}"


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    mark = mark or getattr(error, "context_mark", None)
    return f"line {mark.line + 1}: {problem}" if mark else str(problem)
