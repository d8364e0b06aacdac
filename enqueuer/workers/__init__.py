"""Code that runs inside a worker of any backend."""
