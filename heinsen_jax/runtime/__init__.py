"""The process: command line, memory allocator, caches, signals, other processes and machines."""
