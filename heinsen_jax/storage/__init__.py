"""Files on disks and in buckets: atomic writes, hashes and locks."""
