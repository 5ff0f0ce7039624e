"""Parses a file of layout rules.

Gives `ShardingRules`, or RulesInvalid with line, column, expected and actual content of every
mistake in the file, not only of the first.

The YAML tree is walked directly and never converted to objects, because it has line numbers. An
alias costs only the visits to the node that it names.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import yaml

from ftrun.errors import RulesInvalid
from ftrun.sharding.rules import (
    TURN,
    DimensionSplit,
    FlatBuffer,
    FusedPart,
    Mesh,
    NamePattern,
    ShardingRule,
    ShardingRules,
    SharingKind,
    StagePlacement,
    UnevenPolicy,
)

_CUT_KEYS = ("axis", "dim", "parts", "unit", "sizes", "share", "size", "pad_to", "uneven")
_FRAGMENT_KEYS = ("parts", "unit", "sizes")
_PART_KEYS = ("weight", "unit", "sizes", "share")
_DEALT_KEYS = ("sizes", "numbered", "empty")
_PLACEMENT_KEYS = ("name", "axis", "at", "of", "turns", "tied", *_DEALT_KEYS)
_RULE_KEYS: dict[SharingKind, tuple[tuple[str, ...], list[str]]] = {
    SharingKind.AVERAGE: (("name", "axis"), ["name", "axis"]),
    SharingKind.FLAT: (("name", "axis", "pad_to", "tensors", "each"), ["axis"]),
}
"""Possible and needed keys of a rule; other kinds have cuts."""
_UNEVEN = {one.value: one for one in UnevenPolicy}
_NUMBERED = {"through": False, "anew": True}
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
"""Decimal integers only, because YAML's octal and sexagesimal numbers are never intended here."""
_SHORT = 40
_T = TypeVar("_T")


class _NotThis(Exception):
    """A node is not the expected one; the problem is recorded."""


def read_rules(text: str, *, source: str) -> ShardingRules:
    """Parses YAML; raises RulesInvalid with all mistakes. `source` is for messages."""
    reader = _Reader()
    try:
        found = reader.read(yaml.compose(text, Loader=yaml.SafeLoader), source)
    except yaml.YAMLError as error:
        raise RulesInvalid(source=source, problems=[_yaml_problem(error)]) from error
    except _NotThis as error:
        raise RulesInvalid(source=source, problems=reader.problems) from error
    if reader.problems:
        raise RulesInvalid(source=source, problems=reader.problems)
    return replace(found, text=text)


def carried(rules: ShardingRules) -> dict[str, object]:
    return {"text": rules.text, "source": rules.source, "mesh": dict(rules.mesh.axes)}


def read_carried(saved: Mapping[str, Any]) -> ShardingRules:
    """The rules that a snapshot carries, on the mesh that took it."""
    rules = read_rules(saved["text"], source=f"{saved['source']} of the snapshot")
    return rules.on(rules.mesh.with_sizes(saved["mesh"]))


