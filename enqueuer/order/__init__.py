"""What comes next, as data: no threads, no locks, no clocks, no signals, no I/O."""
