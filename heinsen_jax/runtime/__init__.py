"""The process: memory allocator, caches, signals, other processes, and what they run on."""
