"""Settings of a run over several nodes, with changes by the name of a key."""

import os
from typing import Any

from msgspec.structs import replace

from ftrun.config.cluster import ClusterSize, MembershipSettings, NodesSpec
from ftrun.config.profile import NetworkConfig, Profile
from ftrun.wire.transport.secret import SECRET_BYTES, Secret

_SECTIONS = ("nodes", "restart", "stop")


def node(size: ClusterSize, host: str = "a.local", port: int = 29400) -> NodesSpec:
    return NodesSpec(
        min_nodes=size.min_nodes,
        max_nodes=size.max_nodes,
        spares=size.spares,
        endpoint_host=host,
        endpoint_port=port,
        node_id="a",
    )


def made_settings(
    size: ClusterSize, host: str = "a.local", **changes: object
) -> MembershipSettings:
    """Defaults without a network plan, which needs paths in the test."""
    profile = Profile(network=NetworkConfig(plan="off"))
    return changed(MembershipSettings(profile=profile, node=node(size, host)), **changes)


def changed(settings: MembershipSettings, **changes: Any) -> MembershipSettings:
    """The same with other values.

    Args:
        settings: of several nodes.
        changes: sections, keys of nodes, restart and stop, fields of the node or of the settings;
            `cluster_size`: the size; `has_checkpoints`: with a directory or without.
    """
    for name, value in changes.items():
        settings = _changed(settings, name, value)
    return settings


def _changed(settings: MembershipSettings, name: str, value: Any) -> MembershipSettings:
    profile, its_node = settings.profile, settings.node
    assert its_node is not None
    if name == "cluster_size":
        numbers = {key: getattr(value, key) for key in value.__struct_fields__}
        return replace(settings, node=replace(its_node, **numbers))
    if name == "has_checkpoints":
        name, value = "checkpoint", replace(profile.checkpoint, directory="/x" if value else None)
    if name in MembershipSettings.__struct_fields__:
        return replace(settings, **{name: value})
    if name in NodesSpec.__struct_fields__:
        return replace(settings, node=replace(its_node, **{name: value}))
    for section in _SECTIONS:
        before = getattr(profile, section)
        if name in before.__struct_fields__:
            name, value = section, replace(before, **{name: value})
            break
    return replace(settings, profile=replace(profile, **{name: value}))


def make_secret() -> Secret:
    return Secret(os.urandom(SECRET_BYTES))
