"""Identity of a process on another node, and reasons why two processes may not communicate.

Runs in:  agent, SMP. Pure.
Takes in: the identity that each side states in the handshake.
Gives:    a reason for the user of the asking side, or an empty string.
"""

from typing import Annotated, Literal

import msgspec

import ftrun

Purpose = Literal["agent", "smp", "probe", "road"]
"""A "probe" and a "road" are connections of an agent to another agent for one measurement. A probe
measures the link. A "road" measures one path: one rail in one direction."""

_TALKS_WITH: dict[Purpose, Purpose] = {
    "agent": "agent", "smp": "smp", "probe": "agent", "road": "agent",
}  # fmt: skip
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")]
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Version = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9.+_-]{0,100}\Z")]


class PeerIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identity of a peer: run, purpose, node, incarnation, and software versions."""

    run_id: _Name
    purpose: Purpose
    node_id: _Name
    incarnation: _Number
    torch: _Version = ""
    ftrun: _Version = ftrun.__version__

    def __str__(self) -> str:
        return f"{self.purpose} of node {self.node_id}"


def unfit(own: PeerIdentity, peer: PeerIdentity) -> str:
    """Why `own` must not communicate with `peer`, worded for the user of `own`; empty if it may."""
    if peer.run_id != own.run_id:
        return (
            f"it belongs to run {peer.run_id}, and this is run {own.run_id}. Give the same "
            "--run-id to every node, or another --rdzv-endpoint to another run"
        )
    if own.purpose != _TALKS_WITH[peer.purpose] and peer.purpose != _TALKS_WITH[own.purpose]:
        return f"it wants to speak to an {peer.purpose}, and this is an {own.purpose}"
    if peer.node_id == own.node_id:
        return (
            f"both nodes are named {own.node_id}. Name each one differently with --node-id, and "
            "do not start two on one machine without it"
        )
    for what, here, there in (
        ("ftrun", own.ftrun, peer.ftrun),
        ("torch", own.torch, peer.torch),
    ):
        if here != there:
            return (
                f"node {peer.node_id} has {what} {there or 'of an unknown version'}, and node "
                f"{own.node_id} has {what} {here or 'of an unknown version'}. Install the same "
                "version on every node"
            )
    return ""
