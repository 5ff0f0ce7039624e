"""Pure: which rank of a world holds which part of which tensor."""
