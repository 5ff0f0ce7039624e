"""Messages, frames, sockets and shared memory: the only way between processes."""
