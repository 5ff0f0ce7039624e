"""`ftrun checkpoints export`: a checkpoint as safetensors, a state dict or torch's DCP."""
