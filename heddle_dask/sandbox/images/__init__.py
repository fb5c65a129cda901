"""Images of containers as files: read without a daemon, unpacked once on each machine."""
