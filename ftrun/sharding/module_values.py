"""Merges what old ranks saved of their modules, so that ranks with other modules continue with it.

Runs in:  the process that converts checkpoints; worker, inside `attach`, when a version is restored
          into another world. Pure.
Takes in: parts of the plain values of old ranks: the rank whose values are taken over first, then
          those of other pipeline stages.
Gives:    the same parts for a rank that has modules of several old ranks.

Rule 1: of a module or a tensor that several old ranks hold, the values of the first one are used.
Rule 2: training flags are saved only where they differ from the parent's. Stages that agree on the
        flags of the modules that they share have therefore flags that can be joined.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ftrun.sharding.partition import SplitImpossible
from ftrun.sharding.world_layout import WorldLayout
from ftrun.snapshot import plain_values as plain

Plain = dict[str, Any]


def merged(saved: Iterable[tuple[Mapping[str, Any], Collection[str]]]) -> Plain:
    """Values by name, of ranks that hold different names.

    Args:
        saved: of each rank, its values and the names that it holds. The first rank that holds a
            name decides whether there is a value.
    """
    found: Plain = {}
    known: set[str] = set()
    for values, held in saved:
        if not known.issuperset(held):
            found |= {n: v for n, v in values.items() if n not in known and n not in found}
            known.update(held)
    return found


def modules_with(names: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for name in names:
        path = name.rpartition(".")[0]
        while path and path not in found:
            found.add(path)
            path = path.rpartition(".")[0]
    return found


def gradients_merged(
    saved: Sequence[tuple[Plain, Collection[str]]], frozen: Collection[str]
) -> Plain:
    """One part `gradients` from those of ranks, each with the rank's parameters of optimizers."""
    usual = saved[0][0]["usual"]

    def present(part: Plain, parameters: Collection[str]) -> dict[str, bool]:
        except_ = set(part["except"])
        return {
            name: (part["usual"] and name not in frozen) != (name in except_) for name in parameters
        }

    found = merged((present(part, parameters), parameters) for part, parameters in saved)
    except_ = [name for name, has in found.items() if has != (usual and name not in frozen)]
    return {"usual": usual, "except": except_}


def parameters_of(groups: Mapping[str, Iterable[Plain]]) -> dict[str, None]:
    """The parameters of all groups, in their order."""
    return {name: None for some in groups.values() for group in some for name in group["params"]}


class ModuleValues:
    """Makes parts for new ranks from those of each old rank, by layout rules.

    Args:
        parts: encoded, of each old rank.
        groups: parameter groups of each old rank, by the names in a pipeline of one stage.
        frozen: names of frozen parameters, likewise.
    """

    def __init__(
        self,
        parts: Sequence[Mapping[str, bytes]],
        source: WorldLayout,
        target: WorldLayout,
        *,
        groups: Sequence[Mapping[str, Iterable[Plain]]],
        frozen: Collection[str],
    ) -> None:
        self._held = source.entries
        self._target = target
        self._groups = groups
        self._frozen = set(frozen)
        self._makers: dict[str, _Make] = {
            "training": self._training,
            "learned_others": self._learned_others,
            "gradients": self._gradients,
            "modules": self._modules,
        }
        # By the names in a pipeline of one stage.
        self._saved = [
            {
                name: _renamed(name, plain.decode(one[name]), names.whole)
                for name in self._makers
                if name in one
            }
            for one, names in zip(parts, source.names, strict=True)
        ]

    def of(self, rank: int, stages: Sequence[int]) -> dict[str, bytes]:
        return {
            name: plain.encode(make(rank, stages))
            for name, make in self._makers.items()
            if all(name in self._saved[old] for old in stages)  # older versions did not save all
        }

    # --- inside ------------------------------------------------------------------------------

    def _training(self, rank: int, stages: Sequence[int]) -> Plain:
        return self._with_paths(rank, _joined(self._saved[old]["training"] for old in stages))

    def _learned_others(self, rank: int, stages: Sequence[int]) -> list[str]:
        saved = ((self._saved[old]["learned_others"], self._held[old]) for old in stages)
        return list(self._with_names(rank, merged(saved)))

    def _gradients(self, rank: int, stages: Sequence[int]) -> Plain:
        saved = [
            (self._saved[old]["gradients"], parameters_of(self._groups[old])) for old in stages
        ]
        made = gradients_merged(saved, self._frozen)
        return {**made, "except": list(self._with_names(rank, dict.fromkeys(made["except"])))}

    def _modules(self, rank: int, stages: Sequence[int]) -> Plain:
        saved = [self._saved[old]["modules"] for old in stages]
        made = {name: _joined(one.get(name, {}) for one in saved) for name in _OF_MODULES}
        names, own = self._target.entries[rank], self._target.names[rank].own
        tied = {other: own(name) for other, name in made["tied"].items() if name in names}
        return {
            **saved[0],
            "tied": self._with_paths(rank, tied),
            "buffers": list(self._with_names(rank, made["buffers"])),
            "no_buffers": list(self._with_paths(rank, made["no_buffers"])),
            "strides": self._with_names(rank, made["strides"]),
        }

    def _with_names(self, rank: int, values: Plain) -> Plain:
        names, own = self._target.entries[rank], self._target.names[rank].own
        return {own(name): value for name, value in values.items() if name in names}

    def _with_paths(self, rank: int, values: Plain) -> Plain:
        here = {}
        for path, value in values.items():
            with suppress(SplitImpossible):  # a layer without tensors need not be counted by rules
                if self._target.has_module(rank, path):
                    here[path] = value
        return _paths_renamed(here, self._target.names[rank].own)


_Make = Callable[[int, Sequence[int]], Any]
_Rename = Callable[[str], str]

_OF_MODULES = ("tied", "buffers", "no_buffers", "strides")
"""Keys of the part `modules`; its other key, `names`, is equal on all ranks."""


def _joined(saved: Iterable[Plain]) -> Plain:
    return merged((one, one) for one in saved)


def _renamed(name: str, part: Any, rename: _Rename) -> Any:
    if name == "training":
        return _paths_renamed(part, rename)
    if name == "learned_others":
        return dict.fromkeys(map(rename, part))
    if name == "gradients":
        return {**part, "except": list(map(rename, part["except"]))}
    tied = {other: rename(saved) for other, saved in part.get("tied", {}).items()}
    return {
        **part,
        "tied": _paths_renamed(tied, rename),
        "buffers": dict.fromkeys(map(rename, part.get("buffers", ()))),
        "no_buffers": _paths_renamed(dict.fromkeys(part.get("no_buffers", ())), rename),
        "strides": {rename(name): stride for name, stride in part.get("strides", {}).items()},
    }


def _paths_renamed(values: Plain, rename: _Rename) -> Plain:
    found = {}
    for path, value in values.items():
        with suppress(SplitImpossible):  # a layer without tensors need not be counted by rules
            found[rename(f"{path}.").removesuffix(".")] = value
    return found
