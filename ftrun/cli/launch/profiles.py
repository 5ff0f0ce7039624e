"""Finds, reads and merges profiles, and records the origin of each value.

Later layers override earlier ones: defaults, profile, environment, flags. Every layer is validated
completely, so that one error lists all problems.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

import ftrun
from ftrun.config.checks import Problem, check, fields_of, suggestion, unknown_key
from ftrun.config.profile import FORWARDED_NAMES, RENAMED_KEYS, Profile
from ftrun.erasure.codec import MAX_DATA, MAX_PARITY
from ftrun.errors import ProfileInvalid, UsageError
from ftrun.wire import run_environment as env

MAX_PROFILE_BYTES = 64 * 1024

_SHORT_NAMES = {("security", "secret_file"): ("FTRUN_SECRET_FILE",)}  # more variables of a key
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
    """The file name of a packaged profile, else relative to the current folder if below it."""
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

    `torchrun` are settings from PET_ variables; they override the profile, and FTRUN_ variables
    override them. A ProfileInvalid lists all unknown keys and all invalid values.
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


def known_keys() -> Iterator[tuple[str, str]]:
    for name, section in fields_of(Profile).items():
        for key in fields_of(section.type):
            yield name, key


def key_type(section: str, key: str) -> Any:
    return fields_of(fields_of(Profile)[section].type)[key].type


def variable_name(section: str, key: str) -> str:
    return f"FTRUN_{section}_{key}".upper()


def setting_from_text(text: str) -> SettingValue:
    """Parses `section.key=value` as given to --set; the value is read as YAML."""
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot or not key:
        raise UsageError(f"--set takes section.key=value, such as snapshot.every=5, not {text!r}")
    return SettingValue(section, key, plain_value(value), f"--set {text}")


def plain_value(text: str) -> object:
    """Reads text from a flag or a variable as YAML; text that is not YAML stays text."""
    try:
        return yaml.load(text, Loader=PlainLoader)
    except (yaml.YAMLError, ValueError):  # 2024-13-45 is a date that does not exist
        return text


def read_profile(path: Path) -> ProfileLayer:
    """Reads the settings of a file with their line numbers; unreadable parts are in `problems`."""
    source = shown_path(path)
    data = path.read_bytes()
    if len(data) > MAX_PROFILE_BYTES:
        problem = f"it has {len(data)} bytes, and a profile has at most {MAX_PROFILE_BYTES}"
        return ProfileLayer(source, problems=(problem,))
    try:
        loader = PlainLoader(data)
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        return ProfileLayer(source, problems=(yaml_problem(error),))
    if node is None:
        return ProfileLayer(source)
    reader = _NodeReader(source, loader)
    try:
        reader.read(node)
    except yaml.YAMLError as error:
        reader.problems.append(yaml_problem(error))
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
            known = what in fields_of(Profile) or what == "a profile"
            text = "should hold keys with values" if known else unknown_key(what, Profile)
            self.problems.append(f"line {line}: {what}: {text}")
            return
        seen: set[str] = set()
        for key_node, value in node.value:
            key = str(key_node.value)
            if key in seen:
                self.problems.append(f"line {key_node.start_mark.line + 1}: {key} occurs twice")
            seen.add(key)
            yield key, value


def _environment_layer(variables: Mapping[str, str]) -> ProfileLayer:
    settings = []
    renamed = (old.partition(".")[::2] for old in RENAMED_KEYS)
    for section, key in (*known_keys(), *renamed):
        for name in (*_SHORT_NAMES.get((section, key), ()), variable_name(section, key)):
            if name in variables and name not in INTERNAL_NAMES:
                value = plain_value(variables[name])
                settings.append(SettingValue(section, key, value, f"environment {name}"))
    return ProfileLayer("the environment", tuple(settings))


def _problems(layer: ProfileLayer) -> list[str]:
    nested: dict[str, dict[str, object]] = {}
    origins: dict[str, str] = {}
    for setting in layer.settings:
        nested.setdefault(setting.section, {})[setting.key] = setting.value
        origins[str(setting)] = setting.origin
        origins.setdefault(setting.section, setting.origin)
    found = profile_problems(nested)
    return [
        *layer.problems,
        *(f"{origins['.'.join(map(str, one.path[:2]))]}: {one}" for one in found),
    ]


def profile_problems(nested: Mapping[str, Mapping[str, object]]) -> list[Problem]:
    found = [
        Problem((section, key), f"is now {RENAMED_KEYS[f'{section}.{key}']}")
        for section, values in nested.items()
        for key in values
        if f"{section}.{key}" in RENAMED_KEYS
    ]
    renamed = {one.path for one in found}
    known = {
        section: {key: value for key, value in values.items() if (section, key) not in renamed}
        for section, values in nested.items()
    }
    check({name: one for name, one in known.items() if one or not nested[name]}, Profile, found)
    for (section, key), rule in _RULES.items():
        if (value := nested.get(section, {}).get(key)) is not None:
            found += [Problem((section, key), text) for text in rule(value)]
    return found


def _scheme_problems(scheme: object) -> Iterator[str]:
    match = re.fullmatch(r"(\d+)\+(\d+)", str(scheme))
    if match and (int(match[1]) > MAX_DATA or int(match[2]) > MAX_PARITY):
        yield f"should be at most {MAX_DATA}+{MAX_PARITY}, and is {scheme}"


def _signal_problems(names: object) -> Iterator[str]:
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name not in FORWARDED_NAMES:
            possible = f"; possible are {', '.join(FORWARDED_NAMES)}"
            hint = suggestion(name, list(FORWARDED_NAMES)) or possible
            yield f"{name!r} cannot be forwarded{hint}"


_RULES: Mapping[tuple[str, str], Callable[[object], Iterator[str]]] = {
    ("erasure", "scheme"): _scheme_problems,
    ("stop", "forward_signals"): _signal_problems,
}
"""Rules that need a module which `ftrun.config` does not import."""


def yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}: {problem}" if mark else str(problem)
