"""Where workers run: threads, processes, Ray actors."""
