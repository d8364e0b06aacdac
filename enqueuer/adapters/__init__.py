"""Adapters: what turns an enqueuer into what a framework likes to eat.

One framework a file, to be imported by those who use it: `enqueuer.adapters.torch`, `.cuda`,
`.tensorflow`, `.keras`, `.jax`. Each needs its framework: `pip install 'enqueuer[torch]'`.
"""
