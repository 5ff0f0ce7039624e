"""DECISION: how the state of a node survives its loss. Pure, except for ISA-L behind the codec."""
