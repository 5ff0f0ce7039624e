"""DECISION: how the state of a node survives its loss. Pure, but for ISA-L behind the codec."""
