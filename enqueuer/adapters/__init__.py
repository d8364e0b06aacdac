"""Adapters: each turns an enqueuer into a loader or dataset of one framework.

Import the one that you use: `enqueuer.adapters.torch`, `.cuda`, `.tensorflow`, `.keras` or
`.jax`. Each needs its framework; without it, the import raises an error that names the command.
"""
