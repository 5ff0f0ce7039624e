"""Pure, except for ISA-L behind the codec: how the state of a node survives its loss."""
