"""`ftrun explain`: the verdict on a hang, from dumps of torch's flight recorders alone."""
