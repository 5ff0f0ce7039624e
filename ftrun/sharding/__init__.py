"""Which rank of a world holds which part of which tensor, said by rules over names. Pure."""