class _Reader:
    """Walks the tree and records mistakes; the walk continues after a mistake if possible."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._axes: tuple[str, ...] = ()

    def read(self, root: yaml.Node | None, source: str) -> ShardingRules:
        if root is None:
            self.problems.append("line 1, column 1: expected mesh and rules, and the file is empty")
            raise _NotThis
        kinds = [kind.value for kind in SharingKind]
        keys = ("mesh", "batches", "strict", *kinds, "unique")
        parts = self._mapping(root, "rules", keys, ["mesh"])
        mesh = self._mesh(parts["mesh"], parts.get("batches"))
        rules: list[ShardingRule] = []
        for kind in SharingKind:
            for node in self._listed(parts.get(kind.value), f"a list of {kind.value} rules"):
                rules += self._each(node, lambda node, kind=kind: self._rules(kind, node))  # type: ignore[misc]
        placements: list[StagePlacement] = []
        for node in self._listed(parts.get("unique"), "a list of unique rules"):
            placements += self._each(node, self._placements)
        is_strict = self._optional(parts, "strict", self._boolean, False)
        return ShardingRules(source, mesh, tuple(rules), tuple(placements), is_strict=is_strict)

    # --- the parts of a file ---------------------------------------------------------------

    def _mesh(self, node: yaml.Node, batches: yaml.Node | None) -> Mesh:
        entries = self._pairs(node, "the axes of the mesh with their sizes, such as {dp: 2, tp: 2}")
        axes = tuple((key, self._integer(value, least=1)) for key, _, value in entries)
        if not axes:
            self._wrong(node, "at least one axis, such as dp: 2")
        self._axes = tuple(name for name, _ in axes)
        if batches is None:
            return Mesh(axes, tuple(name for name in self._axes if name == "dp"))
        return Mesh(axes, tuple(self._axis(one) for one in self._one_or_more(batches)))

    def _rules(self, kind: SharingKind, node: yaml.Node) -> list[ShardingRule]:
        if kind in (SharingKind.REPLICATE, SharingKind.OWN):
            return [self._rule(kind, one) for one in self._plain_names(node)]
        keys, needed = _RULE_KEYS.get(kind, (("name", "cuts", *_CUT_KEYS), ["name"]))
        parts = self._mapping(node, f"a rule under {kind.value}", keys, needed)
        if kind is SharingKind.FLAT:
            return self._flat_rules(node, parts)
        names = self._one_or_more(parts["name"])
        if kind is SharingKind.AVERAGE:
            axis = self._axis(parts["axis"])
            return [self._rule(kind, name, axis=axis) for name in names]
        cuts = self._cuts(kind, node, parts)
        return [self._rule(kind, name, cuts=cuts) for name in names]

    def _rule(
        self,
        kind: SharingKind,
        name: yaml.Node,
        *,
        cuts: tuple[DimensionSplit, ...] = (),
        flat: FlatBuffer | None = None,
        axis: str = "",
    ) -> ShardingRule:
        pattern = self._pattern(name)
        return ShardingRule(kind, pattern, name.start_mark.line + 1, cuts, flat, axis)

    def _flat_rules(self, node: yaml.Node, parts: dict[str, yaml.Node]) -> list[ShardingRule]:
        """One buffer with several tensors, or a buffer for each of them."""
        axis = self._axis(parts["axis"])
        pad_to = self._optional(parts, "pad_to", self._positive, 1)
        if {"name", "tensors"} <= parts.keys() and "each" not in parts:
            tensors = tuple((name.value, shape) for name, shape in self._shapes(parts["tensors"]))
            names = [(name, tensors) for name in self._one_or_more(parts["name"])]
        elif "each" in parts and not {"name", "tensors"} & parts.keys():
            names = [(name, ((name.value, shape),)) for name, shape in self._shapes(parts["each"])]
        else:
            self._wrong(node, "either name: and tensors:, or each:")
        flats = [(name, FlatBuffer(axis, pad_to, tensors)) for name, tensors in names]
        return [self._rule(SharingKind.FLAT, name, flat=flat) for name, flat in flats]

    def _shapes(self, node: yaml.Node) -> list[tuple[yaml.Node, tuple[int, ...]]]:
        what = "tensors with their shapes, such as {model.w: [4, 8]}"
        return [
            (name, tuple(self._integer(one) for one in self._items(value, "a shape")))
            for _, name, value in self._pairs(node, what)
        ]

    def _placements(self, node: yaml.Node) -> list[StagePlacement]:
        parts = self._mapping(node, "a rule under unique", _PLACEMENT_KEYS, ["name", "axis"])
        axis = self._axis(parts["axis"])
        if ("at" in parts) == ("of" in parts):
            self._wrong(node, "either at: with coordinates, or of: with how many numbers there are")
        at = None
        if "at" in parts:
            at = tuple(self._coordinate(one) for one in self._one_or_more(parts["at"]))
            if dealt := [key for key in _DEALT_KEYS if key in parts]:
                self._wrong(parts[dealt[0]], f"{dealt[0]} together with of:, not with at:")
        elif "tied" in parts:
            self._wrong(parts["tied"], "tied together with at:, not with of:")
        tied = self._optional(parts, "tied", self._pattern, None)
        empty = self._optional(parts, "empty", self._integers, None)
        placement = StagePlacement(
            NamePattern(""),
            0,
            axis,
            at,
            self._optional(parts, "of", self._positive, 0),
            self._optional(parts, "sizes", self._integers, None),
            self._optional(parts, "turns", self._positive, 1),
            self._optional(parts, "numbered", lambda one: self._word(one, _NUMBERED), False),
            empty or (),
            tied,
        )
        return [self._placement(name, placement) for name in self._one_or_more(parts["name"])]

    def _placement(self, name: yaml.Node, placement: StagePlacement) -> StagePlacement:
        pattern = self._pattern(name)
        if placement.at is None and len([word for word in pattern.words if word != TURN]) != 1:
            self._wrong(name, "one number in the name, such as model.layers.{n}.*, for of:")
        tied = placement.tied
        if tied is not None and (
            "*" in f"{pattern}{tied}" or {*pattern.words, *tied.words} - {TURN}
        ):
            self._wrong(name, "whole names, without * and numbers, for tied:")
        return replace(placement, pattern=pattern, line=name.start_mark.line + 1)

    # --- cuts --------------------------------------------------------------------------------

    def _cuts(
        self, kind: SharingKind, node: yaml.Node, parts: dict[str, yaml.Node]
    ) -> tuple[DimensionSplit, ...]:
        given = [key for key in _CUT_KEYS if key in parts]
        several = [(node, {key: parts[key] for key in given})]
        if "cuts" in parts:
            if given:
                self._wrong(parts[given[0]], f"{given[0]} inside of cuts, where there are several")
            items = self._items(parts["cuts"], "a list of cuts")
            several = [(one, self._mapping(one, "a cut", _CUT_KEYS, [])) for one in items]
        uneven = [one[key] for _, one in several for key in _FRAGMENT_KEYS if key in one]
        if kind is SharingKind.FRAGMENT and not uneven:
            self._wrong(node, "parts, sizes or unit: without them the rule belongs under shard")
        if kind is SharingKind.SHARD and uneven:
            keys = ", ".join(_FRAGMENT_KEYS)
            self._wrong(uneven[0], f"none of {keys} under shard: they belong under fragment")
        return tuple(self._cut(one, keys_there) for one, keys_there in several)

    def _cut(self, node: yaml.Node, parts: dict[str, yaml.Node]) -> DimensionSplit:
        for key in ("axis", "dim"):
            if key not in parts:
                self._wrong(node, f"the key {key}, together with {', '.join(parts) or 'others'}")
        if "pad_to" in parts and "sizes" in parts:
            self._wrong(parts["pad_to"], "either sizes or pad_to")
        size = self._optional(parts, "size", self._positive, None)
        common = self._part(parts, 1, FusedPart())
        fused: list[FusedPart] = []
        if "parts" in parts:
            fused = self._fused_parts(parts["parts"], common)
        return DimensionSplit(
            axis=self._axis(parts["axis"]),
            dim=self._integer(parts["dim"], least=None),
            parts=tuple(fused) or (common,),
            size=size,
            pad_to=self._optional(parts, "pad_to", self._positive, 0),
            uneven=self._optional(
                parts, "uneven", lambda one: self._word(one, _UNEVEN), UnevenPolicy.BALANCED
            ),
        )

    def _fused_parts(self, node: yaml.Node, common: FusedPart) -> list[FusedPart]:
        """A list, or the number of equal parts."""
        if isinstance(node, yaml.ScalarNode):
            return [common] * self._positive(node)
        return [self._fused(one, common) for one in self._items(node, "a list of parts")]

    def _fused(self, node: yaml.Node, common: FusedPart) -> FusedPart:
        if isinstance(node, yaml.MappingNode):
            parts = self._mapping(node, "a part", _PART_KEYS, ["weight"])
            return self._part(parts, self._positive(parts["weight"]), common)
        return replace(common, weight=self._positive(node))

    def _part(self, parts: dict[str, yaml.Node], weight: int, common: FusedPart) -> FusedPart:
        return FusedPart(
            weight,
            self._optional(parts, "unit", self._positive, common.unit),
            self._optional(parts, "sizes", self._integers, common.sizes),
            self._optional(parts, "share", self._boolean, common.is_shared),
        )

    # --- nodes -------------------------------------------------------------------------------

    def _each(self, node: yaml.Node, read: Callable[[yaml.Node], list[_T]]) -> list[_T]:
        """What `read` returns; nothing if the node is wrong, so that others are read too."""
        try:
            return read(node)
        except _NotThis:
            return []

    def _wrong(self, node: yaml.Node, expected: str) -> NoReturn:
        mark = node.start_mark
        self.problems.append(
            f"line {mark.line + 1}, column {mark.column + 1}: expected {expected}, "
            f"and there is {_shown(node)}"
        )
        raise _NotThis

    def _mapping(
        self, node: yaml.Node, what: str, keys: Sequence[str], needed: Sequence[str]
    ) -> dict[str, yaml.Node]:
        found: dict[str, yaml.Node] = {}
        for key, key_node, value in self._pairs(node, what):
            if key not in keys:
                near = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
                hint = f"{near[0]}" if near else f"one of {', '.join(keys)}"
                self._wrong(key_node, f"{hint} in {what}")
            found[key] = value
        missing = [key for key in needed if key not in found]
        if missing:
            self._wrong(node, f"the key {missing[0]} in {what}")
        return found

    def _pairs(self, node: yaml.Node, what: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            self._wrong(node, f"{what}, as keys with values")
        seen: set[str] = set()
        for key_node, value in node.value:
            key = self._text(key_node)
            if key in seen:
                self._wrong(key_node, f"{key} once")
            seen.add(key)
            yield key, key_node, value

    def _listed(self, node: yaml.Node | None, what: str) -> list[yaml.Node]:
        if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
            return []
        try:
            return self._items(node, what)
        except _NotThis:
            return []

    def _items(self, node: yaml.Node, what: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode):
            self._wrong(node, what)
        return list(node.value)

    def _one_or_more(self, node: yaml.Node) -> list[yaml.Node]:
        return list(node.value) if isinstance(node, yaml.SequenceNode) else [node]

    def _plain_names(self, node: yaml.Node) -> list[yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            return self._one_or_more(node)
        return self._one_or_more(self._mapping(node, "a rule", ("name",), ["name"])["name"])

    # --- values ------------------------------------------------------------------------------

    def _optional(
        self, parts: dict[str, yaml.Node], key: str, read: Callable[[yaml.Node], _T], otherwise: _T
    ) -> _T:
        return read(parts[key]) if key in parts else otherwise

    def _pattern(self, node: yaml.Node) -> NamePattern:
        pattern = NamePattern(self._text(node))
        if len(set(pattern.words)) < len(pattern.words):
            self._wrong(node, "each number under a word of its own, such as {turn} and {n}")
        return pattern

    def _text(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or not node.value:
            self._wrong(node, "a name")
        return str(node.value)

    def _integer(self, node: yaml.Node, least: int | None = 0) -> int:
        bound = "" if least is None else f", {least} or more"
        if node.tag != "tag:yaml.org,2002:int" or not _DECIMAL.fullmatch(str(node.value)):
            self._wrong(node, f"a number{bound}")
        number = int(node.value)
        if least is not None and number < least:
            self._wrong(node, f"a number{bound}")
        return number

    def _positive(self, node: yaml.Node) -> int:
        return self._integer(node, least=1)

    def _integers(self, node: yaml.Node) -> tuple[int, ...] | None:
        return tuple(self._integer(one) for one in self._items(node, "a list of numbers"))

    def _boolean(self, node: yaml.Node) -> bool:
        if not isinstance(node, yaml.ScalarNode) or node.value not in ("true", "false"):
            self._wrong(node, "true or false")
        return bool(node.value == "true")

    def _axis(self, node: yaml.Node) -> str:
        name = self._text(node)
        if name not in self._axes:
            self._wrong(node, f"an axis of the mesh ({', '.join(self._axes)})")
        return name

    def _coordinate(self, node: yaml.Node) -> int:
        """`first`, `last`, or a number; negative ones count from the last."""
        words = {"first": 0, "last": -1}
        if isinstance(node, yaml.ScalarNode) and node.value in words:
            return words[node.value]
        return self._integer(node, least=None)

    def _word(self, node: yaml.Node, words: Mapping[str, _T]) -> _T:
        name = self._text(node)
        if name not in words:
            self._wrong(node, " or ".join(words))
        return words[name]


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        keys = ", ".join(str(key.value) for key, _ in node.value[:3])
        return f"a mapping of {keys or 'nothing'}"
    if isinstance(node, yaml.SequenceNode):
        return f"a list of {len(node.value)}"
    text = str(node.value)
    return repr(text if len(text) <= _SHORT else f"{text[:_SHORT]}...") if text else "nothing"


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    context = getattr(error, "context", None)
    expected = f"expected YAML ({context})" if context else "expected YAML"
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{place}{expected}, and {problem}"
